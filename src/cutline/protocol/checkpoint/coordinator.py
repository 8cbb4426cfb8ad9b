"""The coordinator: begins epochs, tallies acknowledgements, completes or aborts, tells sinks to publish.

Durable first: it acts on the world only after it has heard that the record of its decision is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from cutline.errors import InvariantViolation
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, Generation, OperatorId, SinkId, Subtask
from cutline.protocol.checkpoint.pending_epoch import AckOutcome, EpochState, PendingEpoch
from cutline.protocol.checkpoint.trigger import TriggerPolicy
from cutline.protocol.history.retention import RetentionPolicy
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    BarrierTerms,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    OperatorAck,
    OperatorAcked,
    OperatorStarted,
    PendingStored,
    PinChanged,
    ProgressMade,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    StoreAborted,
    StoreManifest,
    StorePending,
    TimePassed,
)
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher

_SUBTASKS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What the coordinator must know of a flow's graph."""

    flow: FlowName
    #: Expected subtasks of each operator.
    subtasks: Mapping[OperatorId, int]
    sources: frozenset[OperatorId]
    sinks: Mapping[OperatorId, tuple[SinkId, ...]]
    #: Per-operator mode: the one operator that is coordinated here, whatever its inputs; it is the one source.
    alone: OperatorId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPending:
    """A pending epoch that an earlier incarnation recorded."""

    epoch: Epoch
    terms: BarrierTerms
    #: Whether the flow goes on with the logs that hold the epoch's barriers (it was not restored to another epoch).
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The coordinator's own limits."""

    timeout_ms: int
    #: An operator that has not acknowledged after so long fails the epoch before the whole flow's timeout does.
    operator_timeouts_ms: Mapping[OperatorId, int] = field(default_factory=dict)
    alignment_limit_ms: int | None
    retention: RetentionPolicy
    trigger: TriggerPolicy
    #: So many aborted checkpoints in a row are borne; one more and the flow is unhealthy. None: any number.
    tolerable_failures: int | None = None
    #: Operators that say nothing are asked again, with doubling pauses, so many times.
    ask_again_ms: int = 2_000
    ask_again_limit: int = 8
    sink_retry_ms: int = 500
    sink_retry_limit_ms: int = 30_000
    sink_silence_ms: int = 60_000


class EpochNumbers:
    """Gives out each number once."""

    def __init__(self, last: Epoch = NO_EPOCH) -> None:
        self.last = last

    def take(self) -> Epoch:
        self.last = Epoch(self.last + 1)
        return self.last

    def saw(self, epoch: Epoch) -> None:
        self.last = max(self.last, epoch)


