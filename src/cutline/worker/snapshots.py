"""Takes one operator's snapshots and publishes its sinks, on threads of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, FencedError, InvariantViolation
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.ports import OperatorRecord, Sink, SinkRecord, SnapshotStore, StagedBatch, StoredRecord, SubtaskRecord
from cutline.protocol.messages.coordinator import (
    CutPoint,
    EpochClosed,
    OperatorAck,
    OperatorAcked,
    ResendAck,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
    SubtaskAck,
    TakeSnapshot,
    Timings,
)
from cutline.protocol.publish.commit import CommitPermit, StagedOutput
from cutline.transport.mailbox import ToCoordinator
from cutline.worker.immediate_publishing import AtOnce

log = get_logger(__name__)

#: How often to look whether Spark has committed the batch of a cut. Spark tells nobody in this process.
_COMMIT_POLL_SECONDS = 0.002
#: An agent hears of the end of an epoch a moment after this side does; far fewer end in between.
_ENDED_EPOCHS_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Request:
    action: TakeSnapshot
    asked_s: float


@dataclass(frozen=True, slots=True)
class _Happened:
    """A batch stands in the log that a sink is to publish at once."""

    sink: AtOnce
    batch: StagedBatch


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
        tell: Callable[[ToCoordinator], None],
        on_fatal: Callable[[BaseException], None],
        completed_batch: BatchId,
    ) -> None:
        """``completed_batch``: cut batch of the newest complete epoch. What was staged up to it is bound already."""
        self._flow = flow
        self._operator = operator
        self._generation = generation
        self._subtasks = subtasks
        self._channel = channel
        self._sinks = sinks
        self._spark_checkpoint_dir = spark_checkpoint_dir
        self._snapshots = snapshots
        self._tell = tell
        self._on_fatal = on_fatal
        self._staged = StagedOutput(completed_batch)
        #: What was said about each epoch that is not over, to be said again.
        self._answers: dict[Epoch, OperatorAcked | SnapshotFailed] = {}
        #: The last epochs that ended, complete or not.
        self._over: deque[Epoch] = deque(maxlen=_ENDED_EPOCHS_REMEMBERED)
        self._stopping = threading.Event()
        self._requests: queue.SimpleQueue[_Request | ResendAck | EpochClosed | None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[CommitPermit | _Happened | None] = queue.SimpleQueue()
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

    def has_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    # ------------------------------------------------------------------ snapshots

    def request(self, action: TakeSnapshot) -> None:
        if action.epoch in self._over:
            return  # the agent had not heard of it yet; nobody would let go of what is stored now
        self._staged.cut(action.epoch, action.batch)
        self._requests.put(_Request(action, time.perf_counter()))

    def resend(self, action: ResendAck) -> None:
        self._requests.put(action)

    def epoch_closed(self, event: EpochClosed) -> None:
        """Bind no more to a complete epoch what it has published; stop working for an aborted one."""
        self._over.append(event.epoch)
        self._staged.closed(event.epoch, completed=event.completed)
        self._requests.put(event)

    def _run_snapshots(self) -> None:
        while (request := self._requests.get()) is not None:
            match request:
                case _Request():
                    self._answer(request)
                case ResendAck():
                    # Everything before it in the queue is done: without an answer the epoch is over, or never was here.
                    if request.epoch in self._answers:
                        self._tell(self._answers[request.epoch])
                case EpochClosed():
                    self._answers.pop(request.epoch, None)
                    if not request.completed:
                        # The coordinator has discarded the epoch too, perhaps while our record was being stored.
                        self._snapshots.discard(request.epoch)
                case _:
                    assert_never(request)

    def _answer(self, request: _Request) -> None:
        epoch = request.action.epoch
        try:
            stored = self._take(request)
            if stored is None:
                return
            answer: OperatorAcked | SnapshotFailed = OperatorAcked(ack=acknowledgement(stored))
        except Exception as error:  # a sink may raise anything in ``prepare``; the coordinator aborts the epoch
            reason = str(error) if isinstance(error, CutlineError) else f"{type(error).__name__}: {error}"
            log.warning("snapshot_failed", operator=self._operator, epoch=epoch, exc_info=True)
            answer = self._failure(epoch, reason)
        self._answers[epoch] = answer
        self._tell(answer)

    def _failure(self, epoch: Epoch, reason: str) -> SnapshotFailed:
        return SnapshotFailed(operator=self._operator, epoch=epoch, generation=self._generation, reason=reason)

    def report_failure(self, epoch: Epoch, reason: str) -> None:
        """The operator will never cut for this epoch."""
        self._tell(self._failure(epoch, reason))

    def _take(self, request: _Request) -> StoredRecord | None:
        """The stored snapshot; None when nobody wants it any more."""
        action = request.action
        stored = self._snapshots.find_record(action.epoch, self._operator, self._generation)
        if stored is not None:
            return stored  # an earlier life had stored it and was not heard
        if not self._wait_committed(action):
            return None
        committed = time.perf_counter()
        files = self._snapshots.files_of(self._spark_checkpoint_dir, action.batch)
        pin = self._snapshots.pin(self._operator, action.epoch, self._spark_checkpoint_dir, files)
        pinned = time.perf_counter()
        crashpoint("after-pin", self._operator)
        barrier = self._barrier_of(action.epoch)
        self._channel.sync_barriers()
        subtasks, shared = self._snapshots.store_files(pin)
        sinks = {name: self._sink_record(name, sink, action) for name, sink in self._sinks.items()}
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
            sinks=sinks,
            timings=Timings(
                start_delay_ms=action.start_delay_ms,
                alignment_ms=action.alignment_ms,
                sync_ms=_ms(pinned - committed),
                async_ms=_ms(time.perf_counter() - pinned + committed - request.asked_s),
            ),
        )
        stored = self._snapshots.store_record(record)
        crashpoint("after-record", self._operator)
        return stored

    def _wait_committed(self, action: TakeSnapshot) -> bool:
        """Wait until Spark has committed the batch; False when nobody wants the snapshot any more."""
        while not self._snapshots.is_committed(self._spark_checkpoint_dir, action.batch):
            if action.epoch in self._over or self._stopping.wait(_COMMIT_POLL_SECONDS):
                return False
        return action.epoch not in self._over

    def _barrier_of(self, epoch: Epoch) -> Position:
        barrier = self._channel.find_barrier(epoch)
        if barrier is None:
            raise InvariantViolation("a cut without a barrier in the log", operator=self._operator, epoch=epoch)
        return barrier.seq

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
        staged = [
            entry.staged[name]
            for entry in self._channel.data_entries()
            if name in entry.staged and self._staged.binds(entry.batch, action.batch)
        ]
        return SinkRecord(staged=staged, token=sink.prepare(action.epoch, staged))

    # ------------------------------------------------------------------ publishing

    def publish(self, permit: CommitPermit) -> None:
        self._permits.put(permit)

    def publish_at_once(self, staged: Mapping[SinkId, StagedBatch]) -> None:
        """A batch has happened: some sinks do not wait for a checkpoint. To be called in the order of the log."""
        for name, batch in staged.items():
            if isinstance(sink := self._sinks.get(name), AtOnce):
                self._permits.put(_Happened(sink, batch))

    def _publish_early(self, happened: _Happened) -> bool:
        """False: trying again would never end."""
        try:
            happened.sink.publish(happened.batch)
        except FencedError as error:
            self._on_fatal(error)
            return False
        except Exception:  # a sink may raise anything; the batch comes with the next one, or with its checkpoint
            log.warning("not_published_at_once", operator=self._operator, batch=happened.batch.batch, exc_info=True)
        return True

    def _run_commits(self) -> None:
        while (permit := self._permits.get()) is not None:
            if isinstance(permit, _Happened):
                if not self._publish_early(permit):
                    return
                continue
            try:
                has_rows = self._commit(permit)
            except FencedError as error:  # another history has passed this one: trying again would never end
                self._on_fatal(error)
                return
            except Exception as error:  # a sink may raise anything; the coordinator tries again
                log.warning("sink_commit_failed", sink=permit.sink, epoch=permit.epoch, exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                self._tell(
                    SinkCommitFailed(operator=self._operator, sink=permit.sink, epoch=permit.epoch, reason=reason)
                )
            else:
                self._tell(
                    SinkCommitted(operator=self._operator, sink=permit.sink, epoch=permit.epoch, has_rows=has_rows)
                )

    def _commit(self, permit: CommitPermit) -> bool:
        """Whether there were rows to publish, of which the sink says from now on that it has them."""
        record = self._snapshots.load_record(self._snapshots.load_manifest(permit.epoch), self._operator)
        prepared = record.sinks.get(permit.sink)
        if prepared is None:
            return False  # the sink was added to the flow after this epoch
        staged = [batch for batch in prepared.staged if permit.covers(batch.batch)]
        sink = self._sinks[permit.sink]
        sink.commit(permit, staged, prepared.token)
        return any(batch.rows for batch in staged) and not isinstance(sink, AtOnce)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def acknowledgement(stored: StoredRecord) -> OperatorAck:
    """Made from the record and nothing else: said again, it says the same."""
    record = stored.record
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
                async_ms=subtask.async_ms,
            )
            for subtask in record.subtasks
        ),
        record_sha256=stored.sha256,
        watermark_ms=record.watermark_ms,
        timings=record.timings,
    )
