"""The coordinator's records in memory."""

from __future__ import annotations

import threading
from collections import Counter

from cutline.errors import FencedError, InvariantViolation
from cutline.model.history import Identity
from cutline.model.ids import NO_EPOCH, Epoch, Generation, SinkId
from cutline.ports.metadata import EpochOutcome, PendingRecord


class MemoryRecords:
    """The records that several processes would share; they outlive each process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = Generation(0)
        self.begun: dict[Epoch, PendingRecord] = {}
        self.outcomes: dict[Epoch, EpochOutcome] = {}
        self.pins: set[Epoch] = set()
        self.published: dict[SinkId, Epoch] = {}
        self.seen: dict[SinkId, Epoch] = {}
        self.recoveries: Counter[str] = Counter()
        self.announced: set[Identity] = set()
        self.has_run = False


class MemoryMetadata:
    """One process's view of the records. See ``cutline.ports.metadata`` for what each method promises."""

    def __init__(self, records: MemoryRecords | None = None) -> None:
        self._records = records if records is not None else MemoryRecords()
        self._generation = Generation(0)

    def next_generation(self, at_least: Generation) -> Generation:
        with self._records.lock:
            self._generation = Generation(max(self._records.generation + 1, at_least))
            self._records.generation = self._generation
            return self._generation

    def advance_generation(self) -> Generation:
        with self._records.lock:
            self.check_fence()
            return self.next_generation(Generation(0))

    def check_fence(self) -> None:
        newest = self._records.generation
        if newest > self._generation:
            raise FencedError(
                f"generation {newest} has taken over",
                next_step="stop this process: another one runs the flow",
                generation=self._generation,
            )

    def last_epoch(self) -> Epoch:
        with self._records.lock:
            return max([*self._records.begun, *self._records.outcomes], default=NO_EPOCH)

    def last_completed(self) -> Epoch:
        with self._records.lock:
            done = (one.epoch for one in self._records.outcomes.values() if one.outcome == "completed")
            return max(done, default=NO_EPOCH)

    def store_pending(self, record: PendingRecord) -> None:
        with self._records.lock:
            self.check_fence()
            if record.epoch in self._records.begun or record.epoch in self._records.outcomes:
                raise InvariantViolation("an epoch was used twice", epoch=record.epoch)
            self._records.begun[record.epoch] = record

    def pending(self) -> list[PendingRecord]:
        with self._records.lock:
            return [one for epoch, one in sorted(self._records.begun.items()) if epoch not in self._records.outcomes]

    def store_outcome(self, outcome: EpochOutcome) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.outcomes.setdefault(outcome.epoch, outcome)

    def history(self, limit: int) -> list[EpochOutcome]:
        with self._records.lock:
            return [one for _, one in sorted(self._records.outcomes.items(), reverse=True)][:limit]

    def store_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        with self._records.lock:
            self.check_fence()
            (self._records.pins.add if is_pinned else self._records.pins.discard)(epoch)

    def pins(self) -> frozenset[Epoch]:
        with self._records.lock:
            return frozenset(self._records.pins)

    def store_published(self, sink: SinkId, epoch: Epoch) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.published[sink] = epoch

    def published(self) -> dict[SinkId, Epoch]:
        with self._records.lock:
            return dict(self._records.published)

    def store_seen(self, sink: SinkId, epoch: Epoch) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.seen[sink] = epoch

    def seen(self) -> dict[SinkId, Epoch]:
        with self._records.lock:
            return dict(self._records.seen)

    def store_announced(self, identity: Identity) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.announced.add(identity)

    def announced(self) -> frozenset[Identity]:
        with self._records.lock:
            return frozenset(self._records.announced)

    def issued(self) -> Generation:
        with self._records.lock:
            return self._records.generation

    def note_run(self) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.has_run = True

    def has_run(self) -> bool:
        with self._records.lock:
            return self._records.has_run

    def count_recovery(self, path: str) -> None:
        with self._records.lock:
            self.check_fence()
            self._records.recoveries[path] += 1

    def recoveries(self) -> dict[str, int]:
        with self._records.lock:
            return dict(self._records.recoveries)

    def close(self) -> None: ...
