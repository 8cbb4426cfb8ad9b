"""The coordinator's durable records: the only place with SQL of our own."""
