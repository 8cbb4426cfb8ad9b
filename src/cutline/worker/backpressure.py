"""Back-pressure: a producer may run a batch only while its channel has room and nobody has paused it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from cutline.channels.log import ChannelLog
from cutline.model.entries import DataEntry, Entry
from cutline.model.ids import OperatorId, Position
from cutline.protocol.cut.credits import CreditAccount


class StopAtBoundary(Exception):  # noqa: N818 (a request, not an error)
    """Raised inside a batch that must not run because the operator stops before it."""


class Credits:
    """The credit of one producing operator: the account, and the producer's thread that waits for it."""

    def __init__(self, log: ChannelLog, consumers: Iterable[OperatorId], *, entries: int, size_bytes: int) -> None:
        self._log = log
        self._account = CreditAccount(consumers, entries=entries, size_bytes=size_bytes)
        self._stopped = False
        self._waiting = False
        self._in_batch = False
        self._changed = threading.Condition()
        self._listener = self._appended  # one object, so that it can be forgotten
        for entry in log.on_append(self._listener):
            self._appended(entry)

    def _appended(self, entry: Entry) -> None:
        if isinstance(entry, DataEntry):
            with self._changed:
                self._account.appended(entry.seq, entry.rows, entry.size_bytes)

    def begin_batch(self) -> None:
        """Return when a batch may run, which then counts as running; raise StopAtBoundary when it never will."""
        with self._changed:
            self._waiting = True
            try:
                self._changed.wait_for(lambda: self._stopped or self._account.may_run())
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

    def has_room(self) -> bool:
        with self._changed:
            return self._account.has_room()

    def consumed(self, consumer: OperatorId, position: Position) -> None:
        """A consumer has read everything below ``position``."""
        with self._changed:
            self._account.consumed(consumer, position)
            self._changed.notify_all()

    def consumers_went_back(self, positions: Mapping[OperatorId, Position]) -> None:
        """These consumers, and no others, read again what they had read, from ``positions`` on."""
        with self._changed:
            entries = ((entry.seq, entry.rows, entry.size_bytes) for entry in self._log.data_entries())
            self._account.went_back(positions, entries)
            self._changed.notify_all()

    def is_drained(self) -> bool:
        """Whether every consumer has read every row."""
        with self._changed:
            return self._account.is_drained()

    def is_waiting(self) -> bool:
        with self._changed:
            return self._waiting

    def backlog(self) -> dict[OperatorId, int]:
        """Rows that each consumer has yet to read."""
        with self._changed:
            return self._account.backlog_rows()

    def set_paused(self, paused: bool) -> None:
        with self._changed:
            self._account.is_withheld = paused
            self._changed.notify_all()

    def set_exempt(self, exempt: bool) -> None:
        """While the producer aligns, what lies before the barriers gets through whatever room there is."""
        with self._changed:
            self._account.is_exempt = exempt
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._log.forget(self._listener)
