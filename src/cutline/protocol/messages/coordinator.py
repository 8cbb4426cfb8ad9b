"""Events and actions of the coordinator: events in the past tense, actions imperative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.cut import BarrierTerms, OperatorAck
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, SinkId
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import (
    OperatorAcked,
    OperatorStarted,
    ProgressMade,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
)
from cutline.protocol.publish.commit import CommitPermit

# --------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How one checkpoint is to be taken."""

    #: How long operators may wait for alignment. None: without limit (aligned). 0: never (unaligned).
    alignment_limit_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """The facts of a manifest that another coordinator has stored."""

    generation: Generation
    previous_epoch: Epoch
    batches: Mapping[OperatorId, BatchId]


# --------------------------------------------------------------------------- events for the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A user or a program requests a checkpoint now. The answer repeats ``request``."""

    request: str
    #: None: as the flow is configured.
    options: CheckpointOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStored:
    """The record of a pending epoch is durable."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLost:
    """Operators have failed for good; they and all downstream are restored to the newest complete epoch."""

    operators: frozenset[OperatorId]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRestored:
    """The lost operators run again, in a new generation, which is now the coordinator's too."""

    operators: frozenset[OperatorId]
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PinChanged:
    """A user or a savepoint has pinned an epoch, or removed the pin."""

    epoch: Epoch
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStored:
    """The manifest is durable: the checkpoint exists."""

    epoch: Epoch
    completed_ms: int = 0
    flow_ms: int = 0
    #: Set when an earlier coordinator had stored the manifest: the facts of that manifest.
    found: FoundManifest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRefused:
    """The manifest could not be created."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortStored:
    """The abort of the epoch is durable: it never completes."""

    epoch: Epoch


CoordinatorEvent = (
    CheckpointRequested
    | PendingStored
    | OperatorAcked
    | OperatorStarted
    | ProgressMade
    | RegionLost
    | RegionRestored
    | PinChanged
    | SnapshotFailed
    | ManifestStored
    | ManifestRefused
    | AbortStored
    | SinkCommitted
    | SinkCommitFailed
    | TimePassed
)

# --------------------------------------------------------------------------- actions of the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePending:
    """Make the epoch's start durable, then report ``PendingStored``."""

    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectBarrier:
    """Ask an operator to cut: a source, or an operator that cuts alone."""

    operator: OperatorId
    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAck:
    """Ask an operator for its acknowledgement of an epoch."""

    operator: OperatorId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """Create the manifest (conditionally), then report ``ManifestStored`` or ``ManifestRefused``.

    A manifest that an earlier generation has stored counts too: report ``ManifestStored`` with what was found.
    """

    epoch: Epoch
    previous_epoch: Epoch
    started_ms: int
    acks: Mapping[OperatorId, OperatorAck]
    #: How far each sink has published now: explains later why earlier epochs are gone.
    published: Mapping[SinkId, Epoch] = field(default_factory=dict)
    #: How much of the time since the previous epoch counts as the flow's own at most; None: all of it.
    pause_ms: int | None = None
    #: An earlier coordinator began the epoch and may still try to store the manifest: its place must stay taken for
    #: good, even after the checkpoint is collected.
    is_inherited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAborted:
    """Make the abort durable, then report ``AbortStored``."""

    epoch: Epoch
    reason: str
    #: An earlier coordinator began the epoch and may be about to store the manifest: prevent that first. If it has
    #: stored it, the epoch is complete after all: report ``ManifestStored`` with what was found.
    is_inherited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceClosed:
    """Tell operators that the epoch is closed."""

    epoch: Epoch
    completed: bool
    #: None: all of them.
    operator: OperatorId | None = None
    #: Announced before; the operator may have lost it in a restart.
    is_reminder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSink:
    """Publish the epoch, then report ``SinkCommitted`` or ``SinkCommitFailed``."""

    permit: CommitPermit
    #: Attempts so far, for logs and backoff.
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEpochs:
    """Collect these checkpoints and what only they need: blobs, channel entries."""

    drop: tuple[Epoch, ...]
    #: The checkpoints that stay, ascending.
    retained: tuple[Epoch, ...]
    #: Epochs from here on may be pending: what they have stored so far is needed.
    open_from: Epoch
    #: Of those that stay: what they had in flight is to be stored with them, so that they need no logs.
    detach: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHealth:
    """Whether checkpoints fail more often in a row than the flow's owner tolerates."""

    is_healthy: bool
    failures: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """The outcome of a requested checkpoint. ``published`` requests are answered when all sinks have committed."""

    request: str
    epoch: Epoch
    completed: bool
    reason: str = ""


CoordinatorAction = (
    StorePending
    | InjectBarrier
    | RequestAck
    | StoreManifest
    | StoreAborted
    | AnnounceClosed
    | CommitSink
    | ReleaseEpochs
    | ReportHealth
    | AnswerRequest
)
