"""A coordinator with a world that does what it says when the test wants it to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from cutline.model.cut import BarrierTerms, CutPoint, OperatorAck, SubtaskAck
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.setup import EpochNumbers, Settings, StoredPending, Topology
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CheckpointOptions,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    FoundManifest,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    PinChanged,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    StoreAborted,
    StoreManifest,
    StorePending,
)
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
from cutline.protocol.publish.publishing import CompleteEpoch

A = TypeVar("A")

#: Two sources, one aggregation with two subtasks and a sink, one sink at a source.
SUBTASKS = {"left": 1, "right": 1, "totals": 2}
SINKS = {"totals": ("table",), "left": ("raw",)}
#: Later than anything a test waits for: the timers that it is not about stay out of its way.
NEVER_MS = 10**12


def operator_ack(
    operator: str,
    epoch: int,
    *,
    batch: int = 0,
    subtasks: Sequence[int] = (0,),
    generation: int = 1,
    record: str | None = None,
) -> OperatorAck:
    return OperatorAck(
        operator=OperatorId(operator),
        epoch=Epoch(epoch),
        generation=Generation(generation),
        cut=CutPoint(batch=BatchId(batch), barrier=Position(batch + 1), positions={}, aligned=True),
        subtasks=tuple(SubtaskAck(subtask=Subtask(i), files=1, size_bytes=10, new_bytes=5) for i in subtasks),
        record_sha256=record or f"{operator}-{epoch}",
    )


def complete_epoch(
    epoch: int, *, batch: int, previous: int = 0, generation: int = 1, completed_ms: int = 0
) -> CompleteEpoch:
    return CompleteEpoch(
        epoch=Epoch(epoch),
        generation=Generation(generation),
        previous_epoch=Epoch(previous),
        batches={OperatorId(name): BatchId(batch) for name in SUBTASKS},
        completed_ms=completed_ms,
    )


def found_manifest(*, batch: int, previous: int = 0, generation: int = 1) -> FoundManifest:
    return FoundManifest(
        generation=Generation(generation),
        previous_epoch=Epoch(previous),
        batches={OperatorId(name): BatchId(batch) for name in SUBTASKS},
    )


def stored_pending(epoch: int, *, started_ms: int = 0, is_resumable: bool = True) -> StoredPending:
    terms = BarrierTerms(alignment_limit_ms=None, started_ms=started_ms)
    return StoredPending(epoch=Epoch(epoch), terms=terms, is_resumable=is_resumable)


class DrivenCoordinator:
    """Hands events to a coordinator and keeps what it asked for. Nothing is stored unless the test says so."""

    def __init__(
        self,
        *,
        interval_ms: int = 0,
        min_pause_ms: int = 0,
        max_concurrent: int = 1,
        trigger: TriggerSettings | None = None,
        timeout_ms: int = 1_000,
        operator_timeouts_ms: Mapping[str, int] | None = None,
        ask_again_ms: int = NEVER_MS,
        ask_again_limit: int = 8,
        tolerable_failures: int | None = None,
        retain: int = 3,
        retain_ms: int | None = None,
        sink_silence_ms: int = NEVER_MS,
        last_epoch: int = NO_EPOCH,
        complete: Iterable[CompleteEpoch] = (),
        published: Mapping[str, int] | None = None,
        pending: Iterable[StoredPending] = (),
        sinks: Mapping[str, Sequence[str]] = SINKS,
        subtasks: Mapping[str, int] = SUBTASKS,
        generation: int = 1,
        generations: Mapping[str, int] | None = None,
        pins: Iterable[int] = (),
        now_ms: int = 0,
        started: bool = True,
    ) -> None:
        self.now_ms = now_ms
        self.generation = generation
        self.core = Coordinator(
            topology=Topology(
                flow=FlowName("flow"),
                subtasks={OperatorId(name): count for name, count in subtasks.items()},
                sources=frozenset({OperatorId("left"), OperatorId("right")}),
                sinks={OperatorId(op): tuple(SinkId(sink) for sink in names) for op, names in sinks.items()},
            ),
            generation=Generation(generation),
            settings=Settings(
                timeout_ms=timeout_ms,
                operator_timeouts_ms={OperatorId(name): ms for name, ms in (operator_timeouts_ms or {}).items()},
                alignment_limit_ms=50,
                retention=RetentionPolicy(count=retain, age_ms=retain_ms),
                trigger=TriggerPolicy(
                    trigger
                    or TriggerSettings(
                        interval_ms=interval_ms, min_pause_ms=min_pause_ms, max_concurrent=max_concurrent
                    )
                ),
                tolerable_failures=tolerable_failures,
                ask_again_ms=ask_again_ms,
                ask_again_limit=ask_again_limit,
                sink_retry_ms=100,
                sink_retry_limit_ms=1_000,
                sink_silence_ms=sink_silence_ms,
            ),
            generations={OperatorId(name): Generation(number) for name, number in (generations or {}).items()},
            numbers=EpochNumbers(Epoch(last_epoch)),
            complete=complete,
            published={SinkId(name): Epoch(epoch) for name, epoch in (published or {}).items()},
            pins=[Epoch(epoch) for epoch in pins],
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

    def manifest_stored(self, epoch: int, *, found: FoundManifest | None = None) -> list[CoordinatorAction]:
        return self.tell(ManifestStored(epoch=Epoch(epoch), found=found))

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

    def operator_started(
        self, operator: str, *open_epochs: int, generation: int | None = None
    ) -> list[CoordinatorAction]:
        return self.tell(
            OperatorStarted(
                operator=OperatorId(operator),
                generation=Generation(self.generation if generation is None else generation),
                open_epochs=tuple(Epoch(epoch) for epoch in open_epochs),
            )
        )

    def progress(
        self, operator: str, *, batches: int = 0, rows: int = 0, watermark_ms: int = 0, is_without_room: bool = False
    ) -> list[CoordinatorAction]:
        return self.tell(
            ProgressMade(
                operator=OperatorId(operator),
                is_source=operator in ("left", "right"),
                batches=batches,
                rows=rows,
                watermark_ms=watermark_ms,
                is_without_room=is_without_room,
            )
        )

    def lose(self, *operators: str, reason: str = "its host is gone") -> list[CoordinatorAction]:
        return self.tell(RegionLost(operators=frozenset(OperatorId(name) for name in operators), reason=reason))

    def restore(self, *operators: str, generation: int) -> list[CoordinatorAction]:
        names = frozenset(OperatorId(name) for name in operators)
        return self.tell(RegionRestored(operators=names, generation=Generation(generation)))

    def pin(self, epoch: int) -> list[CoordinatorAction]:
        return self.tell(PinChanged(epoch=Epoch(epoch), is_pinned=True))

    def unpin(self, epoch: int) -> list[CoordinatorAction]:
        return self.tell(PinChanged(epoch=Epoch(epoch), is_pinned=False))

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
    def released(self) -> list[tuple[int, ...]]:
        """What was let go of, each time."""
        return [tuple(action.drop) for action in self.asked(ReleaseEpochs) if action.drop]

    @property
    def questions(self) -> list[tuple[str, int]]:
        """Who was asked for an acknowledgement of which epoch."""
        return [(action.operator, action.epoch) for action in self.asked(RequestAck)]

    @property
    def health(self) -> list[tuple[bool, int]]:
        return [(action.is_healthy, action.failures) for action in self.asked(ReportHealth)]

    def next_deadline_ms(self) -> int | None:
        """The next deadline that is about anything the test has switched on."""
        deadline = self.core.next_deadline_ms(now_ms=self.now_ms)
        return None if deadline is not None and deadline >= NEVER_MS else deadline

    @property
    def answers(self) -> dict[str, AnswerRequest]:
        return {action.request: action for action in self.asked(AnswerRequest)}

    def permits(self, sink: str) -> list[CommitPermit]:
        return [action.permit for action in self.asked(CommitSink) if action.permit.sink == sink]


def _owner(sink: str) -> OperatorId:
    return next(OperatorId(operator) for operator, sinks in SINKS.items() if sink in sinks)
