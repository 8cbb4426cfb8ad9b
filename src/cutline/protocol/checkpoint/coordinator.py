"""The coordinator: begins epochs, tallies acknowledgements, completes or aborts, tells sinks to publish.

Durable first: it acts on a decision only after the record of the decision is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms, OperatorAck
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId, Subtask
from cutline.protocol.checkpoint.complete_epochs import CompleteEpochs
from cutline.protocol.checkpoint.health import Health
from cutline.protocol.checkpoint.pending_epoch import AckOutcome, EpochState, PendingEpoch
from cutline.protocol.checkpoint.requests import Requests, refusal
from cutline.protocol.checkpoint.setup import EpochNumbers, Settings, StoredPending, Topology
from cutline.protocol.checkpoint.waiting import Waiting, can_expire
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnnounceClosed,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    PinChanged,
    RegionLost,
    RegionRestored,
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
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher


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
        """``complete``: the live complete epochs, ascending; ``published``: the newest epoch of each sink.

        ``generations``: of operators whose generation is not the coordinator's. ``numbers``: issues epoch numbers.
        """
        self._topology = topology
        self._generation = generation
        self._generations = {name: (generations or {}).get(name, generation) for name in topology.subtasks}
        #: Operators that are being restored; nothing can complete without them.
        self._lost: set[OperatorId] = set()
        self._settings = settings
        self._health = Health(settings.tolerable_failures)
        self._waiting = Waiting(settings)
        self._requests = Requests()
        self._numbers = numbers or EpochNumbers()
        self._pending: dict[Epoch, PendingEpoch] = {}
        self._publisher = Publisher(
            topology.flow,
            {sink: operator for operator, sinks in topology.sinks.items() for sink in sinks},
            published or {},
            retry_ms=settings.sink_retry_ms,
            retry_limit_ms=settings.sink_retry_limit_ms,
            silence_ms=settings.sink_silence_ms,
        )
        self._complete = CompleteEpochs(complete, self._publisher, settings.retention, pins)
        self._accepts_triggers = False
        self.ack_outcomes: dict[AckOutcome, int] = dict.fromkeys(AckOutcome, 0)

    # ------------------------------------------------------------------ what others may look at

    @property
    def generation(self) -> Generation:
        """The generation of its records; grows when a region is restored."""
        return self._generation

    @property
    def last_epoch(self) -> Epoch:
        return self._numbers.last

    @property
    def min_epoch(self) -> Epoch:
        """The oldest retained epoch; NO_EPOCH without one."""
        return self._complete.oldest

    @property
    def sinks(self) -> tuple[SinkId, ...]:
        return tuple(sink for sinks in self._topology.sinks.values() for sink in sinks)

    @property
    def pins(self) -> frozenset[Epoch]:
        return self._complete.pins

    @property
    def is_healthy(self) -> bool:
        return self._health.is_healthy

    @property
    def failures_in_a_row(self) -> int:
        return self._health.failures_in_a_row

    @property
    def pending(self) -> Mapping[Epoch, PendingEpoch]:
        return self._pending

    @property
    def complete(self) -> tuple[CompleteEpoch, ...]:
        return self._complete.epochs

    def published(self, sink: SinkId) -> Epoch:
        return self._publisher.published(sink)

    def sink_retry_ms(self, sink: SinkId) -> int | None:
        """When a sink that has failed is told again; None: it has not failed."""
        return self._publisher.retry_ms(sink)

    def is_settled(self) -> bool:
        """Whether nothing is under way: no pending epoch, no sink behind the newest complete one."""
        return not self._pending and self._publisher.is_idle()

    # ------------------------------------------------------------------ the doors

    def start(self, pending: Iterable[StoredPending], *, now_ms: int) -> list[CoordinatorAction]:
        """Continue the work of an earlier process: repeat sink commits, resume or abort pending epochs."""
        actions: list[CoordinatorAction] = list(self._publish(now_ms))
        newest = self._complete.newest
        for stored in pending:
            # The clock may have been set back since; an epoch must not appear to begin in the future.
            began_ms = min(stored.terms.started_ms, now_ms)
            # A restore has given up epochs that are not resumable, even if they complete; the others are decided here.
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
                # Some operators may have acknowledged already, to the earlier coordinator.
                actions += self._ask(epoch)
        self._accepts_triggers = True
        return actions

    def handle(self, event: CoordinatorEvent, *, now_ms: int) -> list[CoordinatorAction]:
        """Handle one event and return the actions to perform."""
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
                self._complete.pin_changed(event)
                return self._release(now_ms)
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
        """Begin no more epochs; pending ones continue."""
        self._accepts_triggers = False
        return self._take_up_postponed(now_ms)

    def next_deadline_ms(self, *, now_ms: int) -> int | None:
        """When ``TimePassed`` would change something; None if never."""
        deadlines = [*self._publisher.deadlines_ms()]
        for epoch in self._pending.values():
            deadlines += self._waiting.deadlines_ms(epoch)
        due = self.next_checkpoint_ms(now_ms=now_ms)
        deadlines += [] if due is None else [due]
        expiry = self._complete.next_expiry_ms(now_ms)
        deadlines += [] if expiry is None else [expiry]
        return min(deadlines, default=None)

    def next_checkpoint_ms(self, *, now_ms: int) -> int | None:
        """When the next checkpoint is to begin by itself; None: not by time, or not before a pending one has ended."""
        return self._settings.trigger.next_due_ms(now_ms, len(self._pending)) if self._begins_epochs() else None

    # ------------------------------------------------------------------ steps

    def _begins_epochs(self) -> bool:
        return self._accepts_triggers and not self._lost

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
            late = self._waiting.late_operators(epoch, now_ms)
            if late and can_expire(epoch):
                actions += self._abort(epoch, f"timed out after {now_ms - epoch.started_ms} ms waiting for {late}")
            elif self._waiting.asks(epoch) and now_ms >= epoch.ask_at_ms:
                self._waiting.asked(epoch, now_ms)
                actions += self._ask(epoch)
        actions += self._begin_if_due(now_ms)
        actions += self._publish(now_ms)
        actions += self._release(now_ms)
        return actions

    def _begin_if_due(self, now_ms: int) -> list[CoordinatorAction]:
        if not self._begins_epochs() or not self._settings.trigger.is_due(now_ms, len(self._pending)):
            return []
        return self._begin(now_ms, self._settings.alignment_limit_ms, is_binding=False, request=None)

    def _requested(self, event: CheckpointRequested, now_ms: int) -> list[CoordinatorAction]:
        if not self._accepts_triggers:
            return [refusal(event.request, "flow is not running")]
        if self._lost or not self._settings.trigger.has_room(len(self._pending)):
            newest = self._pending[max(self._pending)] if self._pending else None
            # A request may join an epoch only before its barriers are sent: then it is as good as a new epoch.
            if newest and newest.state is EpochState.RECORDING and event.options is None:
                newest.requests.append(event.request)
                return []
            return [*self._requests.postpone(event)]
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
        self._waiting.begin(epoch, now_ms)

    def _inject(self, epoch: PendingEpoch, now_ms: int) -> list[CoordinatorAction]:
        self._collect(epoch, now_ms)
        return [self._injection(operator, epoch) for operator in sorted(self._topology.sources)]

    def _injection(self, operator: OperatorId, epoch: PendingEpoch) -> InjectBarrier:
        return InjectBarrier(operator=operator, epoch=epoch.epoch, terms=epoch.terms)

    def _ask(self, epoch: PendingEpoch) -> list[CoordinatorAction]:
        """Remind every operator that has not acknowledged; a source may not know of the epoch at all."""
        return [action for operator in sorted(epoch.incomplete) for action in self._remind(operator, epoch)]

    def _remind(self, operator: OperatorId, epoch: PendingEpoch) -> list[CoordinatorAction]:
        question = RequestAck(operator=operator, epoch=epoch.epoch)
        return [self._injection(operator, epoch), question] if operator in self._topology.sources else [question]

    def _operator_started(self, event: OperatorStarted, now_ms: int) -> list[CoordinatorAction]:
        """Tell the operator what it has missed."""
        if event.generation != self._generations[event.operator]:
            return []
        actions: list[CoordinatorAction] = [
            AnnounceClosed(epoch=epoch, completed=self._complete.has(epoch), operator=event.operator, is_reminder=True)
            for epoch in event.open_epochs
            if epoch not in self._pending
        ]
        for epoch in self._pending.values():
            if epoch.state is EpochState.COLLECTING and epoch.awaiting[event.operator]:
                actions += self._remind(event.operator, epoch)
        self._publisher.restarted(event.operator, now_ms)
        return [*actions, *self._publish(now_ms)]

    def _region_lost(self, event: RegionLost) -> list[CoordinatorAction]:
        """The operators are restored to an epoch before every pending one: no pending epoch can complete."""
        self._lost |= event.operators
        reason = f"{', '.join(sorted(event.operators))} must be restored: {event.reason}"
        actions: list[CoordinatorAction] = []
        for epoch in [one for one in self._pending.values() if can_expire(one)]:
            epoch.is_excused = True
            actions += self._abort(epoch, reason)
        return actions

    def _region_restored(self, event: RegionRestored, now_ms: int) -> list[CoordinatorAction]:
        # A late event of an earlier restore does not concern operators that were restored again since.
        restored = {operator for operator in event.operators if event.generation >= self._generations[operator]}
        self._lost -= restored
        self._generation = max(self._generation, event.generation)
        for operator in sorted(restored):
            self._generations[operator] = event.generation
            self._publisher.restarted(operator, now_ms)
        return [*self._publish(now_ms), *self._take_up_postponed(now_ms)]

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
            # An earlier coordinator may still complete them. Which epoch precedes this one is known once it cannot.
            return [action for one in inherited if can_expire(one) for action in self._subsume(one, epoch)]
        epoch.move(EpochState.COMPLETING)
        return [
            StoreManifest(
                epoch=epoch.epoch,
                previous_epoch=self._complete.newest,
                started_ms=epoch.started_ms,
                acks=epoch.merged_acks(),
                published=self._publisher.published_by_each(),
                pause_ms=self._settings.retention.pause_ms,
                is_inherited=epoch.is_inherited,
            )
        ]

    def _subsume(self, earlier: PendingEpoch, by: PendingEpoch) -> list[CoordinatorAction]:
        """Requests that wait for the earlier epoch are answered by the later one, which covers it."""
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
        # Only a manifest that was found ends an abort under way.
        awaited = (EpochState.COMPLETING, EpochState.ABORTING) if found else (EpochState.COMPLETING,)
        if epoch is None or epoch.state not in awaited:
            return []
        newest = self._complete.newest
        # A found manifest may name an older predecessor: its coordinator did not know the newest one here. That does no
        # harm: its records hold all output staged since, and the permit begins after the predecessor known here.
        if event.epoch < newest or (found and found.previous_epoch > newest):
            raise InvariantViolation(f"epoch {event.epoch} was completed beside epoch {newest}", epoch=event.epoch)
        epoch.move(EpochState.COMPLETED)
        del self._pending[event.epoch]
        self._complete.add(
            CompleteEpoch(
                epoch=event.epoch,
                generation=found.generation if found else self._generation,
                previous_epoch=newest,
                batches=found.batches if found else epoch.cut_batches(),
                completed_ms=event.completed_ms or now_ms,
                flow_ms=event.flow_ms,
            )
        )
        self._requests.await_publication(epoch.requests, event.epoch)
        actions: list[CoordinatorAction] = [self._announcement(event.epoch, completed=True)]
        # A later complete epoch covers the earlier pending ones: they are no longer needed.
        for earlier in [p for p in self._pending.values() if p.epoch < event.epoch and can_expire(p)]:
            actions += self._subsume(earlier, epoch)
        self._requests.await_publication(epoch.requests, event.epoch)
        actions += self._health.succeeded()
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
        answers = [refusal(request, epoch.abort_reason, number) for request in epoch.requests]
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
        if epoch.is_excused or self._complete.newest > epoch.epoch:
            return []  # excused, or a later epoch covers it
        return [*self._health.failed(epoch.abort_reason)]

    def _ended(self, now_ms: int) -> list[CoordinatorAction]:
        self._settings.trigger.ended(now_ms)
        return self._take_up_postponed(now_ms)

    def _take_up_postponed(self, now_ms: int) -> list[CoordinatorAction]:
        # The first request begins an epoch; the others join it as long as its barriers are not sent.
        return [action for request in self._requests.take_postponed() for action in self._requested(request, now_ms)]

    # ------------------------------------------------------------------ publishing and releasing

    def _publish(self, now_ms: int) -> list[CommitSink]:
        return self._complete.publish(now_ms)

    def _answers(self) -> list[CoordinatorAction]:
        return [*self._requests.published(self._complete.published_everywhere())]

    def _release(self, now_ms: int) -> list[CoordinatorAction]:
        open_from = min(self._pending, default=Epoch(self._numbers.last + 1))
        return [*self._complete.release(now_ms, open_from)]
