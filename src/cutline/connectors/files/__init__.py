"""Spark's own file source."""
