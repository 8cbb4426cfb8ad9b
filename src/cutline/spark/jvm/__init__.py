"""The Java process: starting it, early if possible, and ending it."""
