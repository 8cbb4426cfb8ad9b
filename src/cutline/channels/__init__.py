"""Channels: the durable, ordered logs between operators, and the Arrow segments that their entries name."""