class Coordinator:
    """The checkpoint coordinator of one flow, or of one operator that is checkpointed alone."""

    def __init__(
        self,
        *,
        topology: Topology,
        generation: Generation,
        settings: Settings,
        generations: Mapping[OperatorId, Generation] | None = None,
        numbers: EpochNumbers | None = None,
        complete: Iterable[CompleteEpoch] = (),
        published: Mapping[SinkId, Epoch] | None = None,
        pins: Iterable[Epoch] = (),
    ) -> None:
        """``complete``: the live complete epochs, ascending; ``published``: how far each sink is.

        ``generations``: that of each operator, where it is not the coordinator's. ``numbers``: where epochs get theirs.
        """
        self._topology = topology
        self._generation = generation
        self._generations = {name: (generations or {}).get(name, generation) for name in topology.subtasks}
        self._pins = set(pins)
        #: Operators that are being brought back; nothing can complete without them.
        self._lost: set[OperatorId] = set()
        self._failures = 0
        self._is_healthy = True
        self._settings = settings
        self._numbers = numbers or EpochNumbers()
        self._pending: dict[Epoch, PendingEpoch] = {}
        self._complete: list[CompleteEpoch] = list(complete)
        self._publisher = Publisher(
            topology.flow,
            {sink: operator for operator, sinks in topology.sinks.items() for sink in sinks},
            published or {},
            retry_ms=settings.sink_retry_ms,
            retry_limit_ms=settings.sink_retry_limit_ms,
            silence_ms=settings.sink_silence_ms,
        )
        #: Requests answered only when everything their epoch publishes is published.
        self._awaiting_publication: dict[str, Epoch] = {}
        self._accepts_triggers = False
        self.ack_outcomes: dict[AckOutcome, int] = dict.fromkeys(AckOutcome, 0)

    # ------------------------------------------------------------------ what others may look at

    @property
    def generation(self) -> Generation:
        """In which it writes its records; grows when a region is restored."""
        return self._generation

    @property
    def last_epoch(self) -> Epoch:
        return self._numbers.last

    @property
    def min_epoch(self) -> Epoch:
        """The oldest epoch that is kept; NO_EPOCH without one."""
        return self._complete[0].epoch if self._complete else NO_EPOCH

    @property
    def sinks(self) -> tuple[SinkId, ...]:
        return tuple(sink for sinks in self._topology.sinks.values() for sink in sinks)

    @property
    def pins(self) -> frozenset[Epoch]:
        return frozenset(self._pins)

    @property
    def is_healthy(self) -> bool:
        return self._is_healthy

    @property
    def failures_in_a_row(self) -> int:
        return self._failures

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
            # The clock may have been set back since; an epoch must not seem to begin in the future.
            began_ms = min(stored.terms.started_ms, now_ms)
            # One that the flow went back behind is dead whoever completes it; of the others that must be decided here.
            epoch = self._new_pending(stored.epoch, stored.terms, began_ms, is_inherited=stored.is_resumable)
            self._numbers.saw(stored.epoch)
            if stored.epoch < newest:
                actions += self._abort(epoch, "a later epoch completed")
            elif not stored.is_resumable:
                actions += self._abort(epoch, "the flow was restored while the epoch was pending")
            elif now_ms - began_ms >= self._settings.timeout_ms:
                actions += self._abort(epoch, "timed out while the coordinator was down")
            else:
                self._collect(epoch, now_ms)
                # Some may have cut and acknowledged already, to a coordinator that has forgotten it.
                actions += self._ask(epoch)
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
                return self._inject(epoch, now_ms) if epoch and epoch.state is EpochState.RECORDING else []
            case OperatorAcked():
                return self._acked(event.ack)
            case OperatorStarted():
                return self._operator_started(event, now_ms)
            case ProgressMade():
                self._settings.trigger.progressed(event)
                return self._begin_if_due(now_ms)
            case RegionLost():
                return self._region_lost(event)
            case RegionRestored():
                return self._region_restored(event, now_ms)
            case PinChanged():
                return self._pin_changed(event, now_ms)
            case SnapshotFailed():
                return self._snapshot_failed(event)
            case ManifestStored():
                return self._manifest_stored(event, now_ms)
            case ManifestRefused():
                epoch = self._pending.get(event.epoch)
                if epoch is None or epoch.state is not EpochState.COMPLETING:
                    return []
                return [*self._abort(epoch, event.reason), *self._store_next_manifest()]
            case AbortStored():
                return self._abort_stored(event.epoch, now_ms)
            case SinkCommitted():
                self._publisher.committed(event.sink, event.epoch)
                return [*self._publish(now_ms), *self._answers(), *self._release(now_ms)]
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

    def next_deadline_ms(self, *, now_ms: int) -> int | None:
        """When ``TimePassed`` would change something; None if never."""
        deadlines = [*self._publisher.deadlines_ms()]
        for epoch in self._pending.values():
            # One that all have acknowledged waits for the manifest before it, and time changes nothing about that.
            if _expires(epoch) and not epoch.is_acknowledged_by_all():
                deadlines.append(epoch.started_ms + min([self._settings.timeout_ms, *self._missing_limits_ms(epoch)]))
            if self._asks(epoch):
                deadlines.append(epoch.ask_at_ms)
        if self._begins_epochs():
            due = self._settings.trigger.next_due_ms(now_ms, len(self._pending))
            deadlines += [] if due is None else [due]
        expiry = self._settings.retention.next_expiry_ms(self._complete, self._pins, now_ms)
        deadlines += [] if expiry is None else [expiry]
        return min(deadlines, default=None)

    # ------------------------------------------------------------------ steps

    def _begins_epochs(self) -> bool:
        return self._accepts_triggers and not self._lost

    def _asks(self, epoch: PendingEpoch) -> bool:
        is_waited_for = epoch.state is EpochState.COLLECTING and not epoch.is_acknowledged_by_all()
        return is_waited_for and epoch.asked < self._settings.ask_again_limit

    def _missing_limits_ms(self, epoch: PendingEpoch) -> list[int]:
        limits = self._settings.operator_timeouts_ms
        return [limit_ms for operator, limit_ms in limits.items() if operator in epoch.incomplete]

    def _new_pending(
        self, epoch: Epoch, terms: BarrierTerms, started_ms: int, *, is_inherited: bool = False
    ) -> PendingEpoch:
        pending = PendingEpoch(
            epoch=epoch,
            generations=self._generations,
            terms=terms,
            started_ms=started_ms,
            is_inherited=is_inherited,
            awaiting={op: {Subtask(i) for i in range(count)} for op, count in self._topology.subtasks.items()},
        )
        self._pending[epoch] = pending
        return pending

    def _time_passed(self, now_ms: int) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for epoch in list(self._pending.values()):
            late = self._who_is_late(epoch, now_ms)
            if late and _expires(epoch):
                actions += self._abort(epoch, f"timed out after {now_ms - epoch.started_ms} ms waiting for {late}")
            elif self._asks(epoch) and now_ms >= epoch.ask_at_ms:
                epoch.asked += 1
                epoch.ask_at_ms = now_ms + self._settings.ask_again_ms * 2**epoch.asked
                actions += self._ask(epoch)
        actions += self._begin_if_due(now_ms)
        actions += self._publish(now_ms)
        actions += self._release(now_ms)
        return actions

    def _who_is_late(self, epoch: PendingEpoch, now_ms: int) -> str:
        """Those for whom the epoch is given up, for people; empty when nobody is late."""
        waited = now_ms - epoch.started_ms
        limits = self._settings.operator_timeouts_ms
        if waited < min([self._settings.timeout_ms, *self._missing_limits_ms(epoch)]):
            return ""
        late = {
            operator: subtasks
            for operator, subtasks in epoch.missing().items()
            if waited >= min(self._settings.timeout_ms, limits.get(operator, self._settings.timeout_ms))
        }
        return "; ".join(f"{operator} subtasks {_in_short(subtasks)}" for operator, subtasks in late.items())

    def _begin_if_due(self, now_ms: int) -> list[CoordinatorAction]:
        if not self._begins_epochs() or not self._settings.trigger.is_due(now_ms, len(self._pending)):
            return []
        return self._begin(now_ms, self._settings.alignment_limit_ms, is_binding=False, request=None)

    def _requested(self, event: CheckpointRequested, now_ms: int) -> list[CoordinatorAction]:
        if not self._accepts_triggers:
            return [AnswerRequest(request=event.request, epoch=NO_EPOCH, completed=False, reason="flow is not running")]
        if self._lost or not self._settings.trigger.has_room(len(self._pending)):
            newest = self._pending[max(self._pending)] if self._pending else None
            # Joining an epoch that has not sent its barriers is as good as a new one; a later one would not be.
            if newest and newest.state is EpochState.RECORDING and event.options is None:
                newest.requests.append(event.request)
                return []
            if self._settings.trigger.postpone(event):
                return []
            return [AnswerRequest(request=event.request, epoch=NO_EPOCH, completed=False, reason="too many requests")]
        limit = event.options.alignment_limit_ms if event.options else self._settings.alignment_limit_ms
        return self._begin(now_ms, limit, is_binding=event.options is not None, request=event.request)

    def _begin(
        self, now_ms: int, limit_ms: int | None, *, is_binding: bool, request: str | None
    ) -> list[CoordinatorAction]:
        terms = BarrierTerms(
            alignment_limit_ms=limit_ms, is_binding=is_binding, started_ms=now_ms, alone=self._topology.alone
        )
        epoch = self._new_pending(self._numbers.take(), terms, now_ms)
        if request is not None:
            epoch.requests.append(request)
        self._settings.trigger.started(now_ms)
        return [StorePending(epoch=epoch.epoch, terms=terms)]

    def _collect(self, epoch: PendingEpoch, now_ms: int) -> None:
        epoch.move(EpochState.COLLECTING)
        epoch.ask_at_ms = now_ms + self._settings.ask_again_ms

    def _inject(self, epoch: PendingEpoch, now_ms: int) -> list[CoordinatorAction]:
        self._collect(epoch, now_ms)
        return [self._injection(operator, epoch) for operator in sorted(self._topology.sources)]

    def _injection(self, operator: OperatorId, epoch: PendingEpoch) -> InjectBarrier:
        return InjectBarrier(operator=operator, epoch=epoch.epoch, terms=epoch.terms)

    def _ask(self, epoch: PendingEpoch) -> list[CoordinatorAction]:
        """Remind everybody who has not acknowledged; a source may not even know of the epoch."""
        return [action for operator in sorted(epoch.incomplete) for action in self._remind(operator, epoch)]

    def _remind(self, operator: OperatorId, epoch: PendingEpoch) -> list[CoordinatorAction]:
        question = RequestAck(operator=operator, epoch=epoch.epoch)
        return [self._injection(operator, epoch), question] if operator in self._topology.sources else [question]

    def _operator_started(self, event: OperatorStarted, now_ms: int) -> list[CoordinatorAction]:
        """Tell it what it has missed."""
        if event.generation != self._generations[event.operator]:
            return []
        actions: list[CoordinatorAction] = [
            AnnounceClosed(epoch=epoch, completed=self._is_complete(epoch), operator=event.operator, is_reminder=True)
            for epoch in event.open_epochs
            if epoch not in self._pending
        ]
        for epoch in self._pending.values():
            if epoch.state is EpochState.COLLECTING and epoch.awaiting[event.operator]:
                actions += self._remind(event.operator, epoch)
        self._publisher.restarted(event.operator, now_ms)
        return [*actions, *self._publish(now_ms)]

    def _is_complete(self, epoch: Epoch) -> bool:
        return any(item.epoch == epoch for item in self._complete)

    def _region_lost(self, event: RegionLost) -> list[CoordinatorAction]:
        """They go back behind everything that is pending: none of it can complete."""
        self._lost |= event.operators
        reason = f"{', '.join(sorted(event.operators))} had to go back: {event.reason}"
        actions: list[CoordinatorAction] = []
        for epoch in [one for one in self._pending.values() if _expires(one)]:
            epoch.is_excused = True
            actions += self._abort(epoch, reason)
        return actions

    def _region_restored(self, event: RegionRestored, now_ms: int) -> list[CoordinatorAction]:
        # A late word of an earlier restore says nothing of those that were restored again since.
        back = {operator for operator in event.operators if event.generation >= self._generations[operator]}
        self._lost -= back
        self._generation = max(self._generation, event.generation)
        for operator in sorted(back):
            self._generations[operator] = event.generation
            self._publisher.restarted(operator, now_ms)
        return [*self._publish(now_ms), *self._take_up_postponed(now_ms)]

    def _pin_changed(self, event: PinChanged, now_ms: int) -> list[CoordinatorAction]:
        if event.is_pinned:
            self._pins.add(event.epoch)
        else:
            self._pins.discard(event.epoch)
        return self._release(now_ms)

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
        inherited = [one for one in self._pending.values() if one.is_inherited and one.epoch < epoch.epoch]
        if inherited:
            # An earlier coordinator may complete them yet. Not before it is barred can one say which epoch came before.
            return [action for one in inherited if _expires(one) for action in self._subsume(one, epoch)]
        epoch.move(EpochState.COMPLETING)
        previous = self._complete[-1].epoch if self._complete else NO_EPOCH
        return [
            StoreManifest(
                epoch=epoch.epoch,
                previous_epoch=previous,
                started_ms=epoch.started_ms,
                acks=epoch.merged_acks(),
                is_inherited=epoch.is_inherited,
            )
        ]

    def _subsume(self, earlier: PendingEpoch, by: PendingEpoch) -> list[CoordinatorAction]:
        """Whoever waits for the earlier one gets what they asked for, and more, from the later one."""
        by.requests += earlier.requests
        earlier.requests.clear()
        return self._abort(earlier, f"subsumed by epoch {by.epoch}")

    def _snapshot_failed(self, event: SnapshotFailed) -> list[CoordinatorAction]:
        epoch = self._pending.get(event.epoch)
        if epoch is None or epoch.state is not EpochState.COLLECTING:
            return []
        if event.generation != self._generations.get(event.operator):
            return []
        return self._abort(epoch, f"snapshot of {event.operator} failed: {event.reason}")

    def _manifest_stored(self, event: ManifestStored, now_ms: int) -> list[CoordinatorAction]:
        epoch, found = self._pending.get(event.epoch), event.found
        # An abort under way only gives in to a manifest that was found.
        awaited = (EpochState.COMPLETING, EpochState.ABORTING) if found else (EpochState.COMPLETING,)
        if epoch is None or epoch.state not in awaited:
            return []
        newest = self._complete[-1].epoch if self._complete else NO_EPOCH
        # One that was found may name an older one before it: its coordinator did not know of ours. That does no harm:
        # its records hold all that was staged since, and the permit begins after the one that came before it here.
        if event.epoch < newest or (found and found.previous_epoch > newest):
            raise InvariantViolation(f"epoch {event.epoch} was completed beside epoch {newest}", epoch=event.epoch)
        epoch.move(EpochState.COMPLETED)
        del self._pending[event.epoch]
        self._complete.append(
            CompleteEpoch(
                epoch=event.epoch,
                generation=found.generation if found else self._generation,
                previous_epoch=newest,
                batches=found.batches if found else epoch.cut_batches(),
                completed_ms=event.completed_ms or now_ms,
            )
        )
        self._awaiting_publication.update(dict.fromkeys(epoch.requests, event.epoch))
        actions: list[CoordinatorAction] = [self._announcement(event.epoch, completed=True)]
        # What a later complete epoch covers is of no use any more.
        for earlier in [p for p in self._pending.values() if p.epoch < event.epoch and _expires(p)]:
            actions += self._subsume(earlier, epoch)
        self._awaiting_publication.update(dict.fromkeys(epoch.requests, event.epoch))
        actions += self._succeeded()
        actions += self._store_next_manifest()
        actions += self._publish(now_ms)
        actions += self._answers()
        actions += self._release(now_ms)
        return actions + self._ended(now_ms)

    def _abort(self, epoch: PendingEpoch, reason: str) -> list[CoordinatorAction]:
        epoch.move(EpochState.ABORTING)
        epoch.abort_reason = reason
        return [StoreAborted(epoch=epoch.epoch, reason=reason, is_inherited=epoch.is_inherited)]

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
        return [
            self._announcement(number, completed=False),
            *answers,
            *self._failed(epoch),
            *self._store_next_manifest(),
            *self._ended(now_ms),
        ]

    def _announcement(self, epoch: Epoch, *, completed: bool) -> AnnounceClosed:
        return AnnounceClosed(epoch=epoch, completed=completed, operator=self._topology.alone)

    def _failed(self, epoch: PendingEpoch) -> list[CoordinatorAction]:
        if epoch.is_excused or self._is_complete_from(epoch.epoch):
            return []  # or a later one covers it
        self._failures += 1
        tolerable = self._settings.tolerable_failures
        if not self._is_healthy or tolerable is None or self._failures <= tolerable:
            return []
        self._is_healthy = False
        return [ReportHealth(is_healthy=False, failures=self._failures, reason=epoch.abort_reason)]

    def _is_complete_from(self, epoch: Epoch) -> bool:
        return bool(self._complete) and self._complete[-1].epoch > epoch

    def _succeeded(self) -> list[CoordinatorAction]:
        self._failures = 0
        if self._is_healthy:
            return []
        self._is_healthy = True
        return [ReportHealth(is_healthy=True, failures=0)]

    def _ended(self, now_ms: int) -> list[CoordinatorAction]:
        self._settings.trigger.ended(now_ms)
        return self._take_up_postponed(now_ms)

    def _take_up_postponed(self, now_ms: int) -> list[CoordinatorAction]:
        # The first begins an epoch; those after it join that epoch as long as it has not sent its barriers.
        postponed = self._settings.trigger.take_postponed()
        return [action for request in postponed for action in self._requested(request, now_ms)]

    # ------------------------------------------------------------------ publishing and letting go

    def _publish(self, now_ms: int) -> list[CommitSink]:
        return self._publisher.due(self._complete, now_ms, pins=self._pins)

    def _answers(self) -> list[CoordinatorAction]:
        everywhere = self._publisher.published_everywhere(self._complete)
        done = {request: epoch for request, epoch in self._awaiting_publication.items() if epoch <= everywhere}
        for request in done:
            del self._awaiting_publication[request]
        return [AnswerRequest(request=request, epoch=epoch, completed=True) for request, epoch in done.items()]

    def _release(self, now_ms: int) -> list[CoordinatorAction]:
        """Old epochs may go once every sink has published them and nobody holds on to them."""
        drop = self._settings.retention.expendable(
            self._complete,
            published_everywhere=self._publisher.published_everywhere(self._complete),
            pins=self._pins,
            now_ms=now_ms,
        )
        if not drop:
            return []
        self._complete = [item for item in self._complete if item.epoch not in drop]
        open_from = min(self._pending, default=Epoch(self._numbers.last + 1))
        retained = tuple(item.epoch for item in self._complete)
        return [ReleaseEpochs(drop=drop, retained=retained, open_from=open_from)]


def _in_short(subtasks: list[Subtask]) -> str:
    """At most a few: there may be thousands."""
    shown = ", ".join(str(subtask) for subtask in subtasks[:_SUBTASKS_SHOWN])
    return f"[{shown}]" if len(subtasks) <= _SUBTASKS_SHOWN else f"[{shown}, … {len(subtasks)} in all]"


def _expires(epoch: PendingEpoch) -> bool:
    """Whether it may still be given up. A completing one may not: its manifest may be stored at this very moment."""
    return epoch.state in (EpochState.RECORDING, EpochState.COLLECTING)
