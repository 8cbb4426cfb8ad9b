"""Credit: how much a producer may still write before its consumers have read. The one mechanism of back-pressure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutline.model.ids import START, OperatorId, Position


class CreditAccount:
    """What the consumers of one channel have yet to read, against what the channel may hold."""

    def __init__(self, consumers: Iterable[OperatorId], *, entries: int, size_bytes: int) -> None:
        self._capacity_entries = entries
        self._capacity_bytes = size_bytes
        self._consumed: dict[OperatorId, Position] = dict.fromkeys(consumers, START)
        #: Written and not yet read by all, ascending: (position, rows, bytes). Entries without rows cost nothing.
        self._unread: list[tuple[Position, int, int]] = []
        self._unread_bytes = 0
        #: Withheld credit: a paused producer begins no batch, whatever room there is.
        self.is_withheld = False
        #: The producer aligns: what lies before the barriers must get through whatever room there is. Else it may wait
        #: for a consumer that waits for a barrier which comes after it.
        self.is_exempt = False

    def appended(self, seq: Position, rows: int, size_bytes: int) -> None:
        """The producer has written an entry, or finds one that it wrote before a restart."""
        # What all have read costs nothing: nobody would ever say again that it is read.
        is_known = bool(self._unread) and seq <= self._unread[-1][0]
        if rows and not is_known and any(position <= seq for position in self._consumed.values()):
            self._unread.append((seq, rows, size_bytes))
            self._unread_bytes += size_bytes

    def consumed(self, consumer: OperatorId, position: Position) -> None:
        """A consumer has read everything below ``position``."""
        self._consumed[consumer] = max(self._consumed[consumer], position)
        slowest = min(self._consumed.values())
        read = 0
        for seq, _, size_bytes in self._unread:
            if seq >= slowest:
                break
            self._unread_bytes -= size_bytes
            read += 1
        del self._unread[:read]

    def went_back(self, positions: Mapping[OperatorId, Position], entries: Iterable[tuple[Position, int, int]]) -> None:
        """Some consumers will read again from these positions on; ``entries``: all that is there, ascending."""
        self._consumed.update(positions)
        self._unread, self._unread_bytes = [], 0
        for seq, rows, size_bytes in entries:
            self.appended(seq, rows, size_bytes)

    def has_room(self) -> bool:
        return len(self._unread) < self._capacity_entries and self._unread_bytes < self._capacity_bytes

    def may_run(self) -> bool:
        return not self.is_withheld and (self.is_exempt or self.has_room())

    def is_drained(self) -> bool:
        """Whether every consumer has read every row."""
        return not self._unread

    def backlog_rows(self) -> dict[OperatorId, int]:
        """Rows that each consumer has yet to read."""
        return {
            consumer: sum(rows for seq, rows, _ in self._unread if seq >= position)
            for consumer, position in self._consumed.items()
        }
