"""What is stored of checkpoints: the product's own manifests, and records of what the simulated operators hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutline.model.checkpoint import ChannelCut, Manifest
from cutline.model.cut import InFlight
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, Subtask
from cutline.model.staging import StagedBatch
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.history.retention import EpochNeeds, needs_of
from cutline.testing.simulator.storage.log import Entry
from cutline.testing.simulator.storage.spark_dir import Counts

#: Content of one subtask, by what is in it.
Blob = tuple[OperatorId, Subtask, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An operator's record of an epoch."""

    operator: OperatorId
    epoch: Epoch
    generation: Generation
    batch: BatchId
    barrier: Position
    positions: Mapping[OperatorId, Position]
    aligned: bool
    blobs: tuple[Blob, ...]
    #: Per input: what lay between its position and the barrier there.
    in_flight: Mapping[OperatorId, InFlight]
    #: What each of its sinks has staged and no complete epoch has published.
    staged: tuple[StagedBatch, ...]

    def counts(self) -> Counts:
        return {path: count for _, _, content in self.blobs for path, count in content}


#: Where a record lies.
RecordKey = tuple[Epoch, OperatorId, Generation]


@dataclass(frozen=True, slots=True)
class EntryName:
    """An entry of a log, by its place."""

    channel: OperatorId
    generation: Generation
    seq: Position


#: What a checkpoint consists of beside its records: blobs by what they hold, entries by their place.
Name = Blob | EntryName


@dataclass(frozen=True, slots=True, kw_only=True)
class Savepoint:
    """A checkpoint with all it needs."""

    manifest: Manifest
    records: Mapping[RecordKey, Record]
    blobs: frozenset[Blob]
    entries: tuple[tuple[OperatorId, Entry], ...]


class Checkpoint:
    """A manifest, with what is asked of it often worked out once."""

    __slots__ = ("lineages", "manifest", "needs")

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.lineages: dict[OperatorId, Lineage] = {
            name: lineage_of(cut.lineage) for name, cut in manifest.channels.items()
        }
        self.needs: EpochNeeds = needs_of(manifest)

    @property
    def alone(self) -> OperatorId | None:
        """The one operator that was checkpointed, in per-operator mode."""
        return next(iter(self.manifest.operators)) if len(self.manifest.operators) == 1 else None

    def record_keys(self) -> dict[OperatorId, RecordKey]:
        return {name: (self.manifest.epoch, name, cut.generation) for name, cut in self.manifest.operators.items()}

    def channels(self) -> dict[OperatorId, ChannelCut]:
        return self.manifest.channels


def content_names(manifest: Manifest, records: Mapping[RecordKey, Record]) -> set[Name]:
    """All content that a restore of the checkpoint reads; KeyError if one of its records is gone."""
    checkpoint = Checkpoint(manifest)
    names: set[Name] = set()
    for key in checkpoint.record_keys().values():
        names.update(records[key].blobs)
    for channel, cut in manifest.channels.items():
        lineage = checkpoint.lineages[channel]
        for seq in range(checkpoint.needs.channels[channel], cut.barrier + 1):
            names.add(EntryName(channel, lineage.owner(Position(seq)), Position(seq)))
    return names
