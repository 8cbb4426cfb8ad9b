"""Spark's checkpoint directory as a file format: no pyspark, no flow."""
