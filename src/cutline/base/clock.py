"""The clock of a process, in the one unit the protocol uses; and a clock that tests move by hand."""

from __future__ import annotations

import time

#: Linux has one that also counts while a laptop sleeps: checkpoints after that bear the right time.
_COUNTING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_STARTED_WALL_NS = time.time_ns()
_STARTED_COUNTING_NS = time.clock_gettime_ns(_COUNTING)


def now_ms() -> int:
    """Milliseconds since 1970 as this process counts them: a wall clock that is set does not move its deadlines."""
    return (_STARTED_WALL_NS + time.clock_gettime_ns(_COUNTING) - _STARTED_COUNTING_NS) // 1_000_000


class ManualClock:
    """Time passes only in ``sleep``, which returns immediately."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        #: The length of each sleep, in order.
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._now_s += seconds
