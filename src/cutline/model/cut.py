"""The terms of a cut, and the acknowledgement of an operator that has made its snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, Subtask


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierTerms:
    """What a barrier states beside its epoch; it travels through the logs, so that consumers need no other message."""

    #: None: wait for alignment without limit; 0: never wait.
    alignment_limit_ms: int | None
    #: The limit was requested for this checkpoint: it overrides the operators' own limits.
    is_binding: bool = False
    #: When the epoch began, by the coordinator's clock.
    started_ms: int = 0
    #: Per-operator mode: the one operator that cuts. All others ignore the barrier.
    alone: OperatorId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """Where one operator cut for one epoch."""

    batch: BatchId
    #: The barrier's place in the operator's own log.
    barrier: Position
    #: Per input channel: the batches up to ``batch`` have read everything below.
    positions: Mapping[OperatorId, Position]
    #: Whether all inputs were at their barriers, so that nothing was in flight.
    aligned: bool


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """Data between a consumer's position and the barrier: the channel's state at the cut."""

    first: Position
    end: Position
    #: None: not measured, because the consumer acknowledged before it saw the barrier.
    entries: int | None = None
    rows: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtaskAck:
    """What one subtask contributes to a checkpoint."""

    subtask: Subtask
    files: int
    size_bytes: int
    #: Bytes that no earlier checkpoint had stored.
    new_bytes: int
    #: Hashing and storing this subtask's files.
    async_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long an operator took for one epoch."""

    #: From the start of the epoch until its first barrier arrived.
    start_delay_ms: float = 0.0
    alignment_ms: float = 0.0
    #: On the hot path: writing the barrier and holding files.
    sync_ms: float = 0.0
    #: In the background: waiting for Spark's commit, hashing, storing.
    async_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAck:
    """All acknowledgements of one operator for one epoch, in one message."""

    operator: OperatorId
    epoch: Epoch
    generation: Generation
    cut: CutPoint
    subtasks: tuple[SubtaskAck, ...]
    record_sha256: str
    watermark_ms: int = 0
    timings: Timings = field(default_factory=Timings)
    #: What lay between the operator's position and the barrier, for each input whose barrier it had seen.
    in_flight: Mapping[OperatorId, InFlight] = field(default_factory=dict)
