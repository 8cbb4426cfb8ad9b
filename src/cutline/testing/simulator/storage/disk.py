"""What survives a crash: logs, Spark's directories, records, manifests, blobs, the coordinator's records, sinks.

Everything that is created is created conditionally, as on the real stores. Who deletes or publishes is checked here and
now: an invariant that breaks shows at the very step that breaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cutline.model.ids import (
    NO_BATCH,
    NO_EPOCH,
    START,
    BatchId,
    Epoch,
    Generation,
    OperatorId,
    Position,
    SinkId,
    Subtask,
)
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.messages.coordinator import BarrierTerms
from cutline.protocol.publish.commit import CommitPermit
from cutline.testing.simulator.graphs import Graph
from cutline.testing.simulator.world import Violation

#: Rows of one path, numbered without a gap: (path, first, count).
Rows = tuple[tuple[int, int, int], ...]
#: Per path: how many rows an operator has taken in.
Counts = dict[int, int]
Blob = tuple[OperatorId, Subtask, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A data entry."""

    seq: Position
    generation: Generation
    batch: BatchId
    rows: Rows
    positions: Mapping[OperatorId, Position]

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.rows)


@dataclass(slots=True, kw_only=True)
class Barrier:
    """A barrier entry; until it is synced, a power cut may take it."""

    seq: Position
    generation: Generation
    batch: BatchId
    epoch: Epoch
    positions: Mapping[OperatorId, Position]
    aligned: bool
    terms: BarrierTerms
    is_synced: bool = False


Entry = Data | Barrier


class Log:
    """One channel's entries of all generations."""

    def __init__(self) -> None:
        self._entries: dict[Generation, dict[Position, Entry]] = {}
        #: Where the log begins, in each generation's view, after truncation.
        self.start = START

    def create(self, entry: Entry) -> bool:
        """False: this place is taken."""
        own = self._entries.setdefault(entry.generation, {})
        if entry.seq in own:
            return False
        own[entry.seq] = entry
        return True

    def at(self, lineage: Lineage, seq: Position) -> Entry | None:
        return self._entries.get(lineage.owner(seq), {}).get(seq)

    def visible(self, lineage: Lineage, first: Position = START, end: Position | None = None) -> list[Entry]:
        found: list[Entry] = []
        seq = max(first, self.start)
        while (end is None or seq < end) and (entry := self.at(lineage, seq)) is not None:
            found.append(entry)
            seq = Position(seq + 1)
        return found

    def delete(self, lineage: Lineage, seq: Position) -> None:
        del self._entries[lineage.owner(seq)][seq]
        self.start = max(self.start, Position(seq + 1))

    def sweep(self, lineage: Lineage) -> None:
        """Delete what no reader of this lineage sees."""
        for generation, own in self._entries.items():
            for seq in [seq for seq in own if lineage.owner(seq) != generation]:
                del own[seq]

    def lose_unsynced(self, keep: Iterable[bool]) -> int:
        """A power cut: of the barriers at the end that were not synced, some are gone, and with them all behind."""
        lost, chances = 0, iter(keep)
        for own in self._entries.values():
            unsynced = sorted(seq for seq, entry in own.items() if isinstance(entry, Barrier) and not entry.is_synced)
            for seq in unsynced:
                if not next(chances):
                    doomed = [later for later in own if later >= seq]
                    if any(isinstance(own[later], Data) for later in doomed):
                        raise Violation(f"a data entry is durable, but not the barrier at {seq} before it")
                    for later in doomed:
                        del own[later]
                    lost += len(doomed)
                    break
        return lost


