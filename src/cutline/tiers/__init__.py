"""Checkpoints in the remote tier: upload, download, collection."""
