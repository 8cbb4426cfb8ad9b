"""The coordinator's records."""
