"""Takes one operator's snapshots and publishes its sinks, on threads of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from cutline.channels.log import ChannelLog
from cutline.crashpoints import crashpoint
from cutline.errors import CutlineError, FencedError
from cutline.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.logs import get_logger
from cutline.ports import OperatorRecord, Sink, SinkRecord, SnapshotStore, SubtaskRecord
from cutline.protocol.commit import CommitPermit
from cutline.protocol.messages import (
    CoordinatorEvent,
    CutPoint,
    OperatorAck,
    OperatorAcked,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    SubtaskAck,
    TakeSnapshot,
    Timings,
)

log = get_logger(__name__)

#: How often to look whether Spark has committed the batch of a cut. Spark tells nobody in this process.
_COMMIT_POLL_SECONDS = 0.002
#: An agent hears of the end of an epoch a moment after this side does; far fewer end in between.
_ENDED_EPOCHS_REMEMBERED = 256


class Snapshotter:
    """Snapshots in the order of their epochs; sink commits beside them, in the order they are asked for."""

    def __init__(
        self,
        *,
        flow: FlowName,
        operator: OperatorId,
        generation: Generation,
        subtasks: int,
        channel: ChannelLog,
        sinks: Mapping[SinkId, Sink],
        spark_checkpoint_dir: Path,
        snapshots: SnapshotStore,
        notify: Callable[[CoordinatorEvent], None],
        on_fatal: Callable[[BaseException], None],
        completed_batch: BatchId,
    ) -> None:
        self._flow = flow
        self._operator = operator
        self._generation = generation
        self._subtasks = subtasks
        self._channel = channel
        self._sinks = sinks
        self._spark_checkpoint_dir = spark_checkpoint_dir
        self._snapshots = snapshots
        self._notify = notify
        self._on_fatal = on_fatal
        #: Cut batch of the newest complete epoch: what was staged up to it is no longer ours to bind.
        self._completed_batch = completed_batch
        self._cut_batches: dict[Epoch, BatchId] = {}
        #: Asked for and not finished.
        self._outstanding: set[Epoch] = set()
        #: Over while still outstanding.
        self._closed: set[Epoch] = set()
        #: The last epochs that ended, complete or not.
        self._over: deque[Epoch] = deque(maxlen=_ENDED_EPOCHS_REMEMBERED)
        self._stopping = threading.Event()
        self._requests: queue.SimpleQueue[TakeSnapshot | None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[CommitPermit | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_snapshots, name=f"cutline-snapshot-{operator}", daemon=True),
            threading.Thread(target=self._run_commits, name=f"cutline-publish-{operator}", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._requests.put(None)
        self._permits.put(None)
        for thread in self._threads:
            thread.join(timeout=30)

    # ------------------------------------------------------------------ snapshots

    def request(self, action: TakeSnapshot) -> None:
        if action.epoch in self._over:
            return  # the agent had not heard of it yet; nobody would let go of what is stored now
        self._cut_batches[action.epoch] = action.batch
        self._outstanding.add(action.epoch)
        self._requests.put(action)

    def epoch_closed(self, epoch: Epoch, *, completed: bool) -> None:
        """Bind no more to a complete epoch what it has published; stop working for an aborted one."""
        self._over.append(epoch)
        batch = self._cut_batches.pop(epoch, None)
        if completed and batch is not None:
            self._completed_batch = max(self._completed_batch, batch)
        if epoch in self._outstanding:
            self._closed.add(epoch)

    def _run_snapshots(self) -> None:
        while (action := self._requests.get()) is not None:
            try:
                self._take(action)
            except Exception as error:  # a sink may raise anything in ``prepare``; the coordinator aborts the epoch
                reason = str(error) if isinstance(error, CutlineError) else f"{type(error).__name__}: {error}"
                log.warning("snapshot_failed", operator=self._operator, epoch=action.epoch, exc_info=True)
                self._notify(
                    SnapshotFailed(
                        operator=self._operator, epoch=action.epoch, generation=self._generation, reason=reason
                    )
                )
            self._outstanding.discard(action.epoch)
            if action.epoch in self._closed:
                # Aborted while we worked: what was just stored belongs to nobody. (Completed: nothing is discarded.)
                self._snapshots.discard(action.epoch)
                self._closed.discard(action.epoch)

    def _take(self, action: TakeSnapshot) -> None:
        begun = time.perf_counter()
        if not self._wait_committed(action):
            return
        committed = time.perf_counter()
        files = self._snapshots.files_of(self._spark_checkpoint_dir, action.batch)
        pin = self._snapshots.pin(self._operator, action.epoch, self._spark_checkpoint_dir, files)
        pinned = time.perf_counter()
        crashpoint("after-pin", self._operator)
        barrier = self._barrier_of(action.epoch)
        self._channel.sync_barriers()
        subtasks, shared = self._snapshots.store_files(pin)
        record = OperatorRecord(
            flow=self._flow,
            operator=self._operator,
            epoch=action.epoch,
            generation=self._generation,
            batch=action.batch,
            barrier=barrier,
            positions=dict(action.positions),
            aligned=action.aligned,
            watermark_ms=files.watermark_ms,
            subtasks=self._with_empty_subtasks(subtasks),
            shared=shared,
            sinks={name: self._sink_record(name, sink, action) for name, sink in self._sinks.items()},
        )
        checksum = self._snapshots.store_record(record)
        crashpoint("after-record", self._operator)
        timings = Timings(
            alignment_ms=action.alignment_ms,
            sync_ms=(pinned - committed) * 1000,
            async_ms=(time.perf_counter() - pinned + committed - begun) * 1000,
        )
        self._notify(OperatorAcked(ack=_acknowledgement(record, checksum, timings)))

    def _wait_committed(self, action: TakeSnapshot) -> bool:
        """Wait until Spark has committed the batch; False when nobody wants the snapshot any more."""
        while not self._snapshots.is_committed(self._spark_checkpoint_dir, action.batch):
            if action.epoch in self._closed or self._stopping.wait(_COMMIT_POLL_SECONDS):
                return False
        return action.epoch not in self._closed

    def _barrier_of(self, epoch: Epoch) -> Position:
        return next(barrier.seq for barrier in reversed(self._channel.barriers()) if barrier.epoch == epoch)

    def _with_empty_subtasks(self, subtasks: list[SubtaskRecord]) -> list[SubtaskRecord]:
        """Before the first batch there are no state files; every subtask acknowledges all the same."""
        there = {record.subtask for record in subtasks}
        missing = [
            SubtaskRecord(subtask=Subtask(number), files=[], size_bytes=0, new_bytes=0)
            for number in range(self._subtasks)
            if Subtask(number) not in there
        ]
        return sorted([*subtasks, *missing], key=lambda record: record.subtask)

    def _sink_record(self, name: SinkId, sink: Sink, action: TakeSnapshot) -> SinkRecord:
        """Everything staged since the newest complete epoch: the outcome of epochs in between is still open."""
        staged = [
            entry.staged[name]
            for entry in self._channel.data_entries()
            if name in entry.staged and self._completed_batch < entry.batch <= action.batch
        ]
        return SinkRecord(staged=staged, token=sink.prepare(action.epoch, staged))

    # ------------------------------------------------------------------ publishing

    def publish(self, permit: CommitPermit) -> None:
        self._permits.put(permit)

    def _run_commits(self) -> None:
        while (permit := self._permits.get()) is not None:
            try:
                self._commit(permit)
            except FencedError as error:  # another history has passed this one: trying again would never end
                self._on_fatal(error)
                return
            except Exception as error:  # a sink may raise anything; the coordinator tries again
                log.warning("sink_commit_failed", sink=permit.sink, epoch=permit.epoch, exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                self._notify(
                    SinkCommitFailed(operator=self._operator, sink=permit.sink, epoch=permit.epoch, reason=reason)
                )
            else:
                self._notify(SinkCommitted(operator=self._operator, sink=permit.sink, epoch=permit.epoch))

    def _commit(self, permit: CommitPermit) -> None:
        record = self._snapshots.load_record(self._snapshots.load_manifest(permit.epoch), self._operator)
        prepared = record.sinks.get(permit.sink)
        if prepared is None:
            return  # the sink was added to the flow after this epoch
        staged = [batch for batch in prepared.staged if permit.covers(batch.batch)]
        self._sinks[permit.sink].commit(permit, staged, prepared.token)


def _acknowledgement(record: OperatorRecord, checksum: str, timings: Timings) -> OperatorAck:
    return OperatorAck(
        operator=record.operator,
        epoch=record.epoch,
        generation=record.generation,
        cut=CutPoint(batch=record.batch, barrier=record.barrier, positions=record.positions, aligned=record.aligned),
        subtasks=tuple(
            SubtaskAck(
                subtask=subtask.subtask,
                files=len(subtask.files),
                size_bytes=subtask.size_bytes,
                new_bytes=subtask.new_bytes,
            )
            for subtask in record.subtasks
        ),
        record_sha256=checksum,
        watermark_ms=record.watermark_ms,
        timings=timings,
    )
