"""The numbered entries of a channel's log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cutline.base import records
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.ports import Segment, StagedBatch
from cutline.protocol.messages.coordinator import BarrierTerms

KIND = "entry"


class DataEntry(msgspec.Struct, frozen=True, kw_only=True, tag="data"):
    """One batch of the operator: its rows for consumers, its staged output for sinks, and how far it had read.

    Creating the entry is the moment at which the batch has happened.
    """

    seq: Position
    generation: Generation
    batch: BatchId
    rows: int
    segments: list[Segment]
    staged: dict[SinkId, StagedBatch]
    #: Per input channel: everything below was read by this batch or one before it.
    positions: dict[OperatorId, Position]
    #: Per-operator mode: how the engine had planned the batch, so that it can be run again exactly so.
    plan: dict[str, bytes] = {}

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)


class BarrierEntry(msgspec.Struct, frozen=True, kw_only=True, tag="barrier"):
    """Epoch ``epoch`` is cut here: directly after the entry of ``batch``."""

    seq: Position
    generation: Generation
    epoch: Epoch
    batch: BatchId
    #: How far the batches up to ``batch`` have read each input: with it a barrier says all there is to a cut.
    positions: dict[OperatorId, Position]
    aligned: bool
    #: The terms travel with the barrier, so that consumers need no other message.
    alignment_limit_ms: int | None
    is_binding: bool = False
    started_ms: int = 0
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


def entry_name(seq: Position) -> str:
    return f"{seq:012d}.json"


def entry_path(channel_dir: Path, generation: Generation, seq: Position) -> Path:
    return generation_dir(channel_dir, generation) / entry_name(seq)


def generation_dir(channel_dir: Path, generation: Generation) -> Path:
    return channel_dir / f"g{generation:06d}"


def data_dir(channel_dir: Path) -> Path:
    return channel_dir / "data"


def encode(entry: Entry) -> bytes:
    return records.encode(KIND, entry)


def decode(data: bytes, path: object) -> Entry:
    """``path`` is for the error."""
    return records.decode(KIND, data, Entry, path=path)  # type: ignore[arg-type]  # as below


def load(path: Path) -> Entry:
    return records.load(KIND, path, Entry)  # type: ignore[arg-type]  # msgspec takes unions, its stubs do not say so
