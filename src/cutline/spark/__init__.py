"""Everything that touches Spark. Beside it only the sources' readers import pyspark."""
