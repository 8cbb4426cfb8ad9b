"""A deterministic simulator: the real protocol code through bad days, one seed at a time.

Coordinator, agents, channels, stores and sinks run on one thread in virtual time; Spark is a model that plans, runs and
commits batches. Nothing here reads the real clock, the disk or real randomness: a seed is a story, byte for byte.
"""

from cutline.testing.simulator.runner import Report, run_seeds
from cutline.testing.simulator.simulation import Outcome, simulate

__all__ = ["Outcome", "Report", "run_seeds", "simulate"]
