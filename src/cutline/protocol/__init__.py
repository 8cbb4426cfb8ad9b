"""The decisions of the checkpoint protocol. Pure: no clock, no randomness, no I/O, no threads, no logging."""
