"""Recovers a flow at its start, and a region of a running flow."""
