"""Flows as they run: the commands that start, watch and stop them."""
