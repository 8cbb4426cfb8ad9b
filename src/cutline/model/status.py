"""The status that a running flow reports: read by the command line, by programs as JSON, and by metrics.

Field names are the keys of ``status.json`` and of ``--json``: programs rely on them. New fields need a default, so that
a status written by an older version can be read. Keys that are names are plain strings.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cutline.model.generation import LostInput
from cutline.model.graph import RollbackPolicy
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId, Subtask


class EpochOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an epoch ended."""

    epoch: Epoch
    generation: Generation
    started_ms: int
    ended_ms: int
    outcome: Literal["completed", "aborted"]
    reason: str
    details: dict[str, Any]
    #: The code that completed it; empty if it was aborted, or in records of former versions.
    code: str = ""


# ---------------------------------------------------------------------- the coordinator


class PendingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is neither complete nor aborted."""

    state: str
    since_ms: int
    #: Operators and their subtasks that have not acknowledged yet.
    missing: dict[str, list[Subtask]]


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where the epochs stand."""

    last_epoch: Epoch
    min_epoch: Epoch
    pins: list[Epoch]
    complete: list[Epoch]
    pending: dict[Epoch, PendingStatus]
    #: When the newest complete one was complete; None: there is none.
    last_completed_ms: int | None = None
    #: When the next one is to begin by itself; None: only progress or a request begins one, or one is under way.
    next_ms: int | None = None
    #: The interval of the timer; 0: there is no timer.
    interval_ms: int = 0


class HealthStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the flow makes progress: checkpoints, operators, sinks, and the resources that they need."""

    healthy: bool
    #: Consecutive failed checkpoints.
    failures: int
    #: Why it is not healthy.
    reason: str


class MessageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Faults on the links between coordinator and operators, and acknowledgements by outcome."""

    links: dict[str, int]
    acknowledgements: dict[str, int]


class SinkProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A sink that could not publish."""

    #: How often in a row.
    failures: int
    problem: str


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator at one moment."""

    generation: Generation
    health: HealthStatus
    checkpoints: CheckpointStatus
    #: As counted at the coordinator's ends of the links.
    messages: MessageCounts
    #: Sinks that have failed since they last published.
    sink_problems: dict[str, SinkProblem] = {}


# ---------------------------------------------------------------------- operators and sinks


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator reads from outside of the flow."""

    source: str
    #: Whether the replay guard checks before a restore that the source can be reread; ``note`` says why not.
    guarded: bool
    note: str = ""


class PartitionLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far behind a source's partition is read."""

    name: str
    #: The next number to read, and the next that the source will assign.
    position: int
    end: int
    lag: int


class SourceLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far behind a source is read, and how long it keeps what the oldest checkpoint needs."""

    #: "topic orders".
    source: str
    #: Messages that are not read yet, over all partitions.
    lag: int = 0
    partitions: list[PartitionLag] = []
    #: The oldest checkpoint, and until when the source keeps all input after it; None: no end is in sight.
    oldest_epoch: Epoch | None = None
    restorable_until_ms: int | None = None
    #: What ends it: "retention.ms of topic orders".
    limited_by: str = ""
    #: Why its server could not be asked.
    problem: str = ""
    #: When it was asked.
    at_ms: int = 0


class OperatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One operator and its query."""

    inputs: list[OperatorId]
    sources: list[SourceStatus] = []
    active: bool
    #: The last batch in its log.
    batch: BatchId
    #: Batches and rows since this process started it.
    batches: int
    rows: int
    batch_ms: float
    #: Over the last seconds.
    rows_per_second: float = 0.0
    #: Rows that each consumer has yet to read.
    backlog_rows: dict[str, int]
    #: How long the oldest of these rows has waited, per consumer; 0: none waits.
    backlog_ms: dict[str, int] = {}
    waiting_for_room: bool
    #: Epochs that it aligns, and the inputs whose barrier has not arrived.
    aligning: dict[Epoch, list[OperatorId]]
    restarts: int
    #: Consecutive failures of its query without a finished batch, and the cause of the last one.
    failures: int = 0
    problem: str = ""
    #: The time of all its batches since this process started it; with ``rows``, how fast it is.
    busy_ms: float = 0.0
    #: The file that holds the whole trace of the last failure; empty: none.
    trace: str = ""
    #: What Spark says its state takes; None: it keeps none, or no batch has finished yet.
    state_bytes: int | None = None
    #: Of sources whose servers can be asked, as they answered last.
    source_lag: list[SourceLag] = []


class SinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sink has published."""

    operator: OperatorId
    published_epoch: Epoch
    #: When the checkpoint of that epoch was complete; None: not known, or nothing is published.
    published_epoch_ms: int | None = None
    #: How long the oldest complete checkpoint that it has yet to publish has waited; 0: none waits.
    lag_ms: int = 0
    #: Consecutive failures to publish, and the cause of the last one.
    failures: int = 0
    problem: str = ""


class SinkDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A sink's progress according to the flow's stored records, whether the flow runs or not."""

    sink: SinkId
    operator: OperatorId
    #: The newest epoch that it has published, with rows or without.
    published: Epoch
    #: The newest epoch that had rows for it; NO_EPOCH for a sink with immediate publishing.
    with_rows: Epoch
    #: Complete checkpoints that it has yet to publish, and how long the oldest of them has waited.
    waiting: list[Epoch]
    waiting_ms: int
    #: Output that executors have staged and that is not published yet.
    staged_batches: int
    staged_rows: int


