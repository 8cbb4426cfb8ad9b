"""The nouns: data only, no decisions, no I/O."""
