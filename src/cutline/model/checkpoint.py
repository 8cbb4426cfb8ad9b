"""The stored records of a checkpoint: manifest, operator records, tombstones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from cutline.model import validation
from cutline.model.cut import InFlight, Timings
from cutline.model.generation import Spans
from cutline.model.history import Identity
from cutline.model.ids import (
    NO_CODE,
    BatchId,
    CodeHash,
    Count,
    Epoch,
    FlowName,
    Generation,
    MomentMs,
    OperatorId,
    Position,
    Sha256,
    SinkId,
    SizeBytes,
    Subtask,
    Text,
)
from cutline.model.staging import StagedBatch
from cutline.model.validation import Problem


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One file of a snapshot, by content."""

    #: Relative to the operator's spark_checkpoint_dir.
    path: str
    sha256: str
    size_bytes: SizeBytes
    #: The content itself, for the small files that are new in every epoch; None: it is a blob.
    content: bytes | None = None


class SubtaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's part of a snapshot."""

    subtask: Subtask
    files: list[SnapshotFile]
    size_bytes: SizeBytes
    new_bytes: SizeBytes
    #: Hashing and storing its files.
    async_ms: float = 0.0


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink had staged at the cut, and what it returned from ``prepare``."""

    staged: list[StagedBatch]
    token: dict[str, Any]


class OperatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one operator contributes to one epoch: state and positions, in one atomic record, never changed.

    It holds the whole content of the acknowledgement, so that an operator can repeat it.
    """

    flow: FlowName
    operator: OperatorId
    epoch: Epoch
    generation: Generation
    batch: BatchId
    barrier: Position
    positions: dict[OperatorId, Position]
    aligned: bool
    watermark_ms: int
    subtasks: list[SubtaskRecord]
    shared: list[SnapshotFile]
    sinks: dict[SinkId, SinkRecord]
    timings: Timings
    #: Per input channel: what lay between its position and the barrier. Empty in records of earlier versions.
    in_flight: dict[OperatorId, InFlight] = {}

    def files(self) -> list[SnapshotFile]:
        return [*self.shared, *(file for subtask in self.subtasks for file in subtask.files)]

    def problems(self) -> Iterator[Problem]:
        """What no record of ours says; see ``cutline.model.validation``."""
        yield from validation.of_files(self.files())
        yield from validation.of_unique("subtasks", [one.subtask for one in self.subtasks])
        for sink, one in self.sinks.items():
            yield from validation.of_json(f"sinks.{sink}.token", one.token)
            for batch in one.staged:
                yield from validation.of_json(f"sinks.{sink}.staged", batch.pieces)


class SubtaskCut(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask's figures in the manifest."""

    subtask: Subtask
    files: Count
    size_bytes: SizeBytes
    new_bytes: SizeBytes
    async_ms: float


class OperatorCut(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's line in the manifest."""

    #: The generation that wrote the record.
    generation: Generation
    batch: BatchId
    #: The cut of the complete epoch before this one: sinks publish what was staged since. That epoch may be collected.
    after_batch: BatchId
    barrier: Position
    positions: dict[OperatorId, Position]
    #: How the operator actually cut, whatever was requested.
    mode: Literal["aligned", "unaligned"]
    watermark_ms: int
    record_sha256: Sha256
    files: Count
    size_bytes: SizeBytes
    new_bytes: SizeBytes
    start_delay_ms: float
    alignment_ms: float
    sync_ms: float
    async_ms: float
    #: From the start of the epoch until the record was stored.
    total_ms: float
    subtasks: list[SubtaskCut]


class ChannelCut(msgspec.Struct, frozen=True, kw_only=True):
    """A channel at the cut."""

    barrier: Position
    lineage: Spans
    in_flight: dict[OperatorId, InFlight]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The durable record of a complete checkpoint; creating it is the commit point."""

    flow: FlowName
    epoch: Epoch
    generation: Generation
    previous_epoch: Epoch
    started_ms: MomentMs
    completed_ms: MomentMs
    #: When it was completed in the flow's own time: the clock without long pauses; 0 in former versions.
    flow_ms: MomentMs = 0
    #: How far each sink had published by then. A sink that is not in it did not exist; None in former versions.
    published: dict[SinkId, Epoch] | None = None
    #: An earlier coordinator began it: its manifest path stays occupied for good, even after the checkpoint is
    #: collected.
    is_inherited: bool = False
    #: The epoch whose content it holds, under the operators' new names; None: the flow took this checkpoint itself.
    #: It counts only once its generation exists, because the start that restores that epoch creates both.
    carried_from: Epoch | None = None
    #: The identity of the generation in which the process that completed it had started; empty in former versions.
    history: Identity = ""
    #: The code of the process that completed it; its generation's record describes it. Empty in former versions.
    code: CodeHash = NO_CODE
    operators: dict[OperatorId, OperatorCut]
    channels: dict[OperatorId, ChannelCut]

    def problems(self) -> Iterator[Problem]:
        """What no manifest of ours says; see ``cutline.model.validation``."""
        yield from validation.of_published(self.published or {}, self.epoch)
        cuts = {name: (cut.barrier, cut.positions) for name, cut in self.operators.items()}
        yield from validation.of_channels(
            cuts, {name: (cut.barrier, cut.lineage) for name, cut in self.channels.items()}
        )


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """Occupies the path of an aborted epoch's manifest, so that no older coordinator can create the manifest later."""

    epoch: Epoch
    #: The generation that abandoned the epoch.
    generation: Generation
    reason: Text
