"""The entries of a channel's log: data and barriers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cutline.model import validation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import (
    BatchId,
    Count,
    Crc32,
    Epoch,
    Generation,
    MomentMs,
    OperatorId,
    Position,
    SinkId,
    SizeBytes,
)
from cutline.model.staging import StagedBatch
from cutline.model.validation import Problem


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """An Arrow IPC file with rows of one batch, written by one task."""

    #: File name inside the channel's data folder.
    name: str
    rows: Count
    size_bytes: SizeBytes
    crc32: Crc32


class DataEntry(msgspec.Struct, frozen=True, kw_only=True, tag="data"):
    """One batch of the operator: its rows for consumers, its staged output for sinks, and how far it had read.

    Creating the entry commits the batch.
    """

    seq: Position
    generation: Generation
    batch: BatchId
    rows: Count
    segments: list[Segment]
    staged: dict[SinkId, StagedBatch]
    #: Per input channel: this batch or an earlier one has read everything below.
    positions: dict[OperatorId, Position]
    #: Per-operator mode: how the engine planned the batch, so that the batch can be rerun exactly as planned.
    plan: dict[str, bytes] = {}

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def problems(self) -> Iterator[Problem]:
        """What no entry of ours says; see ``cutline.model.validation``."""
        yield from validation.of_names("segments", [segment.name for segment in self.segments])
        if self.plan:
            yield from validation.of_paths("plan", list(self.plan))
        for sink, batch in self.staged.items():
            yield from validation.of_json(f"staged.{sink}", batch.pieces)


class BarrierEntry(msgspec.Struct, frozen=True, kw_only=True, tag="barrier"):
    """Epoch ``epoch`` is cut here: directly after the entry of ``batch``."""

    seq: Position
    generation: Generation
    epoch: Epoch
    batch: BatchId
    #: How far the batches up to ``batch`` have read each input: this makes the barrier a full description of the cut.
    positions: dict[OperatorId, Position]
    aligned: bool
    #: The terms travel with the barrier, so that consumers need no other message.
    alignment_limit_ms: int | None
    is_binding: bool = False
    started_ms: MomentMs = 0
    alone: OperatorId | None = None

    @property
    def terms(self) -> BarrierTerms:
        return BarrierTerms(
            alignment_limit_ms=self.alignment_limit_ms,
            is_binding=self.is_binding,
            started_ms=self.started_ms,
            alone=self.alone,
        )


Entry = DataEntry | BarrierEntry
