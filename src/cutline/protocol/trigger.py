"""When the next checkpoint begins: by the timer, by request; never too many at once, never too soon after another."""

from __future__ import annotations

from cutline.protocol.messages import CheckpointRequested

#: Most requests that wait for room; one more is refused.
POSTPONED_LIMIT = 256


class TriggerPolicy:
    """Decides; performs nothing."""

    def __init__(self, *, interval_ms: int, min_pause_ms: int = 0, max_concurrent: int = 1, first_ms: int = 0) -> None:
        """``interval_ms`` 0: no timer. ``first_ms``: the timer's first checkpoint is not taken before this time."""
        self._interval_ms = interval_ms
        self._min_pause_ms = min_pause_ms
        self._max_concurrent = max_concurrent
        self._not_before_ms = first_ms
        self._postponed: list[CheckpointRequested] = []

    def is_timed(self) -> bool:
        return self._interval_ms > 0

    def has_room(self, pending: int) -> bool:
        return pending < self._max_concurrent

    def is_due(self, now_ms: int, pending: int) -> bool:
        """Whether the timer asks for a checkpoint now."""
        return self.is_timed() and self.has_room(pending) and now_ms >= self._not_before_ms

    def next_due_ms(self, pending: int) -> int:
        return self._not_before_ms if self.has_room(pending) else self._not_before_ms + self._interval_ms

    def started(self, now_ms: int) -> None:
        self._not_before_ms = now_ms + self._interval_ms

    def ended(self, now_ms: int) -> None:
        self._not_before_ms = max(self._not_before_ms, now_ms + self._min_pause_ms)

    def postpone(self, request: CheckpointRequested) -> bool:
        """Keep a request until there is room; False if too many wait already."""
        if len(self._postponed) >= POSTPONED_LIMIT:
            return False
        self._postponed.append(request)
        return True

    def take_postponed(self) -> list[CheckpointRequested]:
        taken, self._postponed = self._postponed, []
        return taken
