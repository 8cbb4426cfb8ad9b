"""The clock of a process, in the one unit the protocol uses."""

from __future__ import annotations

import time

_STARTED_WALL_NS = time.time_ns()
_STARTED_MONOTONIC_NS = time.monotonic_ns()


def now_ms() -> int:
    """Milliseconds since 1970 as this process counts them: a wall clock that is set does not move its deadlines."""
    return (_STARTED_WALL_NS + time.monotonic_ns() - _STARTED_MONOTONIC_NS) // 1_000_000
