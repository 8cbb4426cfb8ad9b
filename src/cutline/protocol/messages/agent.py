"""Events and actions of an operator's agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutline.model.cut import BarrierTerms
from cutline.model.ids import BatchId, Epoch, OperatorId, Position
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import AckRequested, BarrierRequested, EpochClosed


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAppeared:
    """An input channel's log grew by a data entry. Entries without rows do not move positions."""

    channel: OperatorId
    seq: Position
    has_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierAppeared:
    """An input channel's log grew by a barrier."""

    channel: OperatorId
    seq: Position
    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAppended:
    """This operator's batch is in its log, durably; ``positions`` say how far it has read each input."""

    batch: BatchId
    positions: Mapping[OperatorId, Position]


AgentEvent = BarrierRequested | DataAppeared | BarrierAppeared | BatchAppended | EpochClosed | AckRequested | TimePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendBarrier:
    """Write the barrier into the operator's own log, now, directly after the entry of ``batch``."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Hold the state files after ``batch``, store them, acknowledge."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool
    alignment_ms: int
    start_delay_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendAck:
    """Acknowledge the epoch's snapshot again if it is stored; do nothing while it is under way."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFailure:
    """Tell the coordinator that this operator will never cut for the epoch."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGate:
    """From now on the operator may read this input up to ``admit``."""

    channel: OperatorId
    admit: Position


AgentAction = AppendBarrier | TakeSnapshot | ResendAck | ReportFailure | SetGate
