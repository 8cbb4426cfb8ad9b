"""Everything that touches Spark. The only package that imports pyspark."""
