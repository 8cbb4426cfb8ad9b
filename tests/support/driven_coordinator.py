"""A coordinator with a world that does what it says when the test wants it to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from cutline.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.protocol.commit import CommitPermit
from cutline.protocol.coordinator import Coordinator, Settings, StoredPending, Topology
from cutline.protocol.messages import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CheckpointOptions,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    CutPoint,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    OperatorAck,
    OperatorAcked,
    PendingStored,
    ReleaseBelow,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    StoreAborted,
    StoreManifest,
    StorePending,
    SubtaskAck,
    TimePassed,
)
from cutline.protocol.publishing import CompleteEpoch
from cutline.protocol.trigger import TriggerPolicy

A = TypeVar("A")

#: Two sources, one aggregation with two subtasks and a sink, one sink at a source.
SUBTASKS = {"left": 1, "right": 1, "totals": 2}
SINKS = {"totals": ("table",), "left": ("raw",)}


def operator_ack(
    operator: str, epoch: int, *, batch: int = 0, subtasks: Sequence[int] = (0,), generation: int = 1
) -> OperatorAck:
    return OperatorAck(
        operator=OperatorId(operator),
        epoch=Epoch(epoch),
        generation=Generation(generation),
        cut=CutPoint(batch=BatchId(batch), barrier=Position(batch + 1), positions={}, aligned=True),
        subtasks=tuple(SubtaskAck(subtask=Subtask(i), files=1, size_bytes=10, new_bytes=5) for i in subtasks),
        record_sha256=f"{operator}-{epoch}",
    )


def complete_epoch(epoch: int, *, batch: int, previous: int = 0, generation: int = 1) -> CompleteEpoch:
    return CompleteEpoch(
        epoch=Epoch(epoch),
        generation=Generation(generation),
        previous_epoch=Epoch(previous),
        batches={OperatorId(name): BatchId(batch) for name in SUBTASKS},
    )


def stored_pending(epoch: int, *, started_ms: int = 0, is_resumable: bool = True) -> StoredPending:
    return StoredPending(epoch=Epoch(epoch), started_ms=started_ms, alignment_limit_ms=None, is_resumable=is_resumable)


class DrivenCoordinator:
    """Hands events to a coordinator and keeps what it asked for. Nothing is stored unless the test says so."""

    def __init__(
        self,
        *,
        interval_ms: int = 0,
        min_pause_ms: int = 0,
        max_concurrent: int = 1,
        timeout_ms: int = 1_000,
        retain: int = 3,
        last_epoch: int = NO_EPOCH,
        complete: Iterable[CompleteEpoch] = (),
        published: Mapping[str, int] | None = None,
        pending: Iterable[StoredPending] = (),
        sinks: Mapping[str, Sequence[str]] = SINKS,
        generation: int = 1,
        now_ms: int = 0,
        started: bool = True,
    ) -> None:
        self.now_ms = now_ms
        self.generation = generation
        self.core = Coordinator(
            topology=Topology(
                flow=FlowName("flow"),
                subtasks={OperatorId(name): count for name, count in SUBTASKS.items()},
                sources=frozenset({OperatorId("left"), OperatorId("right")}),
                sinks={OperatorId(op): tuple(SinkId(sink) for sink in names) for op, names in sinks.items()},
            ),
            generation=Generation(generation),
            settings=Settings(
                timeout_ms=timeout_ms,
                alignment_limit_ms=50,
                retain_checkpoints=retain,
                trigger=TriggerPolicy(
                    interval_ms=interval_ms,
                    min_pause_ms=min_pause_ms,
                    max_concurrent=max_concurrent,
                    first_ms=interval_ms,
                ),
                sink_retry_ms=100,
                sink_retry_limit_ms=1_000,
            ),
            last_epoch=Epoch(last_epoch),
            complete=complete,
            published={SinkId(name): Epoch(epoch) for name, epoch in (published or {}).items()},
        )
        self.actions: list[CoordinatorAction] = []
        if started:
            self.actions += self.core.start(pending, now_ms=now_ms)

    # ------------------------------------------------------------------ what happens

    def tell(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.core.handle(event, now_ms=self.now_ms)
        self.actions += actions
        return actions

    def request(self, name: str = "r", *, limit_ms: int | str | None = "as configured") -> list[CoordinatorAction]:
        options = None if isinstance(limit_ms, str) else CheckpointOptions(alignment_limit_ms=limit_ms)
        return self.tell(CheckpointRequested(request=name, options=options))

    def pending_stored(self, epoch: int) -> list[CoordinatorAction]:
        return self.tell(PendingStored(epoch=Epoch(epoch)))

    def ack(
        self, operator: str, epoch: int, *, batch: int = 0, subtasks: Sequence[int] | None = None
    ) -> list[CoordinatorAction]:
        whole = range(SUBTASKS[operator]) if subtasks is None else subtasks
        ack = operator_ack(operator, epoch, batch=batch, subtasks=list(whole), generation=self.generation)
        return self.tell(OperatorAcked(ack=ack))

    def ack_all(self, epoch: int, *, batch: int = 0) -> list[CoordinatorAction]:
        return [action for operator in SUBTASKS for action in self.ack(operator, epoch, batch=batch)]

    def manifest_stored(self, epoch: int) -> list[CoordinatorAction]:
        return self.tell(ManifestStored(epoch=Epoch(epoch)))

    def manifest_refused(self, epoch: int, reason: str = "disk full") -> list[CoordinatorAction]:
        return self.tell(ManifestRefused(epoch=Epoch(epoch), reason=reason))

    def abort_stored(self, epoch: int) -> list[CoordinatorAction]:
        return self.tell(AbortStored(epoch=Epoch(epoch)))

    def snapshot_failed(self, operator: str, epoch: int, reason: str = "disk full") -> list[CoordinatorAction]:
        return self.tell(
            SnapshotFailed(
                operator=OperatorId(operator),
                epoch=Epoch(epoch),
                generation=Generation(self.generation),
                reason=reason,
            )
        )

    def sink_committed(self, sink: str, epoch: int) -> list[CoordinatorAction]:
        return self.tell(SinkCommitted(operator=_owner(sink), sink=SinkId(sink), epoch=Epoch(epoch)))

    def sink_failed(self, sink: str, epoch: int) -> list[CoordinatorAction]:
        event = SinkCommitFailed(operator=_owner(sink), sink=SinkId(sink), epoch=Epoch(epoch), reason="no network")
        return self.tell(event)

    def pass_ms(self, ms: int) -> list[CoordinatorAction]:
        self.now_ms += ms
        return self.tell(TimePassed())

    def begin(self, epoch: int, name: str = "r") -> None:
        """Request an epoch and let its barriers go."""
        self.request(f"{name}{epoch}")
        self.pending_stored(epoch)

    def complete(self, epoch: int, *, batch: int = 0) -> list[CoordinatorAction]:
        """Take an epoch from the request to the stored manifest."""
        self.begin(epoch)
        self.ack_all(epoch, batch=batch)
        return self.manifest_stored(epoch)

    def publish(self, epoch: int) -> list[CoordinatorAction]:
        return [action for sink in ("table", "raw") for action in self.sink_committed(sink, epoch)]

    # ------------------------------------------------------------------ what it asked for

    def asked(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def stored_pending(self) -> list[int]:
        return [action.epoch for action in self.asked(StorePending)]

    @property
    def injected(self) -> list[tuple[str, int]]:
        return [(action.operator, action.epoch) for action in self.asked(InjectBarrier)]

    @property
    def manifests(self) -> list[int]:
        return [action.epoch for action in self.asked(StoreManifest)]

    @property
    def aborted(self) -> dict[int, str]:
        return {action.epoch: action.reason for action in self.asked(StoreAborted)}

    @property
    def closed(self) -> list[tuple[int, bool]]:
        return [(action.epoch, action.completed) for action in self.asked(AnnounceClosed)]

    @property
    def released_below(self) -> list[int]:
        return [action.min_epoch for action in self.asked(ReleaseBelow)]

    @property
    def answers(self) -> dict[str, AnswerRequest]:
        return {action.request: action for action in self.asked(AnswerRequest)}

    def permits(self, sink: str) -> list[CommitPermit]:
        return [action.permit for action in self.asked(CommitSink) if action.permit.sink == sink]


def _owner(sink: str) -> OperatorId:
    return next(OperatorId(operator) for operator, sinks in SINKS.items() if sink in sinks)
