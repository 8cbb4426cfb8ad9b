"""The one retry loop: how often, how long, with which pauses, after which errors.

Code that retries something other than a call (restarting a query, an upload that waits for its turn) takes the pauses
from ``cutline.base.backoff`` and has its own loop.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from cutline.base.backoff import NO_PAUSE, Backoff

T = TypeVar("T")

Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Attempts end when the limit or the deadline is reached; at least one is made.

    Only what is idempotent, or certainly had no effect, may be retried.
    """

    #: Most attempts, the first one included; None: as many as fit into the time.
    limit: int | None = None
    #: No pause ends later than this after the first attempt began; None: no deadline.
    deadline_s: float | None = None
    backoff: Backoff = NO_PAUSE
    #: A monotonic clock, in seconds.
    now_s: Callable[[], float] = time.monotonic
    #: Returns True to end the attempts, so that the ``wait`` of a stop event can be used here.
    sleep: Callable[[float], object] = time.sleep
    #: A number from 0 to 1, for the jitter.
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.limit is None and self.deadline_s is None:
            raise ValueError("a retry needs a limit or a deadline")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: at least one attempt is made")

    def call(
        self,
        attempt: Callable[[], T],
        *,
        on: Errors,
        is_final: Callable[[Exception], bool] = lambda error: False,
        before_pause: Callable[[Exception, float], None] = lambda error, pause_s: None,
    ) -> T:
        """The first result. Raises the last attempt's error; an error that is not ``on`` or is final is raised at once.

        ``before_pause`` gets the error and the length of the pause that follows it: the place for a log line.
        """
        started_s = self.now_s()
        for number in itertools.count(1):
            try:
                return attempt()
            except on as error:
                pause_s = None if is_final(error) else self._pause_s(number, started_s)
                if pause_s is None:
                    raise
                before_pause(error, pause_s)
                if self._is_interrupted(pause_s):
                    raise
        raise AssertionError("unreachable")

    def attempts(self) -> Iterator[int]:
        """The numbers of the attempts, from 1, with the pauses between them; for attempts that fail with a value.

        The caller leaves the loop when an attempt succeeds. The loop's end means that all of them failed.
        """
        started_s = self.now_s()
        for number in itertools.count(1):
            yield number
            pause_s = self._pause_s(number, started_s)
            if pause_s is None or self._is_interrupted(pause_s):
                return

    def _pause_s(self, failures: int, started_s: float) -> float | None:
        """None: that was the last attempt."""
        if self.limit is not None and failures >= self.limit:
            return None
        pause_s = self.backoff.pause_s(failures, self.chance() if self.backoff.jitter else 0.0)
        if self.deadline_s is not None and self.now_s() + pause_s >= started_s + self.deadline_s:
            return None
        return pause_s

    def _is_interrupted(self, pause_s: float) -> bool:
        return pause_s > 0 and self.sleep(pause_s) is True
