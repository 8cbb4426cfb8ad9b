"""In-memory twins of adapters."""
