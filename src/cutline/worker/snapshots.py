"""Takes one operator's snapshots, in the order of their epochs, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.outages import is_disk_failure, outage_of
from cutline.errors import CutlineError, InvariantViolation
from cutline.model.checkpoint import OperatorRecord, SinkRecord, SubtaskRecord
from cutline.model.cut import CutPoint, InFlight, OperatorAck, SubtaskAck, Timings
from cutline.model.entries import BarrierEntry
from cutline.model.ids import BatchId, Epoch, OperatorId, SinkId, Subtask
from cutline.ports.checkpoint_store import StoredRecord
from cutline.ports.sinks import Sink
from cutline.protocol.messages.agent import ResendAck, TakeSnapshot
from cutline.protocol.messages.wire import EpochClosed, OperatorAcked, SnapshotFailed
from cutline.protocol.publish.commit import StagedOutput
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec, OperatorStart
from cutline.worker.outbox import Outbox

log = get_logger(__name__)

#: How often to check whether Spark has committed the batch of a cut. Spark does not notify this process.
_COMMIT_POLL_SECONDS = 0.002
#: An agent learns of the end of an epoch shortly after the snapshotter does; far fewer epochs end in between.
_ENDED_EPOCHS_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Request:
    action: TakeSnapshot
    asked_s: float


class Snapshotter:
    """Waits until Spark has committed the batch of a cut, holds and stores its files and the record, acknowledges."""

    def __init__(
        self,
        spec: OperatorSpec,
        start: OperatorStart,
        ports: OperatorPorts,
        outbox: Outbox,
        *,
        on_committed: Callable[[BatchId], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``on_committed`` is called with each batch of a cut once Spark has committed it."""
        self._flow = spec.flow
        self._operator = spec.operator
        self._generation = start.generation
        self._subtasks = spec.plan.subtasks
        self._channel = start.channel
        self._sinks = spec.sinks
        self._spark_checkpoint_dir = ports.spark_checkpoint_dir
        self._query_dirs = ports.query_dirs
        self._checkpoints = ports.checkpoints
        self._outbox = outbox
        self._on_committed = on_committed
        self._on_fatal = on_fatal
        self._outages = ports.outages
        #: Its name among the parts of a flow that wait for a resource.
        self._part = f"snapshots of {spec.operator}"
        self._staged = StagedOutput(start.completed_batch)
        self._inputs = ports.inputs
        #: The answer sent for each open epoch, to be sent again on request.
        self._answers: dict[Epoch, OperatorAcked | SnapshotFailed] = {}
        #: The last closed epochs, complete or aborted.
        self._over: deque[Epoch] = deque(maxlen=_ENDED_EPOCHS_REMEMBERED)
        self._stopping = threading.Event()
        self._requests: queue.SimpleQueue[_Request | ResendAck | EpochClosed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cutline-snapshot-{spec.operator}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self._outages.ended(self._part)

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def request(self, action: TakeSnapshot) -> None:
        if action.epoch in self._over:
            return  # the agent did not know that the epoch is closed; a snapshot stored now would never be collected
        self._staged.cut(action.epoch, action.batch)
        self._requests.put(_Request(action, time.perf_counter()))

    def resend(self, action: ResendAck) -> None:
        self._requests.put(action)

    def epoch_closed(self, event: EpochClosed) -> None:
        """Bind a complete epoch's output to no later epoch; stop the work for an aborted one."""
        self._over.append(event.epoch)
        self._staged.closed(event.epoch, completed=event.completed)
        self._requests.put(event)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            match request:
                case _Request():
                    self._answer(request)
                case ResendAck():
                    # Earlier requests are done: without an answer the epoch is closed, or never reached this operator.
                    if request.epoch in self._answers:
                        self._outbox.tell(self._answers[request.epoch])
                case EpochClosed():
                    self._answers.pop(request.epoch, None)
                    if not request.completed:
                        # The coordinator has discarded the epoch too, perhaps while this record was being stored.
                        self._discard(request.epoch)
                case _:
                    assert_never(request)

    def _discard(self, epoch: Epoch) -> None:
        try:
            self._checkpoints.discard(epoch)
        except OSError:  # it holds nothing that is read; the next collection removes it
            log.warning("snapshot_not_discarded", operator=self._operator, epoch=epoch, exc_info=True)

    def _answer(self, request: _Request) -> None:
        epoch = request.action.epoch
        try:
            stored = self._take(request)
            if stored is None:
                return
            answer: OperatorAcked | SnapshotFailed = OperatorAcked(ack=acknowledgement(stored))
        except Exception as error:  # a sink may raise anything in ``prepare``; the coordinator aborts the epoch
            if is_disk_failure(error):
                self._on_fatal(error)  # a later snapshot could succeed without what the disk has lost
            elif (outage := outage_of(error)) is not None:
                self._outages.failed(self._part, outage, is_timed=False)
            reason = str(error) if isinstance(error, CutlineError) else f"{type(error).__name__}: {error}"
            log.warning("snapshot_failed", operator=self._operator, epoch=epoch, exc_info=True)
            answer = self._failure(epoch, reason)
        else:
            self._outages.over(self._part)
        self._answers[epoch] = answer
        self._outbox.tell(answer)

    def _failure(self, epoch: Epoch, reason: str) -> SnapshotFailed:
        return SnapshotFailed(operator=self._operator, epoch=epoch, generation=self._generation, reason=reason)

    def report_failure(self, epoch: Epoch, reason: str) -> None:
        """The operator will never cut for this epoch."""
        self._outbox.tell(self._failure(epoch, reason))

    def _take(self, request: _Request) -> StoredRecord | None:
        """Take and store the snapshot; None when it is no longer needed."""
        action = request.action
        stored = self._checkpoints.find_record(action.epoch, self._operator, self._generation)
        if stored is not None:
            return stored  # an earlier process had stored it, but its acknowledgement was lost
        if not self._wait_committed(action):
            return None
        self._on_committed(action.batch)
        committed = time.perf_counter()
        files = self._query_dirs.files_of(self._spark_checkpoint_dir, action.batch)
        held = self._checkpoints.hold(self._operator, action.epoch, self._spark_checkpoint_dir, files)
        pinned = time.perf_counter()
        crashpoint("after-pin", self._operator)
        barrier = self._barrier_of(action.epoch)
        self._channel.sync_barriers()
        subtasks, shared = self._checkpoints.store_files(held)
        sinks = {name: self._sink_record(name, sink, action) for name, sink in self._sinks.items()}
        record = OperatorRecord(
            flow=self._flow,
            operator=self._operator,
            epoch=action.epoch,
            generation=self._generation,
            batch=action.batch,
            barrier=barrier.seq,
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
            in_flight=self._in_flight(action, barrier),
        )
        stored = self._checkpoints.store_record(record)
        crashpoint("after-record", self._operator)
        return stored

    def _wait_committed(self, action: TakeSnapshot) -> bool:
        """Wait until Spark has committed the batch; False when the snapshot is no longer needed."""
        while not self._query_dirs.is_committed(self._spark_checkpoint_dir, action.batch):
            if action.epoch in self._over or self._stopping.wait(_COMMIT_POLL_SECONDS):
                return False
        return action.epoch not in self._over

    def _in_flight(self, action: TakeSnapshot, barrier: BarrierEntry) -> dict[OperatorId, InFlight]:
        """What the cut leaves unread before the inputs' barriers, as far as these have appeared.

        An unaligned cut may come before some of them. Waiting here would make this operator late for another's delay.
        """
        if barrier.alone is not None:
            return {}  # no cut across the flow: the inputs have no barriers of this epoch
        found = {
            channel: self._inputs[channel].in_flight_at(action.epoch, position)
            for channel, position in action.positions.items()
            if channel in self._inputs
        }
        return {channel: flight for channel, flight in found.items() if flight is not None}

    def _barrier_of(self, epoch: Epoch) -> BarrierEntry:
        barrier = self._channel.find_barrier(epoch)
        if barrier is None:
            raise InvariantViolation("a cut without a barrier in the log", operator=self._operator, epoch=epoch)
        return barrier

    def _with_empty_subtasks(self, subtasks: list[SubtaskRecord]) -> list[SubtaskRecord]:
        """Before the first batch there are no state files, but every subtask acknowledges."""
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


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def acknowledgement(stored: StoredRecord) -> OperatorAck:
    """Made from the record alone, so a repeated acknowledgement is identical."""
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
        in_flight=record.in_flight,
    )
