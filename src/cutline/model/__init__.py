"""The nouns: names, the graph, entries, checkpoints, places on disk, what a restore is asked for."""
