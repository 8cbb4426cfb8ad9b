"""Figures that the status shows: rates over time, and sizes that Spark tells."""
