"""Commands that need no flow of yours: the demo and the simulator."""
