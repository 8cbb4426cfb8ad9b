"""The messages between coordinator and operators: everything that may cross a process boundary.

Every message is plain data; ``cutline.transport.codec`` encodes and decodes each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.cut import BarrierTerms, OperatorAck
from cutline.model.ids import Epoch, Generation, OperatorId, Position, SinkId
from cutline.protocol.publish.commit import CommitPermit

# --------------------------------------------------------------------------- the coordinator tells an operator


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierRequested:
    """The coordinator asks a source operator to begin an epoch, or any operator to cut alone."""

    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochClosed:
    """The epoch is complete or aborted: its barriers no longer have an effect."""

    epoch: Epoch
    completed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRequested:
    """The coordinator lacks the operator's acknowledgement of an epoch, or lost it in a restart."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEntries:
    """No retained checkpoint and no operator needs the entries of this operator's log below a position.

    Cumulative: the next message covers a lost one.
    """

    below: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForked:
    """The producer of an input continues in another generation: from now on read its entries through this lineage."""

    channel: OperatorId
    lineage: tuple[tuple[Generation, Position], ...]


# --------------------------------------------------------------------------- an operator tells the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStarted:
    """An operator's agent has started in a new generation or process; it knows no earlier message."""

    operator: OperatorId
    generation: Generation
    #: The epochs that it considers open.
    open_epochs: tuple[Epoch, ...] = ()
    #: Which generation's entries are visible where in its log, as (generation, first position) pairs.
    lineage: tuple[tuple[Generation, Position], ...] = ()
    #: Per channel, the lowest entry that it needs to catch up with its own log; empty: its state is not behind the log.
    needs: Mapping[OperatorId, Position] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAcked:
    """An operator has stored its snapshot."""

    ack: OperatorAck


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed:
    """An operator could not take or store its snapshot."""

    operator: OperatorId
    epoch: Epoch
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """An operator's progress since its last report."""

    operator: OperatorId
    is_source: bool
    batches: int = 0
    rows: int = 0
    #: Event-time watermark; 0 without one.
    watermark_ms: int = 0
    #: Its channel is full: consumers are behind.
    is_without_room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitted:
    """A sink has published an epoch."""

    operator: OperatorId
    sink: SinkId
    epoch: Epoch
    #: The epoch had rows for it: from now on the sink's own ledger shows the epoch as published.
    has_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitFailed:
    """A sink could not publish; the coordinator retries."""

    operator: OperatorId
    sink: SinkId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesReleased:
    """The operator has performed every ``ReleaseEntries`` up to this position: none of them deletes anything later."""

    operator: OperatorId
    generation: Generation
    below: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """The operator's state is no longer behind its own log."""

    operator: OperatorId
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFailed:
    """The operator cannot continue, and a restart of its query does not help."""

    operator: OperatorId
    generation: Generation
    reason: str


# --------------------------------------------------------------------------- credit, between operators


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """A consumer has read a channel up to a position; in a newer generation it was restored to that position.

    Cumulative: a lost, repeated or late message, or one of an older generation, does no harm.
    """

    channel: OperatorId
    consumer: OperatorId
    #: The consumer's.
    generation: Generation
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionNoted:
    """The producer of a channel knows how far a consumer has read: the consumer need not repeat it."""

    channel: OperatorId
    consumer: OperatorId
    generation: Generation
    position: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionRequested:
    """The producer of a channel has started and asks a consumer how far it has read."""

    channel: OperatorId
    consumer: OperatorId


#: Messages from the coordinator to an operator.
ToOperator = BarrierRequested | EpochClosed | AckRequested | CommitPermit | ReleaseEntries | InputForked

#: Messages from an operator to the coordinator's core.
CoreNews = OperatorStarted | OperatorAcked | SnapshotFailed | SinkCommitted | SinkCommitFailed | ProgressMade

#: Messages from an operator to the coordinator.
ToCoordinator = CoreNews | EntriesReleased | CaughtUp | OperatorFailed

#: Messages between operators. Outside the numbered links: each is complete in itself and repeated when needed.
Credit = Consumed | ConsumptionNoted | ConsumptionRequested
