"""Assembles the parts: the adapter of each port, and the handle of a running flow."""
