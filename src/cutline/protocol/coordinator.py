"""The coordinator: begins epochs, tallies acknowledgements, completes or aborts, tells sinks to publish.

Durable first: it acts on the world only after it has heard that the record of its decision is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from cutline.ids import NO_EPOCH, Epoch, FlowName, Generation, OperatorId, SinkId, Subtask
from cutline.protocol.checkpoint import AckOutcome, EpochState, PendingEpoch
from cutline.protocol.messages import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
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
    TimePassed,
)
from cutline.protocol.publishing import CompleteEpoch, Publisher
from cutline.protocol.trigger import TriggerPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What the coordinator must know of a flow's graph."""

    flow: FlowName
    #: Expected subtasks of each operator.
    subtasks: Mapping[OperatorId, int]
    sources: frozenset[OperatorId]
    sinks: Mapping[OperatorId, tuple[SinkId, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPending:
    """A pending epoch that an earlier incarnation recorded."""

    epoch: Epoch
    started_ms: int
    alignment_limit_ms: int | None
    #: Whether the flow goes on with the logs that hold the epoch's barriers (it was not restored to another epoch).
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The coordinator's own limits."""

    timeout_ms: int
    alignment_limit_ms: int | None
    retain_checkpoints: int
    trigger: TriggerPolicy
    sink_retry_ms: int = 500
    sink_retry_limit_ms: int = 30_000


class Coordinator:
    """The checkpoint coordinator of one flow."""

    def __init__(
        self,
        *,
        topology: Topology,
        generation: Generation,
        settings: Settings,
        last_epoch: Epoch = NO_EPOCH,
        complete: Iterable[CompleteEpoch] = (),
        published: Mapping[SinkId, Epoch] | None = None,
    ) -> None:
        """``complete``: the live complete epochs, ascending; ``published``: how far each sink is."""
        self._topology = topology
        self._generation = generation
        self._settings = settings
        self._last_epoch = last_epoch
        self._pending: dict[Epoch, PendingEpoch] = {}
        self._complete: list[CompleteEpoch] = list(complete)
        self._publisher = Publisher(
            topology.flow,
            {sink: operator for operator, sinks in topology.sinks.items() for sink in sinks},
            published or {},
            retry_ms=settings.sink_retry_ms,
            retry_limit_ms=settings.sink_retry_limit_ms,
        )
        #: Requests answered only when everything their epoch publishes is published.
        self._awaiting_publication: dict[str, Epoch] = {}
        self._accepts_triggers = False
        self.ack_outcomes: dict[AckOutcome, int] = dict.fromkeys(AckOutcome, 0)

    # ------------------------------------------------------------------ what others may look at

    @property
    def last_epoch(self) -> Epoch:
        return self._last_epoch

    @property
    def pending(self) -> Mapping[Epoch, PendingEpoch]:
        return self._pending

    @property
    def complete(self) -> tuple[CompleteEpoch, ...]:
        return tuple(self._complete)

    def published(self, sink: SinkId) -> Epoch:
        return self._publisher.published(sink)

    def is_settled(self) -> bool:
        """Whether nothing is under way: no pending epoch, no sink behind the newest complete one."""
        return not self._pending and self._publisher.is_idle()

    # ------------------------------------------------------------------ the doors

    def start(self, pending: Iterable[StoredPending], *, now_ms: int) -> list[CoordinatorAction]:
        """Take up what an earlier incarnation left: replay sink commits, resume or abort pending epochs."""
        actions: list[CoordinatorAction] = list(self._publish(now_ms))
        newest = self._complete[-1].epoch if self._complete else NO_EPOCH
        for stored in pending:
            epoch = self._new_pending(stored.epoch, stored.started_ms, stored.alignment_limit_ms)
            self._last_epoch = max(self._last_epoch, stored.epoch)
            if stored.epoch < newest:
                actions += self._abort(epoch, "a later epoch completed")
            elif not stored.is_resumable:
                actions += self._abort(epoch, "the flow was restored while the epoch was pending")
            elif now_ms - stored.started_ms >= self._settings.timeout_ms:
                actions += self._abort(epoch, "timed out while the coordinator was down")
            else:
                actions += self._inject(epoch)
        self._accepts_triggers = True
        return actions

    def handle(self, event: CoordinatorEvent, *, now_ms: int) -> list[CoordinatorAction]:
        """Take in one event and say what is to be done about it."""
        match event:
            case TimePassed():
                return self._time_passed(now_ms)
            case CheckpointRequested():
                return self._requested(event, now_ms)
            case PendingStored():
                epoch = self._pending.get(event.epoch)
                return self._inject(epoch) if epoch and epoch.state is EpochState.RECORDING else []
            case OperatorAcked():
                return self._acked(event.ack)
            case SnapshotFailed():
                return self._snapshot_failed(event)
            case ManifestStored():
                return self._manifest_stored(event.epoch, now_ms)
            case ManifestRefused():
                epoch = self._pending.get(event.epoch)
                if epoch is None or epoch.state is not EpochState.COMPLETING:
                    return []
                return [*self._abort(epoch, event.reason), *self._store_next_manifest()]
            case AbortStored():
                return self._abort_stored(event.epoch, now_ms)
            case SinkCommitted():
                self._publisher.committed(event.sink, event.epoch)
                return [*self._publish(now_ms), *self._answers(), *self._release()]
            case SinkCommitFailed():
                self._publisher.failed(event.sink, event.epoch, now_ms)
                return []
            case _:
                assert_never(event)

    def stop_triggering(self, *, now_ms: int) -> list[CoordinatorAction]:
        """Begin no more epochs; those under way go on."""
        self._accepts_triggers = False
        return [
            action for request in self._settings.trigger.take_postponed() for action in self._requested(request, now_ms)
        ]

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` would change something; None if never."""
        deadlines = [
            epoch.started_ms + self._settings.timeout_ms for epoch in self._pending.values() if _expires(epoch)
        ]
        if self._accepts_triggers:
            deadlines += [self._settings.trigger.next_due_ms(len(self._pending))] if self._triggers_by_time() else []
        deadlines += self._publisher.deadlines_ms()
        return min(deadlines, default=None)

    # ------------------------------------------------------------------ steps

    def _triggers_by_time(self) -> bool:
        return self._settings.trigger.is_timed() and self._settings.trigger.has_room(len(self._pending))

    def _new_pending(self, epoch: Epoch, started_ms: int, alignment_limit_ms: int | None) -> PendingEpoch:
        pending = PendingEpoch(
            epoch=epoch,
            generation=self._generation,
            started_ms=started_ms,
            alignment_limit_ms=alignment_limit_ms,
            awaiting={op: {Subtask(i) for i in range(count)} for op, count in self._topology.subtasks.items()},
        )
        self._pending[epoch] = pending
        return pending

    def _time_passed(self, now_ms: int) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for epoch in list(self._pending.values()):
            if _expires(epoch) and now_ms - epoch.started_ms >= self._settings.timeout_ms:
                missing = "; ".join(f"{op} subtasks {subtasks}" for op, subtasks in epoch.missing().items())
                actions += self._abort(epoch, f"timed out after {now_ms - epoch.started_ms} ms waiting for {missing}")
        if self._accepts_triggers and self._settings.trigger.is_due(now_ms, len(self._pending)):
            actions += self._begin(now_ms, self._settings.alignment_limit_ms, request=None)
        actions += self._publish(now_ms)
        return actions

    def _requested(self, event: CheckpointRequested, now_ms: int) -> list[CoordinatorAction]:
        if not self._accepts_triggers:
            return [AnswerRequest(request=event.request, epoch=NO_EPOCH, completed=False, reason="flow is not running")]
        if not self._settings.trigger.has_room(len(self._pending)):
            newest = self._pending[max(self._pending)]
            # Joining an epoch that has not sent its barriers is as good as a new one; a later one would not be.
            if newest.state is EpochState.RECORDING and event.options is None:
                newest.requests.append(event.request)
                return []
            if self._settings.trigger.postpone(event):
                return []
            return [AnswerRequest(request=event.request, epoch=NO_EPOCH, completed=False, reason="too many requests")]
        limit = event.options.alignment_limit_ms if event.options else self._settings.alignment_limit_ms
        return self._begin(now_ms, limit, request=event.request)

    def _begin(self, now_ms: int, limit_ms: int | None, *, request: str | None) -> list[CoordinatorAction]:
        self._last_epoch = Epoch(self._last_epoch + 1)
        epoch = self._new_pending(self._last_epoch, now_ms, limit_ms)
        if request is not None:
            epoch.requests.append(request)
        self._settings.trigger.started(now_ms)
        return [StorePending(epoch=epoch.epoch, started_ms=now_ms, alignment_limit_ms=limit_ms)]

    def _inject(self, epoch: PendingEpoch) -> list[CoordinatorAction]:
        epoch.move(EpochState.COLLECTING)
        return [
            InjectBarrier(operator=operator, epoch=epoch.epoch, alignment_limit_ms=epoch.alignment_limit_ms)
            for operator in sorted(self._topology.sources)
        ]

    def _acked(self, ack: OperatorAck) -> list[CoordinatorAction]:
        epoch = self._pending.get(ack.epoch)
        outcome = epoch.acknowledge(ack) if epoch else AckOutcome.UNKNOWN
        self.ack_outcomes[outcome] += 1
        return self._store_next_manifest() if outcome is AckOutcome.ACCEPTED else []

    def _store_next_manifest(self) -> list[CoordinatorAction]:
        """One at a time: stored out of order, two epochs would both publish the batches that they share."""
        if any(epoch.state is EpochState.COMPLETING for epoch in self._pending.values()):
            return []
        ready = [e for e in self._pending.values() if e.state is EpochState.COLLECTING and e.is_acknowledged_by_all()]
        if not ready:
            return []
        epoch = min(ready, key=lambda one: one.epoch)
        epoch.move(EpochState.COMPLETING)
        previous = self._complete[-1].epoch if self._complete else NO_EPOCH
        return [
            StoreManifest(
                epoch=epoch.epoch, previous_epoch=previous, started_ms=epoch.started_ms, acks=dict(epoch.acks)
            )
        ]

    def _snapshot_failed(self, event: SnapshotFailed) -> list[CoordinatorAction]:
        epoch = self._pending.get(event.epoch)
        if epoch is None or event.generation != self._generation or epoch.state is not EpochState.COLLECTING:
            return []
        return self._abort(epoch, f"snapshot of {event.operator} failed: {event.reason}")

    def _manifest_stored(self, number: Epoch, now_ms: int) -> list[CoordinatorAction]:
        epoch = self._pending.get(number)
        if epoch is None or epoch.state is not EpochState.COMPLETING:
            return []
        epoch.move(EpochState.COMPLETED)
        del self._pending[number]
        self._complete.append(
            CompleteEpoch(
                epoch=number,
                generation=self._generation,
                previous_epoch=self._complete[-1].epoch if self._complete else NO_EPOCH,
                batches={operator: ack.cut.batch for operator, ack in epoch.acks.items()},
            )
        )
        self._awaiting_publication.update(dict.fromkeys(epoch.requests, number))
        actions: list[CoordinatorAction] = [AnnounceClosed(epoch=number, completed=True)]
        # What a later complete epoch covers is of no use any more.
        for earlier in [p for p in self._pending.values() if p.epoch < number]:
            if _expires(earlier):
                # Whoever waits for it gets what they asked for, and more, from this one.
                self._awaiting_publication.update(dict.fromkeys(earlier.requests, number))
                earlier.requests.clear()
                actions += self._abort(earlier, f"subsumed by epoch {number}")
        actions += self._store_next_manifest()
        actions += self._publish(now_ms)
        actions += self._answers()
        actions += self._release()
        return actions + self._ended(now_ms)

    def _abort(self, epoch: PendingEpoch, reason: str) -> list[CoordinatorAction]:
        epoch.move(EpochState.ABORTING)
        epoch.abort_reason = reason
        return [StoreAborted(epoch=epoch.epoch, reason=reason)]

    def _abort_stored(self, number: Epoch, now_ms: int) -> list[CoordinatorAction]:
        epoch = self._pending.get(number)
        if epoch is None or epoch.state is not EpochState.ABORTING:
            return []
        epoch.move(EpochState.ABORTED)
        del self._pending[number]
        answers = [
            AnswerRequest(request=request, epoch=number, completed=False, reason=epoch.abort_reason)
            for request in epoch.requests
        ]
        return [AnnounceClosed(epoch=number, completed=False), *answers, *self._ended(now_ms)]

    def _ended(self, now_ms: int) -> list[CoordinatorAction]:
        self._settings.trigger.ended(now_ms)
        # The first begins an epoch; those after it join that epoch as long as it has not sent its barriers.
        postponed = self._settings.trigger.take_postponed()
        return [action for request in postponed for action in self._requested(request, now_ms)]

    # ------------------------------------------------------------------ publishing and letting go

    def _publish(self, now_ms: int) -> list[CommitSink]:
        return self._publisher.due(self._complete, now_ms)

    def _answers(self) -> list[CoordinatorAction]:
        everywhere = self._publisher.published_everywhere(self._complete)
        done = {request: epoch for request, epoch in self._awaiting_publication.items() if epoch <= everywhere}
        for request in done:
            del self._awaiting_publication[request]
        return [AnswerRequest(request=request, epoch=epoch, completed=True) for request, epoch in done.items()]

    def _release(self) -> list[CoordinatorAction]:
        """Old epochs may go once every sink has published them."""
        everywhere = self._publisher.published_everywhere(self._complete)
        surplus = len(self._complete) - self._settings.retain_checkpoints
        expendable = [old for old in self._complete[: max(surplus, 0)] if old.epoch < everywhere]
        if not expendable:
            return []
        self._complete = self._complete[len(expendable) :]
        return [ReleaseBelow(min_epoch=self._complete[0].epoch)]


def _expires(epoch: PendingEpoch) -> bool:
    """Whether it may still be given up. A completing one may not: its manifest may be stored at this very moment."""
    return epoch.state in (EpochState.RECORDING, EpochState.COLLECTING)
