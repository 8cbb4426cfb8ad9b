"""Which generations, epochs and log entries count, which stay, and how operators evolve."""
