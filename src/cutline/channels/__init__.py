"""Channels: the durable, ordered logs between operators, and the Arrow segments their entries name."""
