"""The shell around one operator's agent: batches come in from the engine, entries and snapshots go out.

Append, cut and barrier happen under the operator's lock, so a cut always lies between two entries. Everything slower
(pinning, hashing, storing, publishing) happens on threads of its own, off the path of the batches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import assert_never

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.config.options import OperatorOptions, Options
from cutline.errors import DamagedRecordError, InvariantViolation
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import NO_BATCH, START, BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId
from cutline.ports import Engine, OperatorPlan, Sink, SnapshotStore, StagedBatch, StagedTask, StageJob, StreamingBatch
from cutline.protocol.cut.agent import AS_FLOW, Agent, FoundCut
from cutline.protocol.link import Envelope
from cutline.protocol.messages.coordinator import (
    AckRequested,
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BarrierRequested,
    BatchAppended,
    DataAppeared,
    EpochClosed,
    OperatorStarted,
    ProgressMade,
    ReportFailure,
    ResendAck,
    SetGate,
    TakeSnapshot,
    TimePassed,
)
from cutline.protocol.publish.commit import CommitPermit
from cutline.transport.mailbox import Letter, PostBox, ToCoordinator, ToOperator, Wire
from cutline.worker.backpressure import Credits, StopAtBoundary
from cutline.worker.snapshots import Snapshotter

log = get_logger(__name__)

#: An agent gives an epoch up by itself only when its coordinator, which says better why, has had the time to.
_LONGER_THAN_COORDINATOR_MS = 2_000


class OperatorService:
    """Runs the protocol for one operator. ``handle_batch`` is what the engine calls."""

    def __init__(
        self,
        *,
        flow: FlowName,
        operator: OperatorId,
        generation: Generation,
        plan: OperatorPlan,
        channel: ChannelLog,
        inputs: Mapping[OperatorId, OperatorService],
        consumers: tuple[OperatorId, ...],
        sinks: Mapping[SinkId, Sink],
        spark_checkpoint_dir: Path,
        snapshots: SnapshotStore,
        engine: Engine,
        options: Options,
        own_options: OperatorOptions,
        reports_progress: bool,
        wire: Wire,
        on_fatal: Callable[[BaseException], None],
        last_epoch: Epoch,
        open_epochs: frozenset[Epoch],
        completed_batch: BatchId,
    ) -> None:
        """``wire`` leads to the coordinator. ``reports_progress``: a trigger asks how far the operators are."""
        self.operator = operator
        self.channel = channel
        self.spark_checkpoint_dir = spark_checkpoint_dir
        self._flow = flow
        self._generation = generation
        self._plan = plan
        self._inputs = dict(inputs)
        self._has_consumers = bool(consumers)
        self._snapshots = snapshots
        self._keeps_plans = options.is_per_operator
        self._sinks = sinks
        self._engine = engine
        self._report_fatal = on_fatal
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[AgentEvent | Letter | None] = queue.SimpleQueue()
        self.post: PostBox[ToCoordinator, ToOperator] = PostBox(
            generation, wire, retry_ms=options.message_retry_ms, retry_limit=options.message_retry_limit
        )
        self._open_epochs = open_epochs
        self._reports_progress = reports_progress
        #: What the coordinator was last told of this operator's channel; said and changed under its lock.
        self._is_said_full = False
        self._progress_lock = threading.Lock()
        self.credits = Credits(
            channel,
            consumers,
            entries=options.channel_capacity_entries,
            size_bytes=options.channel_capacity_bytes,
        )
        #: Where its first batch begins to read each input, if that is not the beginning.
        self._begins_at = channel.positions_after(NO_BATCH)
        self._agent = self._recovered_agent(last_epoch, open_epochs, options, own_options)
        self.snapshotter = Snapshotter(
            flow=flow,
            operator=operator,
            generation=generation,
            subtasks=plan.subtasks,
            channel=channel,
            sinks=sinks,
            spark_checkpoint_dir=spark_checkpoint_dir,
            snapshots=snapshots,
            tell=self._tell,
            on_fatal=self._on_fatal,
            completed_batch=completed_batch,
        )
        self._thread = threading.Thread(target=self._run, name=f"cutline-{operator}", daemon=True)
        self._listeners: list[tuple[ChannelLog, Callable[[Entry], None]]] = []
        #: Another service takes its place: whatever its query still does concerns nobody.
        self._is_abandoned = False
        #: Spark has planned a batch that stands in the log, and otherwise than it was planned then.
        self._is_plan_wrong = False
        #: It is behind its own log, and its query is started again for each batch of it.
        self._is_repeating = False
        self.rows_total = 0
        self.batches_total = 0
        #: Batches that stood in the log and were run all the same, to bring the state up to it.
        self.repeated_total = 0
        #: It has run again the last batch that stood in its log.
        self.has_caught_up = False
        self.last_batch_ms = 0.0

    def _recovered_agent(
        self, last_epoch: Epoch, open_epochs: frozenset[Epoch], options: Options, own: OperatorOptions
    ) -> Agent:
        """The agent as its own log tells: a barrier directly after batch N's entry means "cut at N"."""
        cuts = [
            FoundCut(epoch=barrier.epoch, batch=barrier.batch, positions=barrier.positions, aligned=barrier.aligned)
            for barrier in self.channel.barriers()
            if barrier.epoch in open_epochs
        ]
        return Agent(
            operator=self.operator,
            inputs=self._inputs,
            last_epoch=last_epoch,
            open_epochs=open_epochs,
            last_batch=self.channel.last_batch,
            positions=self.channel.last_positions,
            found_cuts=cuts,
            own_limit_ms=own.alignment_limit_ms(options) if own.sets_alignment() else AS_FLOW,
            patience_ms=options.checkpoint_timeout_ms + _LONGER_THAN_COORDINATOR_MS,
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Follow the inputs and finish what an earlier incarnation began."""
        self.post.send(
            OperatorStarted(
                operator=self.operator, generation=self._generation, open_epochs=tuple(sorted(self._open_epochs))
            )
        )
        self.snapshotter.start()
        for happened in self.channel.data_entries():
            self.snapshotter.publish_at_once(happened.staged)  # what is published already is not published again
        with self._lock:
            self._perform(self._agent.start())
            for name, producer in self._inputs.items():
                listener = self._on_entry_of(name)
                self._listeners.append((producer.channel, listener))
                for entry in producer.channel.on_append(listener):
                    self._perform(self._agent.handle(_appeared(name, entry), now_ms=now_ms()))
            # An input without entries has a gate too, and the reader needs it before the query starts.
            self._perform(self._agent.handle(TimePassed(), now_ms=now_ms()))
        self._report_consumed(self.channel.last_positions)
        self._thread.start()

    def stop(self) -> None:
        """Let no further batch begin. The snapshots under way are finished or given up by their own thread."""
        self.credits.stop()
        for channel, listener in self._listeners:
            channel.forget(listener)
        self._events.put(None)
        self._thread.join(timeout=10)
        self.snapshotter.stop()

    def abandon(self) -> None:
        """Begin no further batch; what is under way may end, and changes nothing that anybody reads."""
        with self._lock:  # whatever the agent does, it does under this lock: afterwards it does nothing more
            self._is_abandoned = True
        self.credits.stop()

    def has_ended(self) -> bool:
        """Whether no thread of it is left."""
        return not self._thread.is_alive() and self.snapshotter.has_ended()

    def _on_fatal(self, error: BaseException) -> None:
        if not self._is_abandoned:
            self._report_fatal(error)

    def _on_entry_of(self, channel: OperatorId) -> Callable[[Entry], None]:
        return lambda entry: self._events.put(_appeared(channel, entry))

    def deliver(self, letter: Letter) -> None:
        """The coordinator's wire ends here; a letter is taken in on the operator's own thread, in order."""
        self._events.put(letter)

    def _tell(self, message: ToCoordinator) -> None:
        self.post.send(message)
        self._events.put(TimePassed())  # the operator's thread repeats what is lost, and may sleep

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._patience_seconds())
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                self._take(event)
            except BaseException as error:  # the outermost loop: an agent that cannot write its log must not go on
                log.error("agent_failed", flow=self._flow, operator=self.operator, exc_info=True)
                self._on_fatal(error)
                return

    def _patience_seconds(self) -> float | None:
        """How long the thread may sleep when nothing happens."""
        with self._lock:
            deadlines = [self._agent.next_deadline_ms(), self.post.next_deadline_ms()]
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if first is None else max(first - now_ms(), 0) / 1000

    def _take(self, event: AgentEvent | Letter) -> None:
        if isinstance(event, Envelope):
            for message in self.post.receive(event):
                self._take_message(message)
        else:
            self._hand_to_agent(event)
        self.post.send_again()

    def _take_message(self, message: ToOperator) -> None:
        match message:
            case CommitPermit():
                self.snapshotter.publish(message)
            case EpochClosed():
                self.snapshotter.epoch_closed(message)
                self._hand_to_agent(message)
            case BarrierRequested() | AckRequested():
                self._hand_to_agent(message)
            case _:
                assert_never(message)

    def _hand_to_agent(self, event: AgentEvent) -> None:
        with self._lock:
            if self._is_abandoned:
                return
            self._perform(self._agent.handle(event, now_ms=now_ms()))

    # ------------------------------------------------------------------ batches

    def handle_batch(self, batch: StreamingBatch) -> None:
        """Called by the engine between planning and committing a batch, on the query's own thread."""
        if self._is_abandoned:
            raise StopAtBoundary
        if batch.batch <= self.channel.last_batch:
            self._repeat(batch)
            return
        self._set_repeating(False)
        self.credits.begin_batch()
        started = time.perf_counter()
        try:
            positions = dict(batch.positions())
            tasks = batch.stage(self._job(batch.batch))
            crashpoint("after-stage", self.operator)
            rows = self._append(batch.batch, positions, tasks)
            self._report_progress(rows, batch)
        finally:
            self.credits.end_batch()
        self.last_batch_ms = (time.perf_counter() - started) * 1000

    def _repeat(self, batch: StreamingBatch) -> None:
        """Its entry is in the log. The plan runs all the same, to its end: that is what rebuilds the state."""
        if self._keeps_plans and self._logged_plan(batch.batch) != self._plan_of(batch.batch):
            # Another input, or another time of day, would make another state, and the log already has the output.
            self._is_plan_wrong = True
            raise StopAtBoundary
        batch.run_to_end()
        self.repeated_total += 1
        self.has_caught_up = batch.batch == self.channel.last_batch

    def prepare_query(self) -> None:
        """To be asked before the query is started: what stands in the log is run again exactly as it was planned."""
        self._is_plan_wrong = False
        if not self._keeps_plans:
            return
        # The query's own first plan is the next batch: of what it finds planned it runs exactly that.
        batch = BatchId(self._snapshots.last_committed(self.spark_checkpoint_dir) + 1)
        self._set_repeating(batch < self.channel.last_batch)
        if batch <= self.channel.last_batch and self._logged_plan(batch) != self._plan_of(batch):
            self._snapshots.put_plan(self.spark_checkpoint_dir, batch, self._logged_plan(batch))

    def _set_repeating(self, is_repeating: bool) -> None:
        if is_repeating != self._is_repeating:
            self._is_repeating = is_repeating
            self._engine.expect_restarts(self.operator, is_repeating)
            left = self.channel.last_batch - self._snapshots.last_committed(self.spark_checkpoint_dir)
            event = "repeats_its_log" if is_repeating else "caught_up_with_its_log"
            log.info(event, flow=self._flow, operator=self.operator, batches=left)

    def is_repeating(self) -> bool:
        """Whether it runs batches that stand in its log, to bring its state up to it."""
        return self._is_repeating

    def is_plan_wrong(self) -> bool:
        """Whether the query has ended only because it must be prepared for the next batch in the log."""
        return self._is_plan_wrong

    def _logged_plan(self, batch: BatchId) -> Mapping[str, bytes]:
        entry = self.channel.find_batch(batch)
        if entry is None or not entry.plan:
            raise InvariantViolation(f"the log does not say how batch {batch} was planned", operator=self.operator)
        return entry.plan

    def _plan_of(self, batch: BatchId) -> Mapping[str, bytes]:
        try:
            return self._snapshots.plan_of(self.spark_checkpoint_dir, batch)
        except DamagedRecordError:
            return {}

    def _job(self, batch: BatchId) -> StageJob:
        return StageJob(
            flow=self._flow,
            operator=self.operator,
            generation=self._generation,
            batch=batch,
            schema_ipc=self._plan.schema_ipc,
            segments=self.channel.segments.place if self._has_consumers else None,
            stagers={name: sink.stager() for name, sink in self._sinks.items()},
        )

    def _append(self, batch: BatchId, positions: dict[OperatorId, Position], tasks: list[StagedTask]) -> int:
        rows = sum(task.rows for task in tasks)
        staged = {
            name: StagedBatch(
                generation=self._generation,
                batch=batch,
                rows=rows,
                bytes=sum(int(piece.get("size_bytes", 0)) for task in tasks for piece in task.pieces.get(name, ())),
                pieces=[piece for task in tasks for piece in task.pieces.get(name, ())],
            )
            for name in self._sinks
        }
        staged = {name: value for name, value in staged.items() if value.pieces}
        segments = [task.segment for task in tasks if task.segment]
        if segments:
            self.channel.segments.appended()
        event = BatchAppended(batch=batch, positions=positions)
        plan = self._snapshots.plan_of(self.spark_checkpoint_dir, batch) if self._keeps_plans else {}
        with self._lock:
            if self._is_abandoned:
                raise StopAtBoundary
            try:
                # Before the entry exists: afterwards a re-run would take the batch for done.
                self._agent.check(event)
                self.channel.append(
                    DataEntry(
                        seq=self.channel.end,
                        generation=self._generation,
                        batch=batch,
                        rows=rows,
                        segments=segments,
                        staged=staged,
                        positions=positions,
                        plan=plan,
                    )
                )
                crashpoint("after-append", self.operator)
                self.snapshotter.publish_at_once(staged)
                self._perform(self._agent.handle(event, now_ms=now_ms()))
            except BaseException as error:
                # The agent has decided what could not be done. Only a start from the logs makes them agree again.
                self._on_fatal(error)
                raise
            waits = self._agent.next_deadline_ms() is not None
        if waits:
            self._events.put(TimePassed())  # the operator's thread may sleep without knowing of the new deadline
        self.rows_total += rows
        self.batches_total += 1
        self._report_consumed(positions)
        return rows

    def _report_consumed(self, positions: Mapping[OperatorId, Position]) -> None:
        if self._is_abandoned:
            return
        for name, position in positions.items():
            self._inputs[name].consumed_by(self.operator, position)

    def replace_input(self, producer: OperatorService) -> None:
        """The operator that writes an input has come back alone: its log is the same, its service another."""
        self._inputs[producer.operator] = producer
        positions = self.channel.last_positions
        producer.consumed_by(self.operator, positions.get(producer.operator, START))

    def consumed_by(self, consumer: OperatorId, position: Position) -> None:
        """A consumer has read this operator's channel up to a position."""
        self.credits.consumed(consumer, position)
        with self._progress_lock:
            if self._is_said_full and self.credits.has_room():
                self._is_said_full = False
                self._tell(ProgressMade(operator=self.operator, is_source=not self._inputs))

    def _report_progress(self, rows: int, batch: StreamingBatch) -> None:
        if not self._reports_progress:
            return
        watermark_ms = batch.watermark_ms()
        with self._progress_lock:
            self._is_said_full = not self.credits.has_room()
            self._tell(
                ProgressMade(
                    operator=self.operator,
                    is_source=not self._inputs,
                    batches=1,
                    rows=rows,
                    watermark_ms=watermark_ms,
                    is_without_room=self._is_said_full,
                )
            )

    # ------------------------------------------------------------------ actions

    def _perform(self, actions: list[AgentAction]) -> None:
        """Carry out what the agent has decided; the caller holds the lock."""
        for action in actions:
            match action:
                case AppendBarrier():
                    self._append_barrier(action)
                case TakeSnapshot():
                    self.snapshotter.request(action)
                case ResendAck():
                    self.snapshotter.resend(action)
                case ReportFailure():
                    self.snapshotter.report_failure(action.epoch, action.reason)
                case SetGate():
                    lineage = self._inputs[action.channel].channel.lineage
                    first = self._begins_at.get(action.channel, START)
                    self._engine.set_gate(self.operator, action.channel, action.admit, lineage, first)
                case _:
                    assert_never(action)
        self.credits.set_exempt(self._agent.is_aligning())

    def _append_barrier(self, action: AppendBarrier) -> None:
        self.channel.append(
            BarrierEntry(
                seq=self.channel.end,
                generation=self._generation,
                epoch=action.epoch,
                batch=action.batch,
                positions=dict(action.positions),
                aligned=action.aligned,
                alignment_limit_ms=action.terms.alignment_limit_ms,
                is_binding=action.terms.is_binding,
                started_ms=action.terms.started_ms,
                alone=action.terms.alone,
            )
        )
        crashpoint("after-barrier", self.operator)

    def aligning(self) -> Mapping[Epoch, tuple[OperatorId, ...]]:
        with self._lock:
            return self._agent.aligning()


def _appeared(channel: OperatorId, entry: Entry) -> DataAppeared | BarrierAppeared:
    match entry:
        case DataEntry():
            return DataAppeared(channel=channel, seq=entry.seq, has_rows=entry.rows > 0)
        case BarrierEntry():
            return BarrierAppeared(channel=channel, seq=entry.seq, epoch=entry.epoch, terms=entry.terms)
        case _:
            assert_never(entry)
