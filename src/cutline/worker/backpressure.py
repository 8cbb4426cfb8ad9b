"""Back-pressure: a producer may run a batch only while its channel has room and it is not paused."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from cutline.base.clock import now_ms
from cutline.channels.log import ChannelLog
from cutline.model.entries import DataEntry, Entry
from cutline.model.ids import OperatorId, Position
from cutline.protocol.cut.credits import CreditAccount
from cutline.protocol.messages.wire import Consumed


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
        #: When each entry that some consumer has yet to read was appended, or found by this start.
        self._appended_ms: dict[Position, int] = {}
        self._changed = threading.Condition()
        self._listener = self._appended  # one object, so that it can be removed
        for entry in log.on_append(self._listener):
            self._appended(entry)

    def _appended(self, entry: Entry) -> None:
        if isinstance(entry, DataEntry):
            with self._changed:
                self._account.appended(entry.seq, entry.rows, entry.size_bytes)
                self._appended_ms[entry.seq] = now_ms()

    def begin_batch(self) -> None:
        """Wait until a batch may run, and count it as running. Raises StopAtBoundary when no further batch may run."""
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

    def reported(self, report: Consumed) -> bool:
        """A consumer has read everything below a position, or was restored to it; returns whether the report counts."""
        with self._changed:
            counts = self._account.reported(report, self._entries)
            self._forget_read()
            self._changed.notify_all()
            return counts

    def _entries(self) -> Iterable[tuple[Position, int, int]]:
        return ((entry.seq, entry.rows, entry.size_bytes) for entry in self._log.data_entries())

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

    def backlog_ms(self) -> dict[OperatorId, int]:
        """How long the oldest row that each consumer has yet to read has waited; 0: none waits."""
        now = now_ms()
        with self._changed:
            oldest = self._account.oldest_unread()
            return {
                consumer: 0 if seq is None else max(now - self._appended_ms.get(seq, now), 0)
                for consumer, seq in oldest.items()
            }

    def _forget_read(self) -> None:
        unread = [seq for seq in self._account.oldest_unread().values() if seq is not None]
        first = min(unread, default=None)
        self._appended_ms = {
            seq: at_ms for seq, at_ms in self._appended_ms.items() if first is not None and seq >= first
        }

    def set_paused(self, paused: bool) -> None:
        with self._changed:
            self._account.is_withheld = paused
            self._changed.notify_all()

    def set_exempt(self, exempt: bool) -> None:
        """While the producer aligns, it may write what lies before the barriers even without room in the channel."""
        with self._changed:
            self._account.is_exempt = exempt
            self._changed.notify_all()

    def wait_stopped(self, seconds: float) -> bool:
        """Wait so long, unless no further batch may run; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped, seconds)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._log.remove_listener(self._listener)
