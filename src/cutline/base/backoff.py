"""How long to pause before the next attempt. Pure, so that the protocol may use it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that grow with every failure in a row, up to a limit."""

    #: The pause after the first failure.
    first_s: float
    #: No pause is longer.
    limit_s: float = float("inf")
    factor: float = 2.0
    #: The share of a pause that may be cut at random, so that many callers do not retry at the same moment.
    jitter: float = 0.0

    def pause_s(self, failures: int, chance: float = 0.0) -> float:
        """The pause after ``failures`` failures in a row (at least one); ``chance`` is a number from 0 to 1."""
        if failures < 1:
            raise ValueError(f"{failures} failures: there is no pause before the first one")
        try:
            grown_s = self.first_s * self.factor ** (failures - 1)
        except OverflowError:
            grown_s = self.limit_s
        return min(grown_s, self.limit_s) * (1 - self.jitter * chance)


#: The next attempt follows immediately.
NO_PAUSE = Backoff(first_s=0.0)
