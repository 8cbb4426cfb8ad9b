"""What a power cut may leave: a story is recorded under strace, and states of its disk are built and recovered from."""
