"""Verification and garbage collection."""
