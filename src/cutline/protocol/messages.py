"""What the machines hear (events, in the past tense) and what they ask for (actions, imperative)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.ids import BatchId, Epoch, Generation, OperatorId, Position, SinkId, Subtask
from cutline.protocol.commit import CommitPermit

# --------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How one checkpoint is to be taken."""

    #: How long operators may wait for alignment. None: without limit (aligned). 0: never (unaligned).
    alignment_limit_ms: int | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long an operator took for one epoch."""

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
    """The coordinator asks a source operator to begin an epoch."""

    epoch: Epoch
    #: None: wait for alignment without limit; 0: never wait.
    alignment_limit_ms: int | None


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
    alignment_limit_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAppended:
    """This operator's batch is in its log, durably; ``positions`` say how far it has read each input."""

    batch: BatchId
    positions: Mapping[OperatorId, Position]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochClosed:
    """The epoch is complete or aborted: its barriers mean nothing any more."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened but time."""


AgentEvent = BarrierRequested | DataAppeared | BarrierAppeared | BatchAppended | EpochClosed | TimePassed

# --------------------------------------------------------------------------- actions of the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendBarrier:
    """Write the barrier into the operator's own log, now, directly after the entry of ``batch``."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    alignment_limit_ms: int | None
    aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Pin the state after ``batch``, store it, acknowledge."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool
    alignment_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGate:
    """From now on the operator may read this input up to ``admit``."""

    channel: OperatorId
    admit: Position


AgentAction = AppendBarrier | TakeSnapshot | SetGate

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
class ManifestStored:
    """The manifest is durable: the checkpoint exists."""

    epoch: Epoch


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
    started_ms: int
    alignment_limit_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectBarrier:
    """Ask a source operator to cut."""

    operator: OperatorId
    epoch: Epoch
    alignment_limit_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreManifest:
    """Create the manifest (conditionally), then say ``ManifestStored`` or ``ManifestRefused``."""

    epoch: Epoch
    previous_epoch: Epoch
    started_ms: int
    acks: Mapping[OperatorId, OperatorAck]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAborted:
    """Make the abort durable, then say ``AbortStored``."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceClosed:
    """Tell every operator that the epoch is over."""

    epoch: Epoch
    completed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSink:
    """Publish the epoch, then say ``SinkCommitted`` or ``SinkCommitFailed``."""

    permit: CommitPermit
    #: Tries so far, for logs and backoff.
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBelow:
    """Everything older than ``min_epoch`` may go: checkpoints, blobs, channel entries."""

    min_epoch: Epoch


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
    | StoreManifest
    | StoreAborted
    | AnnounceClosed
    | CommitSink
    | ReleaseBelow
    | AnswerRequest
)
