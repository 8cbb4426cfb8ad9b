"""A user's function as a sink."""
