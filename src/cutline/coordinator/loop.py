"""The shell around the coordinator: one thread passes events to the core and has its actions performed."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.outages import outage_of
from cutline.coordinator.actions import Actions, Replies, Uploaded
from cutline.coordinator.links import Links
from cutline.coordinator.ports import CoordinatorPorts
from cutline.coordinator.requests import Requests
from cutline.errors import FlowFailedError, UnknownEpochError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.status import (
    CheckpointStatus,
    CoordinatorStatus,
    HealthStatus,
    MessageCounts,
    PendingStatus,
    SinkProblem,
    SinkStatus,
)
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.protocol.checkpoint.releases import EntryReleases
from cutline.protocol.checkpoint.setup import StoredPending
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.history.retention import EpochNeeds
from cutline.protocol.link import Envelope
from cutline.protocol.messages.coordinator import (
    CheckpointOptions,
    CheckpointRequested,
    CoordinatorAction,
    CoordinatorEvent,
    PinChanged,
    RegionLost,
    RegionRestored,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import (
    CaughtUp,
    EntriesReleased,
    InputForked,
    OperatorAcked,
    OperatorFailed,
    OperatorStarted,
    ReleaseEntries,
    SinkCommitFailed,
    SinkCommitted,
    ToCoordinator,
)
from cutline.transport.in_process import Address, Content
from cutline.transport.mailbox import AnyEnvelope

log = get_logger(__name__)

#: Its name among the parts of a flow that wait for a resource.
_PART = "coordinator"


@dataclass(frozen=True, slots=True)
class _Collected:
    """Released checkpoints are collected; ``needs``: the log entries that the remaining ones need."""

    needs: tuple[EpochNeeds, ...]


_Event = CoordinatorEvent | ToCoordinator | tuple[Address, AnyEnvelope] | Uploaded | _Collected


class CoordinatorService:
    """Coordinates one flow."""

    def __init__(
        self,
        flow: FlowName,
        core: FlowCoordinator,
        ports: CoordinatorPorts,
        *,
        lineages: Mapping[OperatorId, Lineage],
        touched_by: Mapping[OperatorId, Collection[OperatorId]],
    ) -> None:
        """``lineages``: of every operator's log, after recovery. ``touched_by``: the writer and readers of each log."""
        self._flow = flow
        self._core = core
        self._ports = ports
        self._lineages = dict(lineages)
        self._touched_by = touched_by
        self._releases = EntryReleases(touched_by)
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        #: Sinks that have failed since they last published.
        self._sink_problems: dict[SinkId, SinkProblem] = {}
        self._requests = Requests(flow)
        self._links = Links(self._lineages, core.generation, wire=ports.wire, settings=ports.link)
        self._actions = Actions(
            flow,
            core,
            ports,
            self._links,
            lineages=self._lineages,
            replies=Replies(
                uploaded=self._events.put,
                collected=lambda needs: self._events.put(_Collected(tuple(needs))),
                requests=self._requests,
            ),
        )
        #: What the thread has yet to do: the core's actions, then events. It is kept while a resource is away.
        self._todo: deque[CoordinatorAction] = deque()
        self._taken: deque[_Event] = deque()
        #: When to try again what could not be done; None: nothing waits for a resource.
        self._retry_ms: int | None = None
        #: A record could not be stored for good: nothing that follows from it may happen.
        self._is_broken = False
        self._is_stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cutline-coordinator", daemon=True)

    # ------------------------------------------------------------------ what others call

    def start(self, pending: Iterable[StoredPending]) -> None:
        with self._lock:
            self._perform_all(self._core.start(pending, now_ms=now_ms()))
        self._thread.start()

    def begin_stop(self) -> None:
        """Begin no more epochs. What was released before is known to the janitor on return."""
        with self._lock:
            self._is_stopped = True
            self._perform_all(self._core.stop_triggering(now_ms=now_ms()))

    def stop(self) -> None:
        """End the thread after the events that wait; the next start finds the pending epochs."""
        self.begin_stop()
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._requests.cancel()

    def deliver(self, sender: Address, content: Content) -> None:
        """The receiving end of the wire; the coordinator's thread handles envelopes in order."""
        if isinstance(content, Envelope):
            self._events.put((sender, content))

    def request_checkpoint(self, options: CheckpointOptions | None) -> Future[Epoch]:
        """Ask for a checkpoint; the future gives its epoch once it is complete and published everywhere."""
        with self._lock:
            request, future = self._requests.open()
            if self._is_stopped:
                future.cancel()
                return future
        self._events.put(CheckpointRequested(request=request, options=options))
        return future

    def pin(self, epoch: Epoch) -> None:
        """Keep a complete epoch; durable on return."""
        with self._lock:
            if epoch not in {item.epoch for item in self._core.complete}:
                raise self._unknown(epoch, "is not a complete checkpoint that is kept")
            self._change_pin(epoch, is_pinned=True)

    def unpin(self, epoch: Epoch) -> None:
        """Remove the pin of an epoch; durable on return."""
        with self._lock:
            if epoch not in self._core.pins:
                raise self._unknown(epoch, "is not pinned")
            self._change_pin(epoch, is_pinned=False)

    def hold(self, epoch: Epoch) -> None:
        """Keep a complete epoch until ``end_hold``, or until this process ends: it is about to be restored."""
        with self._lock:
            if epoch not in {item.epoch for item in self._core.complete}:
                raise self._unknown(epoch, "is not a complete checkpoint that is kept")
            self._handle_pin(epoch, is_pinned=True)

    def end_hold(self, epoch: Epoch) -> None:
        with self._lock:
            if epoch not in self._ports.metadata.pins():
                self._handle_pin(epoch, is_pinned=False)

    def _change_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        self._ports.metadata.store_pin(epoch, is_pinned=is_pinned)
        self._handle_pin(epoch, is_pinned=is_pinned)

    def _handle_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        self._perform_all(self._core.handle(PinChanged(epoch=epoch, is_pinned=is_pinned), now_ms=now_ms()))

    def _unknown(self, epoch: Epoch, why: str) -> UnknownEpochError:
        kept = ", ".join(str(item.epoch) for item in self._core.complete) or "none"
        return UnknownEpochError(f"epoch {epoch} {why}", next_step=f"available checkpoints: {kept}", flow=self._flow)

    # ------------------------------------------------------------------ a region is restored

    def lose_region(self, region: frozenset[OperatorId], reason: str) -> None:
        """Operators have failed for good: pending epochs cannot complete, and none begins until they are restored.

        From now on no entry that they may need is released.
        """
        with self._lock:
            self._releases.lost(region)
            self._perform_all(self._core.handle(RegionLost(operators=region, reason=reason), now_ms=now_ms()))

    def newest_complete(self, operator: OperatorId) -> Epoch | None:
        """The operator's newest complete epoch; NO_EPOCH without one, None while it has a pending epoch."""
        with self._lock:
            if any(operator in pending.awaiting for pending in self._core.pending.values()):
                return None
            return max((item.epoch for item in self._core.complete if operator in item.batches), default=NO_EPOCH)

    def is_deleting_released(self) -> bool:
        """Whether entries that were released before a region was lost are still being deleted.

        A restore must not begin while entries that it will read may still be deleted.
        """
        with self._lock:
            return not self._releases.is_settled()

    def is_waiting(self) -> bool:
        """Whether it waits for a resource that is away, such as room on the disk."""
        with self._lock:
            return self._retry_ms is not None

    def published_everywhere(self, sinks: Iterable[SinkId]) -> Epoch:
        """The newest epoch that all these sinks have published; without sinks, the newest complete epoch."""
        with self._lock:
            return min((self._core.published(sink) for sink in sinks), default=self._core.last_epoch)

    def load_manifest(self, epoch: Epoch) -> Manifest:
        return self._ports.checkpoints.load_manifest(epoch)

    def complete_epochs(self, operator: OperatorId) -> dict[Epoch, BatchId]:
        """The operator's complete epochs of the present history, ascending, each with the operator's cut."""
        with self._lock:
            return {item.epoch: item.batches[operator] for item in self._core.complete if operator in item.batches}

    def retained(self) -> frozenset[Epoch]:
        """The complete epochs of the present history."""
        with self._lock:
            return frozenset(item.epoch for item in self._core.complete)

    def generation(self) -> Generation:
        with self._lock:
            return self._core.generation

    def last_epoch(self) -> Epoch:
        with self._lock:
            return self._core.last_epoch

    def region_restored(self, region: frozenset[OperatorId], generation: Generation) -> None:
        """The new services of a region are in place; messages to the old ones are void."""
        with self._lock:
            self._links.begin_anew(region, generation)
            self._releases.restored(region, generation)
            event = RegionRestored(operators=region, generation=generation)
            self._perform_all(self._core.handle(event, now_ms=now_ms()))

    def is_settled(self) -> bool:
        with self._lock:
            return self._core.is_settled()

    def snapshot(self) -> CoordinatorStatus:
        """The coordinator's current state."""
        with self._lock:
            core, now = self._core, now_ms()
            pending = {
                epoch: PendingStatus(
                    state=item.state.value,
                    since_ms=now - item.started_ms,
                    missing={operator: list(tasks) for operator, tasks in item.missing().items()},
                )
                for epoch, item in core.pending.items()
            }
            return CoordinatorStatus(
                generation=core.generation,
                health=HealthStatus(
                    healthy=core.is_healthy, failures=core.failures_in_a_row, reason=self._actions.health.reason
                ),
                checkpoints=CheckpointStatus(
                    last_epoch=core.last_epoch,
                    min_epoch=core.min_epoch,
                    pins=sorted(core.pins),
                    complete=[item.epoch for item in core.complete],
                    pending=pending,
                    last_completed_ms=core.complete[-1].completed_ms if core.complete else None,
                    next_ms=core.next_checkpoint_ms(now_ms=now),
                ),
                messages=MessageCounts(
                    links=dict(self._links.counts()),
                    acknowledgements={outcome.value: count for outcome, count in core.ack_outcomes.items()},
                ),
                sink_problems={str(sink): problem for sink, problem in self._sink_problems.items()},
            )

    def published(self, sink: SinkId) -> Epoch:
        with self._lock:
            return self._core.published(sink)

    def sink_status(self, sink: SinkId, operator: OperatorId) -> SinkStatus:
        with self._lock:
            published, problem = self._core.published(sink), self._sink_problems.get(sink)
            completed = {item.epoch: item.completed_ms for item in self._core.complete if operator in item.batches}
        waiting = [at_ms for epoch, at_ms in completed.items() if epoch > published]
        return SinkStatus(
            operator=operator,
            published_epoch=published,
            published_epoch_ms=completed.get(published),
            lag_ms=max(now_ms() - min(waiting), 0) if waiting else 0,
            failures=problem.failures if problem is not None else 0,
            problem=problem.problem if problem is not None else "",
        )

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._seconds_to_sleep())
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                with self._lock:
                    if self._retry_ms is None or not isinstance(event, TimePassed):
                        self._taken.append(event)
                    self._go_on()
                self._links.send_again()
            except BaseException as error:  # the outermost loop: a coordinator that cannot store its records must stop
                self._is_broken = True
                log.error("coordinator_failed", flow=self._flow, exc_info=True)
                self._ports.on_fatal(error)
                return

    def _seconds_to_sleep(self) -> float | None:
        """How long the thread may sleep without an event."""
        now = now_ms()
        with self._lock:
            deadlines = [self._core.next_deadline_ms(now_ms=now) if self._retry_ms is None else self._retry_ms]
        deadlines.append(self._links.next_deadline_ms())
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if first is None else max(first - now, 0) / 1000

    def _go_on(self) -> None:
        """Do what is to be done, in order. While a resource is away, the rest waits: nothing overtakes a record."""
        if self._is_broken or (self._retry_ms is not None and now_ms() < self._retry_ms):
            return
        try:
            self._perform_todo()
            while self._taken:
                event = self._taken[0]
                if isinstance(event, tuple):
                    # The link hands out each message once: from here on they are events of their own.
                    self._taken.popleft()
                    self._taken.extendleft(reversed([*self._links.receive(*event)]))
                    continue
                # Taken again from the beginning if its records cannot be stored: the core sees it once.
                self._take_any(event)
                self._taken.popleft()
                self._perform_todo()
        except Exception as error:
            outage = outage_of(error)
            if outage is None:
                raise
            self._retry_ms = now_ms() + round(self._ports.outages.failed(_PART, outage) * 1000)
            return
        if self._retry_ms is not None:
            self._retry_ms = None
            self._ports.outages.over(_PART)

    def _take_any(self, event: CoordinatorEvent | ToCoordinator | Uploaded | _Collected) -> None:
        match event:
            case Uploaded():
                self._take(self._actions.uploaded(event))
            case _Collected():
                self._releases.collected(event.needs)
                self._release_entries()
            case _:
                self._take_message(event)

    def _take_message(self, message: CoordinatorEvent | ToCoordinator) -> None:
        match message:
            case EntriesReleased():
                self._releases.released(message)
            case CaughtUp():
                self._releases.caught_up(message)
                self._release_entries()
            case OperatorFailed():
                self._ports.on_fatal(
                    FlowFailedError(
                        f"an operator has failed for good: {message.reason}",
                        next_step="fix the cause, then restart the flow",
                        flow=self._flow,
                        operator=message.operator,
                    )
                )
            case OperatorStarted():
                self._releases.started(message)
                self._note_lineage(message)
                self._take(message)
                self._release_entries()
            case _:
                self._take(message)

    def _note_lineage(self, message: OperatorStarted) -> None:
        """Consumers that were not restored follow the log through its new lineage."""
        if message.generation <= self._lineages[message.operator].generation:
            return
        self._lineages[message.operator] = lineage_of(list(message.lineage))
        for consumer in self._touched_by[message.operator]:
            if consumer != message.operator:
                self._links.send(consumer, InputForked(channel=message.operator, lineage=message.lineage))

    def _release_entries(self) -> None:
        for name, below in self._releases.decide().items():
            self._links.send(name, ReleaseEntries(below=below))

    def _take(self, event: CoordinatorEvent) -> None:
        match event:
            case SinkCommitted():
                self._ports.metadata.store_published(event.sink, event.epoch)
                if event.has_rows:
                    self._ports.metadata.store_seen(event.sink, event.epoch)
                self._ports.metrics.sink_published(event.sink, event.epoch)
                self._sink_problems.pop(event.sink, None)
            case SinkCommitFailed():
                self._ports.metrics.sink_failed(event.sink)
                before = self._sink_problems.get(event.sink, SinkProblem(failures=0, problem=""))
                self._sink_problems[event.sink] = SinkProblem(failures=before.failures + 1, problem=event.reason)
            case OperatorAcked():
                crashpoint("after-ack", event.ack.operator)
            case _:
                pass
        self._todo.extend(self._core.handle(event, now_ms=now_ms()))
        if isinstance(event, SinkCommitFailed) and (again_ms := self._core.sink_retry_ms(event.sink)) is not None:
            self._ports.outages.postponed(f"sink {event.sink}", again_ms)

    def _perform_all(self, actions: Iterable[CoordinatorAction]) -> None:
        """Perform actions now, or when the resource that is away is back."""
        self._todo.extend(actions)
        self._go_on()

    def _perform_todo(self) -> None:
        """Perform actions in order; the core handles the event that an action returns before the next queued event."""
        while self._todo:
            event = self._actions.perform(self._todo[0])
            self._todo.popleft()
            if event is not None:
                self._todo.extend(self._core.handle(event, now_ms=now_ms()))