@dataclass(slots=True)
class SparkDir:
    """A spark_checkpoint_dir: what Spark has planned and committed, and the newest versions of the state."""

    #: Per planned batch: how far it reads each input, and for a source how many rows.
    planned: dict[BatchId, tuple[Mapping[OperatorId, Position], int]] = field(default_factory=dict)
    committed: BatchId = NO_BATCH
    states: dict[BatchId, Counts] = field(default_factory=lambda: {NO_BATCH: {}})
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An operator's record of an epoch."""

    generation: Generation
    batch: BatchId
    barrier: Position
    positions: Mapping[OperatorId, Position]
    blobs: tuple[Blob, ...]
    #: Per staged batch: its rows.
    staged: Mapping[BatchId, Rows]

    def counts(self) -> Counts:
        return {path: count for _, _, content in self.blobs for path, count in content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestModel:
    """A complete checkpoint, or the mark that there will never be one."""

    epoch: Epoch
    generation: Generation
    is_aborted: bool = False
    #: Its place stays taken when it is collected.
    is_inherited: bool = False
    previous_epoch: Epoch = NO_EPOCH
    completed_ms: int = 0
    batches: Mapping[OperatorId, BatchId] = field(default_factory=dict)
    #: Per operator: what was staged up to here an epoch before has published.
    after_batches: Mapping[OperatorId, BatchId] = field(default_factory=dict)
    #: Per operator: the generation whose record counts.
    records: Mapping[OperatorId, Generation] = field(default_factory=dict)
    lineage: Mapping[OperatorId, Lineage] = field(default_factory=dict)
    barriers: Mapping[OperatorId, Position] = field(default_factory=dict)
    #: Per channel and consumer: how far it had read. Of every channel that its operators write or read.
    read: Mapping[OperatorId, Mapping[OperatorId, Position]] = field(default_factory=dict)
    #: The one operator that was checkpointed.
    alone: OperatorId | None = None

    def expected(self, graph: Graph) -> tuple[OperatorId, ...]:
        return graph.operators if self.alone is None else (self.alone,)

    def needed_from(self, channel: OperatorId) -> Position:
        barrier = [self.barriers[channel]] if channel in self.barriers else []
        return min([*barrier, *self.read[channel].values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationModel:
    """An incarnation of the flow."""

    generation: Generation
    restored_epoch: Epoch | None
    is_fresh: bool
    lineage: Mapping[OperatorId, Lineage]
    spark_dirs: Mapping[OperatorId, Generation]


@dataclass(slots=True)
class SinkModel:
    """What readers of a sink see."""

    #: Per published epoch: its rows, in order.
    epochs: dict[Epoch, Rows] = field(default_factory=dict)
    #: Epochs above the first and up to the second were given up by a restore: a commit that comes late is refused.
    shut: list[tuple[Epoch, Epoch]] = field(default_factory=list)
    #: Per path: the next row that readers have not seen.
    next_row: Counts = field(default_factory=dict)

    def commit(self, permit: CommitPermit, rows: Rows) -> bool:
        """False: refused, for good."""
        if permit.epoch in self.epochs:
            return True
        if self.is_shut(permit.epoch):
            return False
        newest = max(self.epochs, default=NO_EPOCH)
        if permit.epoch < newest:
            raise Violation(f"sink {permit.sink} publishes epoch {permit.epoch} after epoch {newest}")
        for path, first, count in rows:
            if first != self.next_row.get(path, 0):
                expected = self.next_row.get(path, 0)
                raise Violation(
                    f"sink {permit.sink} publishes rows {first}… of path {path} in epoch {permit.epoch}, "
                    f"readers have seen {expected}: {'lost' if first > expected else 'doubled'}"
                )
            self.next_row[path] = first + count
        self.epochs[permit.epoch] = rows
        return True

    def is_shut(self, epoch: Epoch) -> bool:
        return any(low < epoch <= high for low, high in self.shut)

    def rewind(self, epoch: Epoch, shut_through: Epoch) -> None:
        """Readers see what they saw at ``epoch``; nothing after it and up to ``shut_through`` is ever published."""
        self.epochs = {one: rows for one, rows in self.epochs.items() if one <= epoch}
        self.shut.append((epoch, shut_through))
        self.next_row = {}
        for one in sorted(self.epochs):
            for path, first, count in self.epochs[one]:
                self.next_row[path] = first + count


class Disk:
    """All durable things of one flow."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.logs = {name: Log() for name in graph.operators}
        self.spark: dict[tuple[OperatorId, Generation], SparkDir] = {}
        self.records: dict[tuple[Epoch, OperatorId, Generation], Record] = {}
        self.manifests: dict[Epoch, ManifestModel] = {}
        self.blobs: set[Blob] = set()
        self.generations: dict[Generation, GenerationModel] = {}
        self.sinks = {name: SinkModel() for name in graph.sinks}
        # The coordinator's own records.
        self.generation = Generation(0)
        self.last_epoch = NO_EPOCH
        self.pending: dict[Epoch, tuple[Generation, BarrierTerms]] = {}
        self.outcomes: dict[Epoch, str] = {}
        self.published: dict[SinkId, Epoch] = dict.fromkeys(graph.sinks, NO_EPOCH)
        self.pins: set[Epoch] = set()
        #: The generation up to which sinks have taken back what was given up.
        self.settled = Generation(0)

    # ------------------------------------------------------------------ reading

    def complete(self) -> list[ManifestModel]:
        return [self.manifests[epoch] for epoch in sorted(self.manifests) if not self.manifests[epoch].is_aborted]

    def record_of(self, manifest: ManifestModel, operator: OperatorId) -> Record | None:
        generation = manifest.records.get(operator)
        return None if generation is None else self.records.get((manifest.epoch, operator, generation))

    def newest_generation(self) -> GenerationModel | None:
        return self.generations[max(self.generations)] if self.generations else None

    # ------------------------------------------------------------------ the coordinator's records

    def next_generation(self) -> Generation:
        self.generation = Generation(self.generation + 1)
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
        return True

    # ------------------------------------------------------------------ checkpoints

    def store_manifest(self, manifest: ManifestModel) -> bool:
        """False: the place is taken. Checked when it is created: every part is there, and the cut is consistent."""
        if manifest.epoch in self.manifests:
            return False
        self.manifests[manifest.epoch] = manifest
        if not manifest.is_aborted:
            if self.outcomes.get(manifest.epoch) == "aborted" and self.is_live(manifest):
                raise Violation(f"epoch {manifest.epoch} was aborted and is completed now")
            if self.is_live(manifest):
                self.check_reachable(manifest)
                if manifest.alone is None:
                    self._check_cut(manifest)
        return True

    def is_live(self, manifest: ManifestModel) -> bool:
        """Whether the flow goes on from it. Said anew here: the simulator trusts no one."""
        newest = self.newest_generation()
        if newest is not None and any(
            newest.lineage[name].owner(barrier) != manifest.lineage[name].owner(barrier)
            for name, barrier in manifest.barriers.items()
        ):
            return False  # completed by an old life, in logs that nobody reads
        return not any(
            one.generation > manifest.generation
            and (one.is_fresh or (one.restored_epoch is not None and one.restored_epoch < manifest.epoch))
            for one in self.generations.values()
        )

    def check_reachable(self, manifest: ManifestModel) -> None:
        """Everything that a restore to this epoch needs is there."""
        for operator in manifest.expected(self.graph):
            record = self.record_of(manifest, operator)
            if record is None:
                raise Violation(f"epoch {manifest.epoch} is complete without the snapshot of {operator}")
            if len(record.blobs) != self.graph.subtasks[operator]:
                raise Violation(f"epoch {manifest.epoch} is complete without all subtasks of {operator}")
            missing = [blob for blob in record.blobs if blob not in self.blobs]
            if missing:
                raise Violation(f"epoch {manifest.epoch} lacks content of {operator}: {missing[0]}")
        for channel in manifest.read:
            first = manifest.needed_from(channel)
            for seq in range(first, manifest.barriers.get(channel, first - 1) + 1):
                if self.logs[channel].at(manifest.lineage[channel], Position(seq)) is None:
                    raise Violation(f"epoch {manifest.epoch} needs entry {seq} of {channel}, which is gone")
            if self.logs[channel].start > first:
                raise Violation(f"epoch {manifest.epoch} needs entry {first} of {channel}, which is gone")

    def _check_cut(self, manifest: ManifestModel) -> None:
        """Per channel: what the producer had sent is what the consumer had taken in, plus what was in flight."""
        counts = {}
        for operator in self.graph.operators:
            record = self.record_of(manifest, operator)
            assert record is not None  # checked before
            counts[operator] = record.counts()
        for channel, readers in manifest.read.items():
            for reader, position in readers.items():
                barrier = manifest.barriers[channel]
                if position > barrier:
                    raise Violation(f"epoch {manifest.epoch}: {reader} had read {channel} past its barrier")
                flight: Counts = {}
                for entry in self.logs[channel].visible(manifest.lineage[channel], position, barrier):
                    for path, _, count in entry.rows if isinstance(entry, Data) else ():
                        flight[path] = flight.get(path, 0) + count
                for path in self.graph.paths[channel].values():
                    sent = counts[channel].get(path, 0)
                    taken = counts[reader].get(self.graph.paths[reader][channel, path], 0)
                    if sent != taken + flight.get(path, 0):
                        raise Violation(
                            f"epoch {manifest.epoch} is no consistent cut: {channel} had sent {sent} rows "
                            f"of path {path}, {reader} had taken {taken}, {flight.get(path, 0)} were in flight"
                        )

    # ------------------------------------------------------------------ letting go

    def drop_manifest(self, epoch: Epoch) -> None:
        manifest = self.manifests.pop(epoch)
        if manifest.is_inherited:
            self.manifests[epoch] = ManifestModel(epoch=epoch, generation=manifest.generation, is_aborted=True)
        if manifest.is_aborted or not self.is_live(manifest):
            return
        if epoch in self.pins:
            raise Violation(f"epoch {epoch} is pinned and was deleted")
        behind = [sink for sink, model in self.sinks.items() if self._is_unpublished(sink, model, manifest)]
        if behind:
            raise Violation(f"epoch {epoch} was deleted before {behind[0]} had published it")
        later = [one for one in self.manifests.values() if not one.is_aborted and one.epoch > epoch]
        if not any(one.alone == manifest.alone for one in later):
            raise Violation(f"epoch {epoch} was deleted, and there is no later one")

    def _is_unpublished(self, sink: SinkId, model: SinkModel, manifest: ManifestModel) -> bool:
        record = self.record_of(manifest, self.graph.sinks[sink])
        return record is not None and manifest.epoch not in model.epochs and manifest.epoch > self.published[sink]

    def drop_blob(self, blob: Blob) -> None:
        self.blobs.discard(blob)
        for manifest in self.complete():
            record = self.record_of(manifest, blob[0])
            if record is not None and blob in record.blobs and self.is_live(manifest):
                raise Violation(f"epoch {manifest.epoch} needs content that was deleted: {blob}")

    def check_truncation(self, channel: OperatorId, seq: Position) -> None:
        """An entry is about to go: nobody may need it."""
        for manifest in self.complete():
            if channel in manifest.read and self.is_live(manifest) and seq >= manifest.needed_from(channel):
                raise Violation(f"entry {seq} of {channel} was deleted, epoch {manifest.epoch} needs it")
