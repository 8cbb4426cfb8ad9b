"""When the next checkpoint begins: by the timer, by progress, by event time, by request; never too many, too soon."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cutline.model.ids import OperatorId
from cutline.protocol.messages.wire import ProgressMade


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerSettings:
    """The triggers of a flow; 0 switches one off."""

    interval_ms: int
    min_pause_ms: int = 0
    max_concurrent: int = 1
    #: This many batches or rows of the sources since the last checkpoint began.
    every_batches: int = 0
    every_rows: int = 0
    #: Whenever all watermarks have passed another multiple of this.
    event_time_ms: int = 0
    #: The timer's interval while a channel has no room; 0: unchanged.
    backlog_interval_ms: int = 0

    def needs_progress(self) -> bool:
        """Whether a trigger depends on the operators' progress."""
        return bool(self.every_batches or self.every_rows or self.event_time_ms or self.backlog_interval_ms)


class TriggerPolicy:
    """Decides when a checkpoint is due; it begins none itself."""

    def __init__(
        self, settings: TriggerSettings, *, first_ms: int = 0, awaited: Collection[OperatorId] | None = None
    ) -> None:
        """``first_ms``: when the timer starts running.

        ``awaited``: of a flow without any checkpoint, the operators that have sinks. Its first checkpoint begins when
        each of them has made rows: readers need not wait for a whole interval, and a restore has a goal early. None:
        the timer alone counts.
        """
        self._settings = settings
        self._awaited = set(awaited) if awaited and settings.interval_ms else None
        self._timer_began_ms = first_ms
        self._pause_until_ms = 0
        self._batches = 0
        self._rows = 0
        self._watermarks: dict[OperatorId, int] = {}
        #: The multiple of event_time_ms that the last checkpoint had reached; None before the first watermark.
        self._boundary: int | None = None
        self._without_room: set[OperatorId] = set()

    # ------------------------------------------------------------------ questions

    def has_room(self, pending: int) -> bool:
        return pending < self._settings.max_concurrent

    def is_due(self, now_ms: int, pending: int) -> bool:
        """Whether a checkpoint is due now."""
        return self.has_room(pending) and now_ms >= self._pause_until_ms and self._wants(now_ms)

    def next_due_ms(self, now_ms: int, pending: int) -> int | None:
        """When ``is_due`` may become true by time alone; None if only an event can do it."""
        if not self.has_room(pending):
            return None
        if self._wants(now_ms):
            return max(self._pause_until_ms, now_ms)
        timer = self._timer_ms()
        return None if timer is None else max(timer, self._pause_until_ms)

    def _wants(self, now_ms: int) -> bool:
        timer = self._timer_ms()
        return (
            (timer is not None and now_ms >= timer)
            or (self._awaited is not None and not self._awaited)
            or 0 < self._settings.every_batches <= self._batches
            or 0 < self._settings.every_rows <= self._rows
            or self._has_passed_boundary()
        )

    def _timer_ms(self) -> int | None:
        if not self._settings.interval_ms:
            return None
        longer = self._settings.backlog_interval_ms if self._without_room else 0
        return self._timer_began_ms + max(self._settings.interval_ms, longer)

    def _reached_boundary(self) -> int | None:
        if not self._settings.event_time_ms or not self._watermarks:
            return None
        return min(self._watermarks.values()) // self._settings.event_time_ms

    def _has_passed_boundary(self) -> bool:
        reached = self._reached_boundary()
        return reached is not None and self._boundary is not None and reached > self._boundary

    # ------------------------------------------------------------------ what happens

    def progressed(self, event: ProgressMade) -> None:
        """An operator has run a batch, or its channel has become full or free."""
        if self._awaited is not None and event.rows:  # Spark begins with an empty batch where no input is there yet
            self._awaited.discard(event.operator)
        if event.is_source:
            self._batches += event.batches
            self._rows += event.rows
        if event.watermark_ms > 0:
            self._watermarks[event.operator] = max(self._watermarks.get(event.operator, 0), event.watermark_ms)
            if self._boundary is None:
                self._boundary = self._reached_boundary()
        if event.is_without_room:
            self._without_room.add(event.operator)
        else:
            self._without_room.discard(event.operator)

    def started(self, now_ms: int) -> None:
        if not self._awaited:  # one that began before their first rows has nothing to publish
            self._awaited = None
        self._timer_began_ms = now_ms
        self._batches = 0
        self._rows = 0
        if self._watermarks:
            self._boundary = self._reached_boundary()

    def ended(self, now_ms: int) -> None:
        self._pause_until_ms = now_ms + self._settings.min_pause_ms
