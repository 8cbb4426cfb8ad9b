"""Back-pressure: a producer may run a batch only while its channel has room and nobody has paused it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cutline.channels.log import ChannelLog
from cutline.ids import OperatorId, Position


class StopAtBoundary(Exception):  # noqa: N818 (a request, not an error)
    """Raised inside a batch that must not run because the operator stops before it."""


class Credits:
    """The credit of one producing operator."""

    def __init__(self, log: ChannelLog, consumers: Iterable[OperatorId], *, entries: int, size_bytes: int) -> None:
        self._log = log
        self._capacity_entries = entries
        self._capacity_bytes = size_bytes
        self._consumed: dict[OperatorId, Position] = dict.fromkeys(consumers, Position(0))
        self._paused = False
        self._stopped = False
        self._waiting = False
        self._in_batch = False
        self._changed = threading.Condition()

    def begin_batch(self) -> None:
        """Return when a batch may run, which then counts as running; raise StopAtBoundary when it never will."""
        with self._changed:
            self._waiting = True
            try:
                self._changed.wait_for(lambda: self._stopped or (not self._paused and self._has_room()))
            finally:
                self._waiting = False
            if self._stopped:
                raise StopAtBoundary
            self._in_batch = True

    def end_batch(self) -> None:
        with self._changed:
            self._in_batch = False

    def is_in_batch(self) -> bool:
        with self._changed:
            return self._in_batch

    def _has_room(self) -> bool:
        if not self._consumed:
            return True
        unread = [entry for entry in self._log.data_entries(min(self._consumed.values())) if entry.rows]
        return len(unread) < self._capacity_entries and sum(entry.size_bytes for entry in unread) < self._capacity_bytes

    def consumed(self, consumer: OperatorId, position: Position) -> None:
        """A consumer has read everything below ``position``."""
        with self._changed:
            self._consumed[consumer] = max(self._consumed[consumer], position)
            self._changed.notify_all()

    def is_drained(self) -> bool:
        """Whether every consumer has read every row."""
        with self._changed:
            if not self._consumed:
                return True
            return not any(entry.rows for entry in self._log.data_entries(min(self._consumed.values())))

    def is_waiting(self) -> bool:
        with self._changed:
            return self._waiting

    def backlog(self) -> dict[OperatorId, int]:
        """Rows that each consumer has yet to read."""
        with self._changed:
            consumed = dict(self._consumed)
        return {name: sum(e.rows for e in self._log.data_entries(at)) for name, at in consumed.items()}

    def set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def reopen(self) -> None:
        with self._changed:
            self._stopped = False
