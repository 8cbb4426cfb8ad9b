"""One room per outside system: sinks, sources, readers, guards."""
