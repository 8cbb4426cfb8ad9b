"""The shell around the coordinator: one thread that takes events, asks the core, and performs what it says."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, assert_never

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.coordinator.manifests import (
    abort_details,
    build_manifest,
    found_manifest,
    is_of_history,
    read_past_barrier,
    statistics,
)
from cutline.errors import CheckpointFailedError, FencedError, UnknownEpochError
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.ports import EpochOutcome, Manifest, MetadataStore, PendingRecord, SnapshotStore, Tombstone
from cutline.protocol.checkpoint.coordinator import StoredPending
from cutline.protocol.checkpoint.per_operator import FlowCoordinator
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AckRequested,
    AnnounceClosed,
    AnswerRequest,
    BarrierRequested,
    CheckpointOptions,
    CheckpointRequested,
    CommitSink,
    CoordinatorAction,
    CoordinatorEvent,
    EpochClosed,
    InjectBarrier,
    ManifestRefused,
    ManifestStored,
    OperatorAcked,
    PendingStored,
    PinChanged,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
    RequestAck,
    SinkCommitFailed,
    SinkCommitted,
    StoreAborted,
    StoreManifest,
    StorePending,
    TimePassed,
)
from cutline.runtime.metrics import Metrics
from cutline.tiers.replicator import Done
from cutline.transport.mailbox import Letter, PostBox, ToCoordinator, ToOperator
from cutline.worker.operator import OperatorService

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Brought:
    """A checkpoint is where it must be before it is complete; without a manifest: it never will be."""

    epoch: Epoch
    manifest: Manifest | None
    problem: str


class CoordinatorService:
    """Coordinates one flow inside the driver process."""

    def __init__(
        self,
        *,
        flow: FlowName,
        core: FlowCoordinator,
        metadata: MetadataStore,
        snapshots: SnapshotStore,
        operators: Mapping[OperatorId, OperatorService],
        release: Callable[[ReleaseEpochs], None],
        on_fatal: Callable[[BaseException], None],
        metrics: Metrics,
        retry_ms: int,
        retry_limit: int,
        bring_first: Callable[[Manifest, Done], None] | None = None,
        on_complete: Callable[[Epoch], None] = lambda _: None,
    ) -> None:
        """``retry_ms``, ``retry_limit``: how often a message that is not answered is sent again.

        ``bring_first``: brings a checkpoint to where it must be before it is complete. ``on_complete`` hears of each.
        """
        self._bring_first = bring_first
        self._on_complete = on_complete
        self._flow = flow
        self._core = core
        self._metadata = metadata
        self._snapshots = snapshots
        self._operators = operators
        self._channels = {name: service.channel for name, service in operators.items()}
        self._release = release
        self._on_fatal = on_fatal
        self._metrics = metrics
        self._events: queue.SimpleQueue[CoordinatorEvent | tuple[OperatorId, Letter] | _Brought | None] = (
            queue.SimpleQueue()
        )
        self._retry_ms = retry_ms
        self._retry_limit = retry_limit
        self._post = {name: self._box(name, core.generation) for name in operators}
        self._health = ReportHealth(is_healthy=True, failures=0)
        self._requests: dict[str, Future[Epoch]] = {}
        self._requests_made = 0
        self._is_stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cutline-coordinator", daemon=True)

    # ------------------------------------------------------------------ what others call

    def start(self, pending: Iterable[StoredPending]) -> None:
        with self._lock:
            self._perform_all(self._core.start(pending, now_ms=now_ms()))
        self._thread.start()

    def stop(self) -> None:
        """Begin no more epochs and end the thread; pending epochs are found again by the next start."""
        with self._lock:
            self._is_stopped = True
            self._perform_all(self._core.stop_triggering(now_ms=now_ms()))
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for future in list(self._requests.values()):
            future.cancel()

    def deliver(self, operator: OperatorId, letter: Letter) -> None:
        """An operator's wire ends here; a letter is taken in on the coordinator's own thread, in order."""
        self._events.put((operator, letter))

    def request_checkpoint(self, options: CheckpointOptions | None) -> Future[Epoch]:
        """Ask for a checkpoint; the future gives its epoch once it is complete and published everywhere."""
        future: Future[Epoch] = Future()
        with self._lock:
            if self._is_stopped:
                future.cancel()
                return future
            self._requests_made += 1
            request = f"r{self._requests_made}"
            self._requests[request] = future
        self._events.put(CheckpointRequested(request=request, options=options))
        return future

    def pin(self, epoch: Epoch) -> None:
        """Hold on to a complete epoch; durable on return."""
        with self._lock:
            if epoch not in {item.epoch for item in self._core.complete}:
                raise self._unknown(epoch, "is not a complete checkpoint that is kept")
            self._change_pin(epoch, is_pinned=True)

    def unpin(self, epoch: Epoch) -> None:
        """Let go of a pinned epoch; durable on return."""
        with self._lock:
            if epoch not in self._core.pins:
                raise self._unknown(epoch, "is not pinned")
            self._change_pin(epoch, is_pinned=False)

    def _change_pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        self._metadata.store_pin(epoch, is_pinned=is_pinned)
        self._perform_all(self._core.handle(PinChanged(epoch=epoch, is_pinned=is_pinned), now_ms=now_ms()))

    def _unknown(self, epoch: Epoch, why: str) -> UnknownEpochError:
        kept = ", ".join(str(item.epoch) for item in self._core.complete) or "none"
        return UnknownEpochError(f"epoch {epoch} {why}", next_step=f"kept are: {kept}", flow=self._flow)

    # ------------------------------------------------------------------ a region goes back

    def lose_region(self, region: frozenset[OperatorId], reason: str) -> None:
        """Operators have failed for good: what is pending cannot complete, and nothing begins until they are back."""
        with self._lock:
            self._perform_all(self._core.handle(RegionLost(operators=region, reason=reason), now_ms=now_ms()))

    def newest_complete(self, operator: OperatorId) -> Epoch | None:
        """The operator's newest complete epoch once it has none pending; NO_EPOCH without one, None if it has."""
        with self._lock:
            if any(operator in pending.awaiting for pending in self._core.pending.values()):
                return None
            return max((item.epoch for item in self._core.complete if operator in item.batches), default=NO_EPOCH)

    def published_everywhere(self, sinks: Iterable[SinkId]) -> Epoch:
        """The newest epoch that each of these sinks has published; without any, the newest there is."""
        with self._lock:
            return min((self._core.published(sink) for sink in sinks), default=self._core.last_epoch)

    def load_manifest(self, epoch: Epoch) -> Manifest:
        return self._snapshots.load_manifest(epoch)

    def complete_epochs(self, operator: OperatorId) -> dict[Epoch, BatchId]:
        """The operator's complete epochs of the present history, ascending, and where it had cut for them."""
        with self._lock:
            return {item.epoch: item.batches[operator] for item in self._core.complete if operator in item.batches}

    def generation(self) -> Generation:
        with self._lock:
            return self._core.generation

    def last_epoch(self) -> Epoch:
        with self._lock:
            return self._core.last_epoch

    def region_restored(self, region: frozenset[OperatorId], generation: Generation) -> None:
        """The new services of a region are in place; what was said to the old ones is void."""
        with self._lock:
            for name in region:
                self._channels[name] = self._operators[name].channel
                self._post[name] = self._box(name, generation)
            event = RegionRestored(operators=region, generation=generation)
            self._perform_all(self._core.handle(event, now_ms=now_ms()))

    def _box(self, name: OperatorId, session: Generation) -> PostBox[ToOperator, ToCoordinator]:
        deliver = self._operators[name].deliver
        return PostBox(session, deliver, retry_ms=self._retry_ms, retry_limit=self._retry_limit)

    def is_settled(self) -> bool:
        with self._lock:
            return self._core.is_settled()

    def view(self) -> dict[str, Any]:
        """Where the epochs stand, for people."""
        with self._lock:
            return {
                "last_epoch": self._core.last_epoch,
                "min_epoch": self._core.min_epoch,
                "pins": sorted(self._core.pins),
                "complete": [item.epoch for item in self._core.complete],
                "pending": {
                    epoch: {
                        "state": item.state.value,
                        "since_ms": now_ms() - item.started_ms,
                        "missing": {str(op): list(tasks) for op, tasks in item.missing().items()},
                    }
                    for epoch, item in self._core.pending.items()
                },
            }

    def health(self) -> dict[str, Any]:
        """Whether checkpoints fail more often in a row than is tolerated."""
        with self._lock:
            return {
                "healthy": self._core.is_healthy,
                "failures": self._core.failures_in_a_row,
                "reason": self._health.reason,
            }

    def messages(self) -> dict[str, dict[str, int]]:
        """What went wrong on the way between coordinator and operators, and what became of acknowledgements."""
        counts: Counter[str] = Counter()
        for box in self._post.values():
            counts += box.counts()
        for service in self._operators.values():
            counts += service.post.counts()
        with self._lock:
            acknowledgements = {outcome.value: count for outcome, count in self._core.ack_outcomes.items()}
        return {"links": dict(counts), "acknowledgements": acknowledgements}

    def published(self, sink: SinkId) -> Epoch:
        with self._lock:
            return self._core.published(sink)

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._patience_seconds())
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                with self._lock:
                    if isinstance(event, tuple):
                        operator, letter = event
                        for message in self._post[operator].receive(letter):
                            self._take(message)
                    elif isinstance(event, _Brought):
                        self._take(self._brought(event))
                    else:
                        self._take(event)
                for box in self._post.values():
                    box.send_again()
            except BaseException as error:  # the outermost loop: a coordinator that cannot record must not go on
                log.error("coordinator_failed", flow=self._flow, exc_info=True)
                self._on_fatal(error)
                return

    def _patience_seconds(self) -> float | None:
        """How long the thread may sleep when nothing happens."""
        now = now_ms()
        with self._lock:
            deadlines = [self._core.next_deadline_ms(now_ms=now)]
        deadlines += [box.next_deadline_ms() for box in self._post.values()]
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if first is None else max(first - now, 0) / 1000

    def _take(self, event: CoordinatorEvent) -> None:
        match event:
            case SinkCommitted():
                self._metadata.store_published(event.sink, event.epoch)
                if event.has_rows:
                    self._metadata.store_seen(event.sink, event.epoch)
                self._metrics.sink_published(event.sink, event.epoch)
            case SinkCommitFailed():
                self._metrics.sink_failed(event.sink)
            case OperatorAcked():
                crashpoint("after-ack", event.ack.operator)
            case _:
                pass
        self._perform_all(self._core.handle(event, now_ms=now_ms()))

    def _perform_all(self, actions: Iterable[CoordinatorAction]) -> None:
        """Perform actions in order; what performing one of them reports is taken in before the next event."""
        todo = deque(actions)
        while todo:
            event = self._perform(todo.popleft())
            if event is not None:
                todo.extend(self._core.handle(event, now_ms=now_ms()))

    def _perform(self, action: CoordinatorAction) -> CoordinatorEvent | None:
        match action:
            case StorePending():
                return self._store_pending(action)
            case InjectBarrier():
                self._post[action.operator].send(BarrierRequested(epoch=action.epoch, terms=action.terms))
            case RequestAck():
                self._post[action.operator].send(AckRequested(epoch=action.epoch))
            case StoreManifest():
                return self._store_manifest(action)
            case StoreAborted():
                return self._store_aborted(action)
            case AnnounceClosed():
                self._announce(action)
            case CommitSink():
                self._post[action.permit.operator].send(action.permit)
            case ReleaseEpochs():
                crashpoint("after-sink-commits")
                self._release(action)
            case ReportHealth():
                self._report(action)
            case AnswerRequest():
                self._answer(action)
            case _:
                assert_never(action)
        return None

    def _announce(self, action: AnnounceClosed) -> None:
        names = self._post if action.operator is None else [action.operator]
        for name in names:
            self._post[name].send(EpochClosed(epoch=action.epoch, completed=action.completed))
        if not action.completed and not action.is_reminder:
            self._snapshots.discard(action.epoch)

    def _report(self, action: ReportHealth) -> None:
        self._health = action
        self._metrics.health_changed(is_healthy=action.is_healthy)
        if action.is_healthy:
            log.info("checkpoints_healthy_again", flow=self._flow)
        else:
            log.error("checkpoints_unhealthy", flow=self._flow, failures=action.failures, reason=action.reason)

    # ------------------------------------------------------------------ durable steps

    def _store_pending(self, action: StorePending) -> CoordinatorEvent:
        self._metadata.store_pending(
            PendingRecord(epoch=action.epoch, generation=self._core.generation, terms=action.terms)
        )
        crashpoint("after-pending")
        return PendingStored(epoch=action.epoch)

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent | None:
        generation = self._core.generation
        before = next((item for item in self._core.complete if item.epoch == action.previous_epoch), None)
        manifest = build_manifest(self._flow, generation, action, self._channels, before=before, completed_ms=now_ms())
        problem = read_past_barrier(manifest)
        if problem:
            return ManifestRefused(epoch=action.epoch, reason=problem)
        crashpoint("before-manifest")
        if self._bring_first is not None:
            # Nothing else of this flow completes meanwhile, and nothing that this epoch needs is collected.
            self._bring_first(manifest, lambda there, problem: self._events.put(_Brought(action.epoch, there, problem)))
            return None
        return self._create_manifest(manifest)

    def _brought(self, brought: _Brought) -> CoordinatorEvent:
        if brought.manifest is None:
            return ManifestRefused(epoch=brought.epoch, reason=brought.problem)
        return self._create_manifest(brought.manifest)

    def _create_manifest(self, manifest: Manifest) -> CoordinatorEvent:
        generation = self._core.generation
        there = self._snapshots.store_manifest(manifest)
        if isinstance(there, Tombstone) or there.generation > generation:
            raise FencedError(
                f"generation {there.generation} has decided about this epoch",
                next_step="stop this process: another one runs the flow",
                epoch=manifest.epoch,
                flow=self._flow,
            )
        if not self._is_ours(there):
            reason = f"generation {there.generation} has completed it in a history of its own"
            return ManifestRefused(epoch=manifest.epoch, reason=reason)
        crashpoint("after-manifest")
        return self._completed(there)

    def _is_ours(self, manifest: Manifest) -> bool:
        return is_of_history(manifest, {name: channel.lineage for name, channel in self._channels.items()})

    def _completed(self, manifest: Manifest) -> ManifestStored:
        """The checkpoint exists, be it by an earlier coordinator's hand."""
        duration_ms = manifest.completed_ms - manifest.started_ms
        self._metadata.store_outcome(
            EpochOutcome(
                epoch=manifest.epoch,
                generation=manifest.generation,
                started_ms=manifest.started_ms,
                ended_ms=manifest.completed_ms,
                outcome="completed",
                reason="",
                details=statistics(manifest),
            )
        )
        self._metrics.checkpoint_completed(manifest.epoch, duration_ms)
        log.info("checkpoint_completed", flow=self._flow, epoch=manifest.epoch, ms=duration_ms)
        self._on_complete(manifest.epoch)
        by_us = manifest.generation == self._core.generation
        return ManifestStored(
            epoch=manifest.epoch,
            completed_ms=manifest.completed_ms,
            found=None if by_us else found_manifest(manifest),
        )

    def _store_aborted(self, action: StoreAborted) -> CoordinatorEvent:
        if action.is_inherited:
            tombstone = Tombstone(epoch=action.epoch, generation=self._core.generation, reason=action.reason)
            there = self._snapshots.store_tombstone(tombstone)
            # A manifest of a history that the flow has left is as good as none.
            if isinstance(there, Manifest) and self._is_ours(there):
                return self._completed(there)
        pending, ended_ms = self._core.pending[action.epoch], now_ms()
        self._metadata.store_outcome(
            EpochOutcome(
                epoch=action.epoch,
                generation=self._core.generation,
                started_ms=pending.started_ms,
                ended_ms=ended_ms,
                outcome="aborted",
                reason=action.reason,
                details=abort_details(pending, ended_ms=ended_ms),
            )
        )
        self._metrics.checkpoint_aborted()
        log.warning("checkpoint_aborted", flow=self._flow, epoch=action.epoch, reason=action.reason)
        return AbortStored(epoch=action.epoch)

    def _answer(self, action: AnswerRequest) -> None:
        future = self._requests.pop(action.request, None)
        if future is None:
            return
        if action.completed:
            future.set_result(action.epoch)
        else:
            future.set_exception(
                CheckpointFailedError(
                    f"the checkpoint was not taken: {action.reason}",
                    next_step="the flow goes on; ask again, or see the status for what holds it up",
                    flow=self._flow,
                    epoch=action.epoch or None,
                )
            )