class RewindWindow(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sink of a running flow can be rewound."""

    sink: SinkId
    published: Epoch
    on_rollback: RollbackPolicy
    can_rewind: bool
    #: The oldest epoch that a rewind reaches; NO_EPOCH: any. None: the sink could not be asked, see ``problem``.
    oldest: Epoch | None
    #: Above it, the epochs that a rewind does not reach: each from the first up to, and without, the second.
    gaps: list[tuple[Epoch, Epoch]] = []
    problem: str = ""


#: The kind of the record that a stopped flow leaves.
RESTORE_LIMITS = "restore-limits"


class RestoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What limits how far a running flow can be restored; or what did when it stopped."""

    sinks: list[RewindWindow]
    #: Options that decide what is retained, by the names of their fields in ``Options``.
    options: dict[str, Any]
    at_ms: int = 0


# ---------------------------------------------------------------------- the flow


class OperatorFate(msgspec.Struct, frozen=True, kw_only=True):
    """How one stored operator was matched to the flow's code."""

    #: kept, renamed, dropped or added.
    fate: str
    was: OperatorId | None
    now: OperatorId | None
    note: str = ""


class RecoveryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How this start found its state."""

    #: resume, alone, regional, local, remote or fresh.
    path: str
    #: The epoch that was restored, if one was.
    epoch: Epoch | None
    reason: str
    problems: list[str]
    lost_input: list[LostInput]
    operators: list[OperatorFate]
    #: How often each path was taken, over all starts.
    counts: dict[str, int]


class RemoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the remote tier."""

    url: str
    #: The newest epoch that it holds, and how many epochs it is behind the local tier.
    epoch: Epoch
    behind: int
    last_ms: float
    #: Why the last upload failed; empty when it did not.
    problem: str
    #: Totals since the flow was started.
    epochs: int
    files: int
    size_bytes: int
    sent_bytes: int
    ahead_bytes: int
    failures: int


class WaitingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the flow that waits for a resource: a full disk, a store or a database that does not answer.

    It tries again by itself, and the flow continues when the resource is back.
    """

    resource: str
    #: What waits: the coordinator, an operator, a query, snapshots, a sink, the remote tier.
    part: str
    problem: str
    since_ms: int
    attempts: int
    #: When it tries again; None: with the next checkpoint.
    next_try_ms: int | None


class CodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which code runs, and whether the flow ran other code before this start."""

    hash: str
    #: When the flow first ran it.
    since_ms: int
    python: str
    pyspark: str
    cutline: str
    #: What has changed, in one line; empty: nothing since the last run.
    change: str = ""
    #: The savepoint of the state as the former code left it; empty: none was due or possible.
    savepoint: str = ""
    #: The epoch that this start restored on request, and the savepoint of what it gave up. That has left the flow's
    #: history: it cannot be restored, but cloned.
    restored: Epoch | None = None
    given_up: str = ""


class StartStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A start that is under way."""

    pid: int
    #: flow, Java, Spark, recovery or queries; empty: not known yet.
    step: str
    #: When the start began; 0: not known.
    since_ms: int
    #: The epoch or savepoint that it restores, because a person has requested it; empty: none.
    restores: str = ""


class CloneOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cloned flow begins."""

    flow: str
    epoch: Epoch


class FlowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole status of one flow."""

    flow: FlowName
    pid: int
    #: running, paused, waiting (for a resource that is away), unhealthy, failed or stopped. For readers also starting,
    #: ended (its process is gone), copy (of the folder of a flow) and new (it was never started).
    state: str
    generation: Generation
    recovery: RecoveryStatus
    operators: dict[str, OperatorStatus]
    sinks: dict[str, SinkStatus]
    health: HealthStatus
    checkpoints: CheckpointStatus
    messages: MessageCounts
    #: None without a remote tier.
    remote: RemoteStatus | None
    #: The newest outcomes, newest first.
    history: list[EpochOutcome]
    #: What the flow waits for, the longest wait first.
    waiting: list[WaitingStatus] = []
    #: Why it has failed, the root cause first; empty unless it has.
    failure: str = ""
    #: None in a status of a former version.
    code: CodeStatus | None = None
    #: When this process started the flow, and when the status was taken; 0 in a status of a former version.
    started_ms: int = 0
    at_ms: int = 0
    #: The epoch or savepoint that the next start restores, because a person has requested it; empty: none.
    restore_requested: str = ""
    #: For readers: the start that is under way; the rest is what the flow wrote before it.
    starting: StartStatus | None = None
    #: For readers: of a flow that has not been started yet, the flow that it was cloned from.
    cloned_from: CloneOrigin | None = None
