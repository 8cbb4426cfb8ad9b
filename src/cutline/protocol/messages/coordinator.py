"""What the machines hear (events, in the past tense) and what they ask for (actions, imperative)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, SinkId, Subtask
from cutline.protocol.publish.commit import CommitPermit

# --------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How one checkpoint is to be taken."""

    #: How long operators may wait for alignment. None: without limit (aligned). 0: never (unaligned).
    alignment_limit_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierTerms:
    """What a barrier says beside its epoch; it travels through the logs, so that consumers need no other message."""

    #: None: wait for alignment without limit; 0: never wait.
    alignment_limit_ms: int | None
    #: Asked for by name for this checkpoint: operators that have a limit of their own follow it all the same.
    is_binding: bool = False
    #: When the epoch began, by the coordinator's clock.
    started_ms: int = 0
    #: Per-operator mode: the one operator that cuts. To everybody else the barrier says nothing.
    alone: OperatorId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """What counts of a manifest that somebody else has stored."""

    generation: Generation
    previous_epoch: Epoch
    batches: Mapping[OperatorId, BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """Where one operator cut for one epoch."""

    batch: BatchId
    #: The barrier's place in the operator's own log.
    barrier: Position
    #: Per input channel: everything below has been read by the batches up to ``batch``.
    positions: Mapping[OperatorId, Position]
    #: Whether all inputs stood at their barriers, so that nothing was in flight.
    aligned: bool


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

    #: From the start of the epoch until its first barrier was here.
    start_delay_ms: float = 0.0
    alignment_ms: float = 0.0
    #: On the hot path: barrier and pinning.
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


# --------------------------------------------------------------------------- events for the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierRequested:
    """The coordinator asks a source operator to begin an epoch, or any operator to cut alone."""

    epoch: Epoch
    terms: BarrierTerms


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochClosed:
    """The epoch is complete or aborted: its barriers mean nothing any more."""

    epoch: Epoch
    completed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AckRequested:
    """The coordinator has not heard what became of an epoch here, or has forgotten it."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened but time."""


AgentEvent = BarrierRequested | DataAppeared | BarrierAppeared | BatchAppended | EpochClosed | AckRequested | TimePassed

# --------------------------------------------------------------------------- actions of the agent


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
    """Pin the state after ``batch``, store it, acknowledge."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool
    alignment_ms: int
    start_delay_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendAck:
    """Say again that the epoch's snapshot is stored, if it is; if it is under way, nothing is to be done."""

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

# --------------------------------------------------------------------------- events for the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A person or a program wants a checkpoint now. ``request`` comes back in the answer."""

    request: str
    #: None: as the flow is configured.
    options: CheckpointOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStored:
    """The record of a pending epoch is durable."""

    epoch: Epoch


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
class OperatorStarted:
    """An operator's agent has begun a new life; what it was told before is forgotten."""

    operator: OperatorId
    generation: Generation
    #: The epochs that it takes for open.
    open_epochs: tuple[Epoch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """What an operator has done since it last said so."""

    operator: OperatorId
    is_source: bool
    batches: int = 0
    rows: int = 0
    #: Event-time watermark; 0 without one.
    watermark_ms: int = 0
    #: Its channel is full: consumers are behind.
    is_without_room: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLost:
    """Operators have failed for good; they and all behind them go back to the newest complete epoch."""

    operators: frozenset[OperatorId]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRestored:
    """The lost operators run again, in a generation of their own, which is now the coordinator's too."""

    operators: frozenset[OperatorId]
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PinChanged:
    """A person or a savepoint holds on to an epoch, or lets go of it."""

    epoch: Epoch
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestStored:
    """The manifest is durable: the checkpoint exists."""

    epoch: Epoch
    completed_ms: int = 0
    #: Set when it turned out that an earlier life of the coordinator had stored it: the cuts of that manifest.
    found: FoundManifest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRefused:
    """The manifest could not be created."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortStored:
    """It is durable that the epoch will never complete."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitted:
    """A sink has published an epoch."""

    operator: OperatorId
    sink: SinkId
    epoch: Epoch
    #: The epoch had rows for it: from now on the sink itself says that it has published it.
    has_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCommitFailed:
    """A sink could not publish; it is tried again."""

    operator: OperatorId
    sink: SinkId
    epoch: Epoch
    reason: str


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
    """Make the epoch's start durable, then say ``PendingStored``."""

    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectBarrier:
    """Ask an operator to cut: a source, or the one that cuts alone."""

    operator: OperatorId
    epoch: Epoch
    terms: BarrierTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAck:
    """Ask an operator what became of an epoch."""

    operator: OperatorId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """Create the manifest (conditionally), then say ``ManifestStored`` or ``ManifestRefused``.

    One that is there already, of an earlier generation, is as good: say ``ManifestStored`` with what was found.
    """

    epoch: Epoch
    previous_epoch: Epoch
    started_ms: int
    acks: Mapping[OperatorId, OperatorAck]
    #: An earlier coordinator began the epoch and may still want to store it: its place must stay taken for good, also
    #: when the checkpoint itself is collected.
    is_inherited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAborted:
    """Make the abort durable, then say ``AbortStored``."""

    epoch: Epoch
    reason: str
    #: Begun by an earlier coordinator, which may still be about to store the manifest: bar it from doing so first.
    #: If it has done so, the epoch is complete after all: say ``ManifestStored`` with what was found.
    is_inherited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceClosed:
    """Tell operators that the epoch is over."""

    epoch: Epoch
    completed: bool
    #: None: all of them.
    operator: OperatorId | None = None
    #: Said before, and perhaps forgotten.
    is_reminder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSink:
    """Publish the epoch, then say ``SinkCommitted`` or ``SinkCommitFailed``."""

    permit: CommitPermit
    #: Tries so far, for logs and backoff.
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEpochs:
    """These checkpoints may go, and what only they needed: blobs, channel entries."""

    drop: tuple[Epoch, ...]
    #: Those that stay, ascending.
    retained: tuple[Epoch, ...]
    #: Epochs from here on may be under way: what they have stored so far is needed.
    open_from: Epoch


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
