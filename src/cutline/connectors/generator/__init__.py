"""Generated rows, for demos, tests and benchmarks."""
