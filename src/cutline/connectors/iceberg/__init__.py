"""Apache Iceberg tables."""
