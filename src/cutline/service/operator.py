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

from cutline import durable
from cutline.channels import entries as codec
from cutline.channels.entries import BarrierEntry, DataEntry, Entry
from cutline.channels.log import ChannelLog
from cutline.config import Options
from cutline.crashpoints import crashpoint
from cutline.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId
from cutline.logs import get_logger
from cutline.ports import Engine, OperatorPlan, Sink, SnapshotStore, StagedBatch, StagedTask, StageJob, StreamingBatch
from cutline.protocol.agent import Agent, FoundCut
from cutline.protocol.messages import (
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BatchAppended,
    CoordinatorEvent,
    DataAppeared,
    EpochClosed,
    SetGate,
    TakeSnapshot,
    TimePassed,
)
from cutline.service.clock import now_ms
from cutline.service.credits import Credits
from cutline.service.snapshotter import Snapshotter

log = get_logger(__name__)


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
        notify: Callable[[CoordinatorEvent], None],
        on_fatal: Callable[[BaseException], None],
        last_epoch: Epoch,
        open_epochs: frozenset[Epoch],
        completed_batch: BatchId,
    ) -> None:
        self.operator = operator
        self.channel = channel
        self.spark_checkpoint_dir = spark_checkpoint_dir
        self._flow = flow
        self._generation = generation
        self._plan = plan
        self._inputs = inputs
        self._has_consumers = bool(consumers)
        self._sinks = sinks
        self._engine = engine
        self._on_fatal = on_fatal
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[AgentEvent | None] = queue.SimpleQueue()
        self.credits = Credits(
            channel,
            consumers,
            entries=options.channel_capacity_entries,
            size_bytes=options.channel_capacity_bytes,
        )
        self._agent = self._recovered_agent(last_epoch, open_epochs)
        self.snapshotter = Snapshotter(
            flow=flow,
            operator=operator,
            generation=generation,
            subtasks=plan.subtasks,
            channel=channel,
            sinks=sinks,
            spark_checkpoint_dir=spark_checkpoint_dir,
            snapshots=snapshots,
            notify=notify,
            on_fatal=on_fatal,
            completed_batch=completed_batch,
        )
        self._thread = threading.Thread(target=self._run, name=f"cutline-{operator}", daemon=True)
        self.rows_total = 0
        self.batches_total = 0
        self.last_batch_ms = 0.0

    def _recovered_agent(self, last_epoch: Epoch, open_epochs: frozenset[Epoch]) -> Agent:
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
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Follow the inputs and finish what an earlier incarnation began."""
        self.snapshotter.start()
        with self._lock:
            self._perform(self._agent.start())
            for name, producer in self._inputs.items():
                for entry in producer.channel.on_append(lambda entry, name=name: self.post(_appeared(name, entry))):  # type: ignore[misc]
                    self._perform(self._agent.handle(_appeared(name, entry), now_ms=now_ms()))
            # An input without entries has a gate too, and the reader needs it before the query starts.
            self._perform(self._agent.handle(TimePassed(), now_ms=now_ms()))
        self._report_consumed(self.channel.last_positions)
        self._thread.start()

    def stop(self) -> None:
        """Let no further batch begin. The snapshots under way are finished or given up by their own thread."""
        self.credits.stop()
        self._events.put(None)
        self._thread.join(timeout=10)
        self.snapshotter.stop()

    def post(self, event: AgentEvent) -> None:
        """Hand an event to the agent; it is taken in on the operator's own thread, in order."""
        self._events.put(event)

    def _run(self) -> None:
        while True:
            with self._lock:
                deadline = self._agent.next_deadline_ms()
            timeout = None if deadline is None else max(deadline - now_ms(), 0) / 1000
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                with self._lock:
                    self._perform(self._agent.handle(event, now_ms=now_ms()))
            except BaseException as error:  # the outermost loop: an agent that cannot write its log must not go on
                log.error("agent_failed", flow=self._flow, operator=self.operator, exc_info=True)
                self._on_fatal(error)
                return

    # ------------------------------------------------------------------ batches

    def handle_batch(self, batch: StreamingBatch) -> None:
        """Called by the engine between planning and committing a batch, on the query's own thread."""
        if batch.batch <= self.channel.last_batch:
            # Its entry is in the log. The plan runs all the same, to its end: that is what rebuilds the state.
            batch.run_to_end()
            return
        self.credits.begin_batch()
        started = time.perf_counter()
        try:
            positions = dict(batch.positions())
            tasks = batch.stage(self._job(batch.batch))
            crashpoint("after-stage", self.operator)
            self._append(batch.batch, positions, tasks)
        finally:
            self.credits.end_batch()
        self.last_batch_ms = (time.perf_counter() - started) * 1000

    def _job(self, batch: BatchId) -> StageJob:
        return StageJob(
            flow=self._flow,
            operator=self.operator,
            generation=self._generation,
            batch=batch,
            schema_ipc=self._plan.schema_ipc,
            segments_dir=str(codec.data_dir(self.channel.folder)) if self._has_consumers else None,
            stagers={name: sink.stager() for name, sink in self._sinks.items()},
        )

    def _append(self, batch: BatchId, positions: dict[OperatorId, Position], tasks: list[StagedTask]) -> None:
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
        segments = [task.segment for task in tasks if task.segment]
        if segments:
            durable.fsync_dir(codec.data_dir(self.channel.folder))  # executors have synced the files themselves
        event = BatchAppended(batch=batch, positions=positions)
        with self._lock:
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
                        staged={name: value for name, value in staged.items() if value.pieces},
                        positions=positions,
                    )
                )
                crashpoint("after-append", self.operator)
                self._perform(self._agent.handle(event, now_ms=now_ms()))
            except BaseException as error:
                # The agent has decided what could not be done. Only a start from the logs makes them agree again.
                self._on_fatal(error)
                raise
            waits = self._agent.next_deadline_ms() is not None
        if waits:
            self.post(TimePassed())  # the operator's thread may sleep without knowing of the new deadline
        self.rows_total += rows
        self.batches_total += 1
        self._report_consumed(positions)

    def _report_consumed(self, positions: Mapping[OperatorId, Position]) -> None:
        for name, position in positions.items():
            self._inputs[name].credits.consumed(self.operator, position)

    # ------------------------------------------------------------------ actions

    def _perform(self, actions: list[AgentAction]) -> None:
        """Carry out what the agent has decided; the caller holds the lock."""
        for action in actions:
            match action:
                case AppendBarrier():
                    self._append_barrier(action)
                case TakeSnapshot():
                    self.snapshotter.request(action)
                case SetGate():
                    lineage = self._inputs[action.channel].channel.lineage
                    self._engine.set_gate(self.operator, action.channel, action.admit, lineage)
                case _:
                    assert_never(action)

    def _append_barrier(self, action: AppendBarrier) -> None:
        self.channel.append(
            BarrierEntry(
                seq=self.channel.end,
                generation=self._generation,
                epoch=action.epoch,
                batch=action.batch,
                positions=dict(action.positions),
                aligned=action.aligned,
                alignment_limit_ms=action.alignment_limit_ms,
            )
        )
        crashpoint("after-barrier", self.operator)

    def epoch_closed(self, epoch: Epoch, *, completed: bool) -> None:
        """The coordinator says that an epoch is over."""
        self.snapshotter.epoch_closed(epoch, completed=completed)
        self.post(EpochClosed(epoch=epoch))

    def aligning(self) -> Mapping[Epoch, tuple[OperatorId, ...]]:
        with self._lock:
            return self._agent.aligning()


def _appeared(channel: OperatorId, entry: Entry) -> DataAppeared | BarrierAppeared:
    match entry:
        case DataEntry():
            return DataAppeared(channel=channel, seq=entry.seq, has_rows=entry.rows > 0)
        case BarrierEntry():
            return BarrierAppeared(
                channel=channel, seq=entry.seq, epoch=entry.epoch, alignment_limit_ms=entry.alignment_limit_ms
            )
        case _:
            assert_never(entry)
