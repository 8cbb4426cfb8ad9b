"""Credit: how much a producer may still write before its consumers read. This is the only back-pressure mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cutline.model.ids import START, Generation, OperatorId, Position
from cutline.protocol.messages.wire import Consumed, ConsumptionNoted, ConsumptionRequested

#: Positions of entries with their rows and bytes, ascending.
Entries = Iterable[tuple[Position, int, int]]

_NO_GENERATION = Generation(0)
#: An unanswered message is repeated with doubling pauses, up to this multiple of the first pause.
_LONGEST_PAUSE = 32


class CreditAccount:
    """What the consumers of one channel have yet to read, against what the channel may hold."""

    def __init__(self, consumers: Iterable[OperatorId], *, entries: int, size_bytes: int) -> None:
        self._capacity_entries = entries
        self._capacity_bytes = size_bytes
        self._consumed: dict[OperatorId, Position] = dict.fromkeys(consumers, START)
        #: The generations of the consumers that have reported.
        self._generations: dict[OperatorId, Generation] = {}
        #: Entries that some consumer has yet to read, ascending: (position, rows, bytes). Empty entries cost nothing.
        self._unread: list[tuple[Position, int, int]] = []
        self._unread_bytes = 0
        #: Withheld credit: a paused producer begins no batch, whatever room there is.
        self.is_withheld = False
        #: The producer aligns and writes what lies before the barriers even without room. Otherwise it could wait for a
        #: consumer that itself waits for the barrier behind those entries.
        self.is_exempt = False

    def appended(self, seq: Position, rows: int, size_bytes: int) -> None:
        """The producer has written an entry, or has found one that it wrote before a restart."""
        # An entry that all consumers have read costs nothing: no consumer will report it again.
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

    def reported(self, report: Consumed, entries: Callable[[], Entries]) -> bool:
        """A consumer has reported; returns whether it counts.

        ``entries``: all entries of the log, needed when the consumer was restored.

        In a newer generation the consumer was restored, perhaps to an earlier position; an older one no longer counts.
        """
        consumer, known = report.consumer, self._generations.get(report.consumer, _NO_GENERATION)
        if consumer not in self._consumed or report.generation < known:
            return False
        self._generations[consumer] = report.generation
        if report.generation > known and report.position < self._consumed[consumer]:
            self.restored({consumer: report.position}, entries())
        else:
            self.consumed(consumer, report.position)
        return True

    def restored(self, positions: Mapping[OperatorId, Position], entries: Entries) -> None:
        """Some consumers were restored and read again from these positions; ``entries``: all entries of the log."""
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

    def oldest_unread(self) -> dict[OperatorId, Position | None]:
        """The first entry that each consumer has yet to read; None: it has read all rows."""
        return {
            consumer: next((seq for seq, _, _ in self._unread if seq >= position), None)
            for consumer, position in self._consumed.items()
        }

    def backlog_rows(self) -> dict[OperatorId, int]:
        """Rows that each consumer has yet to read."""
        return {
            consumer: sum(rows for seq, rows, _ in self._unread if seq >= position)
            for consumer, position in self._consumed.items()
        }


@dataclass(slots=True)
class _Repeat:
    """When an unanswered message is sent again."""

    at_ms: int
    pause_ms: int


class ConsumptionReports:
    """A consumer reports its position in each input, and repeats it until the producer has noted it."""

    def __init__(
        self, consumer: OperatorId, generation: Generation, positions: Mapping[OperatorId, Position], *, retry_ms: int
    ) -> None:
        """``positions``: how far it has read each of its inputs."""
        self._consumer = consumer
        self._generation = generation
        self._positions = dict(positions)
        self._retry_ms = retry_ms
        self._unanswered: dict[OperatorId, _Repeat] = {}

    def read(self, positions: Mapping[OperatorId, Position], *, now_ms: int) -> list[Consumed]:
        """The consumer has read its inputs up to here; returns the reports for the producers."""
        for channel, position in positions.items():
            self._positions[channel] = position
            self._unanswered[channel] = _Repeat(now_ms + self._retry_ms, self._retry_ms)
        return [self._report(channel) for channel in positions]

    def requested(self, request: ConsumptionRequested) -> list[Consumed]:
        """A producer asks for a report, and confirms it like any other."""
        return [self._report(request.channel)] if request.channel in self._positions else []

    def noted(self, answer: ConsumptionNoted) -> None:
        is_current = answer.generation == self._generation and answer.position == self._positions.get(answer.channel)
        if is_current:  # it confirms an earlier report, not the newest
            self._unanswered.pop(answer.channel, None)

    def time_passed(self, *, now_ms: int) -> list[Consumed]:
        """The reports to send again."""
        return [self._report(channel) for channel in _due(self._unanswered, self._retry_ms, now_ms)]

    def next_deadline_ms(self) -> int | None:
        return min((repeat.at_ms for repeat in self._unanswered.values()), default=None)

    def _report(self, channel: OperatorId) -> Consumed:
        return Consumed(
            channel=channel,
            consumer=self._consumer,
            generation=self._generation,
            position=self._positions[channel],
        )


class ConsumptionRequests:
    """A producer that has started asks its consumers how far they have read, each until it reports."""

    def __init__(self, channel: OperatorId, consumers: Iterable[OperatorId], *, retry_ms: int) -> None:
        self._channel = channel
        self._retry_ms = retry_ms
        self._unanswered = {consumer: _Repeat(0, retry_ms) for consumer in consumers}

    def reported(self, consumer: OperatorId) -> None:
        self._unanswered.pop(consumer, None)

    def time_passed(self, *, now_ms: int) -> list[ConsumptionRequested]:
        """The consumers to ask now."""
        due = _due(self._unanswered, self._retry_ms, now_ms)
        return [ConsumptionRequested(channel=self._channel, consumer=consumer) for consumer in due]

    def next_deadline_ms(self) -> int | None:
        return min((repeat.at_ms for repeat in self._unanswered.values()), default=None)


def _due(unanswered: Mapping[OperatorId, _Repeat], retry_ms: int, now_ms: int) -> list[OperatorId]:
    due = [name for name, repeat in unanswered.items() if now_ms >= repeat.at_ms]
    for name in due:
        repeat = unanswered[name]
        repeat.at_ms = now_ms + repeat.pause_ms
        repeat.pause_ms = min(repeat.pause_ms * 2, retry_ms * _LONGEST_PAUSE)
    return due
