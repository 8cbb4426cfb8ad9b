"""Spark's checkpoint directory as a file format."""
