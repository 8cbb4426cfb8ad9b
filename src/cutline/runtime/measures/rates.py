"""How fast counters grow, over the last seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

#: Shorter and a rate jumps with every batch; longer and it says too late that nothing comes anymore.
WINDOW_SECONDS = 10.0
#: Counts closer to one another than this are not kept.
_APART_SECONDS = 0.5


class Rates:
    """Remembers counters for a while. Many threads may ask."""

    def __init__(
        self, *, window_seconds: float = WINDOW_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._window = window_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: The first one is the newest that is at least a window old, if one is.
        self._seen: deque[tuple[float, dict[str, int]]] = deque()

    def per_second(self, counts: Mapping[str, int]) -> dict[str, float]:
        """The rates of counters, given how far they are now; 0 for one that was never seen before."""
        now = self._monotonic()
        with self._lock:
            while len(self._seen) > 1 and now - self._seen[1][0] >= self._window:
                self._seen.popleft()
            began, before = self._seen[0] if self._seen else (now, {})
            if not self._seen or now - self._seen[-1][0] >= _APART_SECONDS:
                self._seen.append((now, dict(counts)))
        seconds = now - began
        if seconds < _APART_SECONDS:
            return dict.fromkeys(counts, 0.0)
        # A counter that was reset, because its operator was restored, begins anew.
        return {name: max(count - before.get(name, count), 0) / seconds for name, count in counts.items()}
