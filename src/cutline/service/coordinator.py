"""The shell around the coordinator: one thread that takes events, asks the core, and performs what it says."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import assert_never

from cutline.crashpoints import crashpoint
from cutline.errors import CheckpointFailedError, FencedError
from cutline.ids import START, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.logs import get_logger
from cutline.ports import (
    ChannelCut,
    EpochOutcome,
    InFlight,
    Manifest,
    MetadataStore,
    OperatorCut,
    PendingRecord,
    SnapshotStore,
)
from cutline.protocol.coordinator import Coordinator, StoredPending
from cutline.protocol.messages import (
    AbortStored,
    AnnounceClosed,
    AnswerRequest,
    BarrierRequested,
    CheckpointOptions,
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
    StoreAborted,
    StoreManifest,
    StorePending,
    TimePassed,
)
from cutline.service.clock import now_ms
from cutline.service.metrics import Metrics
from cutline.service.operator import OperatorService

log = get_logger(__name__)


class CoordinatorService:
    """Coordinates one flow inside the driver process."""

    def __init__(
        self,
        *,
        flow: FlowName,
        generation: Generation,
        core: Coordinator,
        metadata: MetadataStore,
        snapshots: SnapshotStore,
        operators: Mapping[OperatorId, OperatorService],
        release: Callable[[Epoch], None],
        on_fatal: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._flow = flow
        self._generation = generation
        self._core = core
        self._metadata = metadata
        self._snapshots = snapshots
        self._operators = operators
        self._release = release
        self._on_fatal = on_fatal
        self._metrics = metrics
        self._events: queue.SimpleQueue[CoordinatorEvent | None] = queue.SimpleQueue()
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

    def notify(self, event: CoordinatorEvent) -> None:
        self._events.put(event)

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
        self.notify(CheckpointRequested(request=request, options=options))
        return future

    def is_settled(self) -> bool:
        with self._lock:
            return self._core.is_settled()

    def view(self) -> dict[str, object]:
        """Where the epochs stand, for people."""
        with self._lock:
            complete = self._core.complete
            return {
                "last_epoch": self._core.last_epoch,
                "complete": [item.epoch for item in complete],
                "pending": {
                    epoch: {
                        "state": item.state.value,
                        "since_ms": now_ms() - item.started_ms,
                        "missing": {str(op): list(tasks) for op, tasks in item.missing().items()},
                    }
                    for epoch, item in self._core.pending.items()
                },
            }

    def published(self, sink: SinkId) -> Epoch:
        with self._lock:
            return self._core.published(sink)

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        while True:
            with self._lock:
                deadline = self._core.next_deadline_ms()
            timeout = None if deadline is None else max(deadline - now_ms(), 0) / 1000
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                with self._lock:
                    self._take(event)
            except BaseException as error:  # the outermost loop: a coordinator that cannot record must not go on
                log.error("coordinator_failed", flow=self._flow, exc_info=True)
                self._on_fatal(error)
                return

    def _take(self, event: CoordinatorEvent) -> None:
        match event:
            case SinkCommitted():
                self._metadata.store_published(event.sink, event.epoch)
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
                event = BarrierRequested(epoch=action.epoch, alignment_limit_ms=action.alignment_limit_ms)
                self._operators[action.operator].post(event)
            case StoreManifest():
                return self._store_manifest(action)
            case StoreAborted():
                return self._store_aborted(action)
            case AnnounceClosed():
                for operator in self._operators.values():
                    operator.epoch_closed(action.epoch, completed=action.completed)
                if not action.completed:
                    self._snapshots.discard(action.epoch)
            case CommitSink():
                self._operators[action.permit.operator].snapshotter.publish(action.permit)
            case ReleaseBelow():
                crashpoint("after-sink-commits")
                self._release(action.min_epoch)
            case AnswerRequest():
                self._answer(action)
            case _:
                assert_never(action)
        return None

    # ------------------------------------------------------------------ durable steps

    def _store_pending(self, action: StorePending) -> CoordinatorEvent:
        self._metadata.store_pending(
            PendingRecord(
                epoch=action.epoch,
                generation=self._generation,
                started_ms=action.started_ms,
                alignment_limit_ms=action.alignment_limit_ms,
            )
        )
        crashpoint("after-pending")
        return PendingStored(epoch=action.epoch)

    def _store_manifest(self, action: StoreManifest) -> CoordinatorEvent:
        manifest = self._manifest(action)
        for name, cut in manifest.channels.items():
            for consumer, flight in cut.in_flight.items():
                if flight.first > cut.barrier:  # never seen; a cut like this must not become a checkpoint
                    reason = f"{consumer} had read {name} up to {flight.first}, past the barrier at {cut.barrier}"
                    return ManifestRefused(epoch=action.epoch, reason=reason)
        crashpoint("before-manifest")
        if not self._snapshots.store_manifest(manifest):
            holder = self._snapshots.load_manifest(action.epoch)
            if holder.generation != self._generation:
                raise FencedError("another incarnation has completed this epoch", epoch=action.epoch, flow=self._flow)
        crashpoint("after-manifest")
        duration_ms = manifest.completed_ms - manifest.started_ms
        self._metadata.store_outcome(
            EpochOutcome(
                epoch=action.epoch,
                generation=self._generation,
                started_ms=manifest.started_ms,
                ended_ms=manifest.completed_ms,
                outcome="completed",
                reason="",
                details=_statistics(manifest),
            )
        )
        self._metrics.checkpoint_completed(action.epoch, duration_ms)
        log.info("checkpoint_completed", flow=self._flow, epoch=action.epoch, ms=duration_ms)
        return ManifestStored(epoch=action.epoch)

    def _store_aborted(self, action: StoreAborted) -> CoordinatorEvent:
        self._metadata.store_outcome(
            EpochOutcome(
                epoch=action.epoch,
                generation=self._generation,
                started_ms=self._core.pending[action.epoch].started_ms,
                ended_ms=now_ms(),
                outcome="aborted",
                reason=action.reason,
                details={},
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

    # ------------------------------------------------------------------ manifest

    def _manifest(self, action: StoreManifest) -> Manifest:
        return Manifest(
            flow=self._flow,
            epoch=action.epoch,
            generation=self._generation,
            previous_epoch=action.previous_epoch,
            started_ms=action.started_ms,
            completed_ms=now_ms(),
            operators={name: _operator_cut(ack) for name, ack in action.acks.items()},
            channels={name: self._channel_cut(name, action.acks) for name in action.acks},
        )

    def _channel_cut(self, name: OperatorId, acks: Mapping[OperatorId, OperatorAck]) -> ChannelCut:
        """The channel's state is what lies between each consumer's position and the barrier."""
        channel = self._operators[name].channel
        barrier = acks[name].cut.barrier
        in_flight = {}
        for consumer, ack in acks.items():
            if name in ack.cut.positions:
                first = ack.cut.positions.get(name, START)
                entries = [entry for entry in channel.data_entries(first, barrier) if entry.rows]
                in_flight[consumer] = InFlight(
                    first=first,
                    end=barrier,
                    entries=len(entries),
                    rows=sum(entry.rows for entry in entries),
                    size_bytes=sum(entry.size_bytes for entry in entries),
                )
        return ChannelCut(
            barrier=barrier,
            lineage=[(span.generation, span.start) for span in channel.lineage.spans],
            in_flight=in_flight,
        )


def _operator_cut(ack: OperatorAck) -> OperatorCut:
    return OperatorCut(
        batch=ack.cut.batch,
        barrier=ack.cut.barrier,
        positions=dict(ack.cut.positions),
        aligned=ack.cut.aligned,
        watermark_ms=ack.watermark_ms,
        record_sha256=ack.record_sha256,
        subtasks=len(ack.subtasks),
        files=sum(subtask.files for subtask in ack.subtasks),
        size_bytes=sum(subtask.size_bytes for subtask in ack.subtasks),
        new_bytes=sum(subtask.new_bytes for subtask in ack.subtasks),
        alignment_ms=ack.timings.alignment_ms,
        sync_ms=ack.timings.sync_ms,
        async_ms=ack.timings.async_ms,
    )


def _statistics(manifest: Manifest) -> dict[str, object]:
    in_flight = [flight for cut in manifest.channels.values() for flight in cut.in_flight.values()]
    return {
        "duration_ms": manifest.completed_ms - manifest.started_ms,
        "size_bytes": sum(cut.size_bytes for cut in manifest.operators.values()),
        "new_bytes": sum(cut.new_bytes for cut in manifest.operators.values()),
        "in_flight_entries": sum(flight.entries for flight in in_flight),
        "in_flight_rows": sum(flight.rows for flight in in_flight),
        "unaligned_operators": sorted(name for name, cut in manifest.operators.items() if not cut.aligned),
    }
