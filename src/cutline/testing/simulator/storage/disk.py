"""The disk of one host: all that the flow stores there, and which of it would survive a power cut.

Everything is created conditionally, as on the real stores. The content of a file is synced before the file has its
name; the name itself is synced afterwards, so a process that dies in between leaves a file that all can see and that a
power cut may take. ``checks`` holds the invariants that are checked when something is stored or deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from cutline.model.checkpoint import Manifest, Tombstone
from cutline.model.cut import BarrierTerms
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.testing.simulator.graphs import Graph
from cutline.testing.simulator.storage.checkpoints import Blob, Checkpoint, Record, RecordKey, Savepoint
from cutline.testing.simulator.storage.log import Entry, Log
from cutline.testing.simulator.storage.spark_dir import SparkDir
from cutline.testing.simulator.world import Violation


class Disk:
    """All durable things of one flow on one host."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.name = name
        self.logs = {operator: Log() for operator in graph.operators}
        self.spark: dict[tuple[OperatorId, Generation], SparkDir] = {}
        self.records: dict[RecordKey, Record] = {}
        self.manifests: dict[Epoch, Manifest | Tombstone] = {}
        self._checkpoints: dict[Epoch, Checkpoint] = {}
        self.blobs: set[Blob] = set()
        self.generations: dict[Generation, GenerationRecord] = {}
        #: What a power cut may take, and how it goes.
        self._unsynced: dict[object, Callable[[], None]] = {}
        # The coordinator's own records: each is synced with its transaction.
        self.generation = Generation(0)
        self.last_epoch = NO_EPOCH
        self.pending: dict[Epoch, tuple[Generation, BarrierTerms]] = {}
        self.outcomes: dict[Epoch, str] = {}
        self.published: dict[SinkId, Epoch] = {}
        self.seen: dict[SinkId, Epoch] = {}
        self.pins: set[Epoch] = set()
        #: Checkpoints that were downloaded without their content: they say what is to be published.
        self.only_records: set[Epoch] = set()
        #: Generations that this host has announced in the bucket, entered or not.
        self.announced: set[Identity] = set()
        #: The flow has run on it; if not, it may hold a part of what was downloaded.
        self.has_run = False
        #: What checkpoints that need no logs had in flight.
        self.detached: dict[Epoch, tuple[tuple[OperatorId, Entry], ...]] = {}
        #: A person's own; nothing collects them.
        self.savepoints: dict[str, Savepoint] = {}

    # ------------------------------------------------------------------ reading

    def complete(self) -> list[Checkpoint]:
        """Every checkpoint that is stored, ascending, of whatever history."""
        return [self._checkpoints[epoch] for epoch in sorted(self._checkpoints)]

    def checkpoint(self, epoch: Epoch) -> Checkpoint | None:
        return self._checkpoints.get(epoch)

    def record_of(self, checkpoint: Checkpoint, operator: OperatorId) -> Record | None:
        cut = checkpoint.manifest.operators.get(operator)
        return None if cut is None else self.records.get((checkpoint.manifest.epoch, operator, cut.generation))

    def newest_generation(self) -> GenerationRecord | None:
        return self.generations[max(self.generations)] if self.generations else None

    def highest_generation(self) -> Generation:
        """By all records there are."""
        return Generation(max([0, *self.generations, *(one.manifest.generation for one in self._checkpoints.values())]))

    # ------------------------------------------------------------------ backups

    def snapshot(self) -> Disk:
        """A copy as a snapshot of the file system makes it: all that is visible, and all of it synced."""
        copy = Disk(self.graph, self.name)
        copy.logs = {name: log.snapshot() for name, log in self.logs.items()}
        copy.spark = {key: spark.snapshot() for key, spark in self.spark.items()}
        copy.records, copy.manifests, copy._checkpoints = (
            dict(self.records),
            dict(self.manifests),
            dict(self._checkpoints),
        )
        copy.blobs, copy.generations = set(self.blobs), dict(self.generations)
        copy.generation, copy.last_epoch = self.generation, self.last_epoch
        copy.pending, copy.outcomes = dict(self.pending), dict(self.outcomes)
        copy.published, copy.seen, copy.pins = dict(self.published), dict(self.seen), set(self.pins)
        copy.only_records, copy.savepoints = set(self.only_records), dict(self.savepoints)
        copy.announced, copy.has_run = set(self.announced), self.has_run
        copy.detached = dict(self.detached)
        return copy

    # ------------------------------------------------------------------ syncing

    def _created(self, key: object, lose: Callable[[], None], *, is_synced: bool) -> None:
        if not is_synced:
            self._unsynced[key] = lose

    def sync(self, key: object) -> None:
        """What this key names survives a power cut from now on."""
        self._unsynced.pop(key, None)

    def sync_checkpoint(self, epoch: Epoch) -> None:
        """The folder of a checkpoint: its manifest and its records."""
        self.sync(("manifest", epoch))
        for key in [key for key in self.records if key[0] == epoch]:
            self.sync(("record", key))

    def sync_found(self) -> None:
        """Manifests that a dead process may have left unsynced: from now on something may rest on them."""
        for epoch in self.manifests:
            self.sync_checkpoint(epoch)

    def is_synced(self, key: object) -> bool:
        return key not in self._unsynced

    def lose_power(self, rng: Random) -> int:
        """Of what is not synced, some is gone. Returns how much."""
        lost = sum(log.lose_power(rng) for log in self.logs.values())
        current = self.newest_generation()
        for (operator, generation), spark in self.spark.items():
            if current is not None and current.spark_dirs.get(operator) == generation:
                spark.lose_power(rng)
        for lose in list(self._unsynced.values()):
            if rng.random() < 0.5:
                lose()
                lost += 1
        self._unsynced.clear()
        return lost

    # ------------------------------------------------------------------ the coordinator's records

    def next_generation(self, at_least: int = 0) -> Generation:
        self.generation = Generation(max(self.generation + 1, at_least))
        return self.generation

    def store_pending(self, generation: Generation, epoch: Epoch, terms: BarrierTerms) -> bool:
        """False: fenced."""
        if generation < self.generation:
            return False
        if epoch <= self.last_epoch:
            raise Violation(f"epoch {epoch} was used before")
        self.last_epoch = epoch
        self.pending[epoch] = (generation, terms)
        return True

    def store_outcome(self, generation: Generation, epoch: Epoch, outcome: str) -> bool:
        if generation < self.generation:
            return False
        self.pending.pop(epoch, None)
        self.outcomes.setdefault(epoch, outcome)
        self.last_epoch = max(self.last_epoch, epoch)
        return True

    # ------------------------------------------------------------------ files

    def create_manifest(self, manifest: Manifest | Tombstone, *, is_synced: bool = True) -> bool:
        """False: the place is taken."""
        epoch = manifest.epoch
        if epoch in self.manifests:
            return False
        self.put_manifest(manifest)
        self._created(("manifest", epoch), lambda: self.remove_manifest(epoch), is_synced=is_synced)
        return True

    def put_manifest(self, manifest: Manifest | Tombstone) -> None:
        self.manifests[manifest.epoch] = manifest
        if isinstance(manifest, Manifest):
            self._checkpoints[manifest.epoch] = Checkpoint(manifest)

    def remove_manifest(self, epoch: Epoch) -> None:
        self.manifests.pop(epoch, None)
        self._checkpoints.pop(epoch, None)
        self.detached.pop(epoch, None)
        self.sync(("manifest", epoch))

    def create_record(self, record: Record, *, is_synced: bool = True) -> Record:
        """The one that is there."""
        key = (record.epoch, record.operator, record.generation)
        if key not in self.records:
            self.records[key] = record
            self._created(("record", key), lambda: self.remove_record(key), is_synced=is_synced)
        return self.records[key]

    def remove_record(self, key: RecordKey) -> None:
        self.records.pop(key, None)
        self.sync(("record", key))

    def link_blob(self, blob: Blob) -> None:
        """Visible; durable after ``sync``."""
        if blob not in self.blobs:
            self.blobs.add(blob)
            self._created(("blob", blob), lambda: self.blobs.discard(blob), is_synced=False)

    def remove_blob(self, blob: Blob) -> None:
        self.blobs.discard(blob)
        self.sync(("blob", blob))

    def create_generation(self, record: GenerationRecord) -> bool:
        """False: fenced."""
        if any(one >= record.generation for one in self.generations):
            return False
        self.generations[record.generation] = record
        return True
