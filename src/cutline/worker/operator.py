"""The shell around one operator's agent: it passes events to the agent and performs the agent's decisions.

Append, cut and barrier happen under the operator's lock, so a cut always lies between two entries. Everything slower
(holding files, hashing, storing, publishing, deleting) happens on threads of its own, off the path of the batches.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.outages import Outages, outage_of
from cutline.model.entries import BarrierEntry, DataEntry
from cutline.model.ids import NO_BATCH, START, Epoch, OperatorId
from cutline.ports.engine import StreamingBatch
from cutline.protocol.cut.agent import AS_FLOW, Agent, AlignmentLimits, FoundCut
from cutline.protocol.cut.credits import ConsumptionReports, ConsumptionRequests
from cutline.protocol.history.lineage import lineage_of, spans_of
from cutline.protocol.link import Envelope
from cutline.protocol.messages.agent import (
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BatchAppended,
    ReportFailure,
    ResendAck,
    SetGate,
    TakeSnapshot,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import (
    AckRequested,
    BarrierRequested,
    EpochClosed,
    InputForked,
    OperatorFailed,
    OperatorStarted,
    ReleaseEntries,
    ToCoordinator,
    ToOperator,
)
from cutline.protocol.publish.commit import CommitPermit
from cutline.transport.in_process import COORDINATOR, Address, Content
from cutline.transport.mailbox import AnyEnvelope, LinkSettings, Mailbox
from cutline.worker.backpressure import Credits, StopAtBoundary
from cutline.worker.batches import Batches, FinishedBatch
from cutline.worker.credit_messages import CreditMessages
from cutline.worker.inputs import Inputs
from cutline.worker.log_release import LogRelease
from cutline.worker.log_replay import LogReplay
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec, OperatorStart
from cutline.worker.outbox import Outbox
from cutline.worker.sink_commits import SinkCommits
from cutline.worker.snapshots import Snapshotter

log = get_logger(__name__)

#: An agent gives an epoch up by itself only after its coordinator, which reports a better reason, had time to do so.
_LONGER_THAN_COORDINATOR_MS = 2_000
#: Between two attempts to append a batch.
_LEAST_PAUSE_MS = 10
_ACTIONS = (AppendBarrier, TakeSnapshot, ResendAck, ReportFailure, SetGate)


class OperatorService:
    """Runs the protocol for one operator. The engine calls ``handle_batch``."""

    def __init__(self, spec: OperatorSpec, start: OperatorStart, ports: OperatorPorts) -> None:
        options = spec.options
        self.operator = spec.operator
        self.channel = start.channel
        self.spark_checkpoint_dir = ports.spark_checkpoint_dir
        self._spec = spec
        self._start = start
        self._ports = ports
        #: Its name among the parts of a flow that wait for a resource.
        self._part = f"operator {spec.operator}"
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[AgentEvent | AnyEnvelope | None] = queue.SimpleQueue()
        #: What the agent has yet to be told, and its decisions that are not performed yet, in order. It is kept while a
        #: resource is away; no batch is appended before it is done.
        self._todo: deque[AgentEvent | AgentAction] = deque()
        #: When to try again what could not be done; None: nothing waits for a resource.
        self._retry_ms: int | None = None
        #: Why it could not be done.
        self._problem: OSError | None = None
        #: The entry of a batch that waits may be on disk: nothing may take its position, so the agent is told nothing.
        self._is_appending = False
        #: Another service has replaced this one: nothing that its query still does has an effect.
        self._is_abandoned = False
        #: Where the first batch begins to read each input, if not at the beginning.
        self._begins_at = self.channel.positions_after(NO_BATCH)
        self.mailbox: Mailbox[ToCoordinator, ToOperator] = Mailbox(
            start.generation,
            lambda envelope: ports.wire(COORDINATOR, envelope),
            LinkSettings(retry_ms=options.message_retry_ms, retry_limit=options.message_retry_limit),
        )
        self._outbox = Outbox(self.mailbox, wake=lambda: self._events.put(TimePassed()))
        self._inputs = Inputs(ports.inputs)
        self.credits = Credits(
            self.channel,
            spec.consumers,
            entries=options.channel_capacity_entries,
            size_bytes=options.channel_capacity_bytes,
        )
        self.batches = Batches(spec, start, self.credits, self._outbox)
        #: How far the operator had read its inputs when it started.
        self._read_at_start = {**dict.fromkeys(spec.inputs, START), **self.channel.last_positions}
        self._credit_messages = CreditMessages(
            self.credits,
            reports=ConsumptionReports(
                self.operator, start.generation, self._read_at_start, retry_ms=options.message_retry_ms
            ),
            requests=ConsumptionRequests(self.operator, spec.consumers, retry_ms=options.message_retry_ms),
            wire=ports.wire,
            on_credit=self.batches.credit_changed,
        )
        self.replay = LogReplay(spec, start, ports, self._outbox)
        self.snapshotter = Snapshotter(
            spec, start, ports, self._outbox, on_committed=self.replay.committed, on_fatal=self._on_fatal
        )
        self.sink_commits = SinkCommits(spec, ports, outbox=self._outbox, on_fatal=self._on_fatal)
        self._log_release = LogRelease(
            self.channel, start.generation, check_fence=ports.check_fence, outbox=self._outbox
        )
        self._agent = self._recovered_agent()
        self._thread = threading.Thread(target=self._run, name=f"cutline-{self.operator}", daemon=True)

    def _recovered_agent(self) -> Agent:
        """The agent, rebuilt from its own log: a barrier directly after batch N's entry means "cut at N"."""
        options, own, start = self._spec.options, self._spec.own_options, self._start
        cuts = [
            FoundCut(epoch=barrier.epoch, batch=barrier.batch, positions=barrier.positions, aligned=barrier.aligned)
            for barrier in self.channel.barriers()
            if barrier.epoch in start.open_epochs
        ]
        return Agent(
            operator=self.operator,
            inputs=self._spec.inputs,
            last_epoch=start.last_epoch,
            open_epochs=start.open_epochs,
            last_batch=self.channel.last_batch,
            positions=self.channel.last_positions,
            found_cuts=cuts,
            limits=AlignmentLimits(
                own_ms=own.alignment_limit_ms(options) if own.sets_alignment() else AS_FLOW,
                give_up_ms=options.checkpoint_timeout_ms + _LONGER_THAN_COORDINATOR_MS,
            ),
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Follow the inputs and finish what an earlier process began."""
        self.mailbox.send(
            OperatorStarted(
                operator=self.operator,
                generation=self._start.generation,
                open_epochs=tuple(sorted(self._start.open_epochs)),
                lineage=tuple(spans_of(self.channel.lineage)),
                needs=self.replay.needs,
            )
        )
        self.snapshotter.start()
        self.sink_commits.start()
        self._log_release.start()
        for happened in self.channel.data_entries():
            self.sink_commits.publish_immediately(happened.staged)  # published batches are not published again
        with self._lock:
            self._todo.extend(self._agent.start())
            self._todo.extend(self._inputs.follow(self._events.put))
            # An input without entries has a gate too, and the reader needs it before the query starts.
            self._todo.append(TimePassed())
            self._go_on()
        self._credit_messages.read(self._read_at_start)
        self._credit_messages.send_again()
        self._thread.start()

    def stop(self) -> None:
        """Begin no further batch. The snapshot thread finishes or gives up the snapshots under way."""
        self.credits.stop()
        self._inputs.unfollow()
        self._events.put(None)
        if self._thread.is_alive():  # a start may have failed half-way
            self._thread.join(timeout=10)
        self.snapshotter.stop()
        self.sink_commits.stop()
        self._log_release.stop()
        self._ports.outages.ended(self._part)

    def abandon(self) -> None:
        """Begin no further batch; a batch under way may end, but changes nothing that is read later."""
        with self._lock:  # the agent acts only under this lock: afterwards it does nothing more
            self._is_abandoned = True
        self.credits.stop()

    def has_ended(self) -> bool:
        """Whether all its threads have ended."""
        threads = (self.snapshotter, self.sink_commits, self._log_release)
        return not self._thread.is_alive() and all(one.has_ended() for one in threads)

    def _on_fatal(self, error: BaseException) -> None:
        if not self._is_abandoned:
            self._ports.on_fatal(error)
            reason = f"{type(error).__name__}: {error}"
            self.mailbox.send(OperatorFailed(operator=self.operator, generation=self._start.generation, reason=reason))

    # ------------------------------------------------------------------ events

    def deliver(self, _: Address, content: Content) -> None:
        """The receiving end of the wire. The operator's thread handles envelopes in order; credit is handled here."""
        if isinstance(content, Envelope):
            self._events.put(content)
        elif not self._is_abandoned:
            self._credit_messages.receive(content)

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._seconds_to_sleep())
            except queue.Empty:
                event = TimePassed()
            if event is None:
                return
            try:
                self._take(event)
            except BaseException as error:  # the outermost loop: an agent that cannot write its log must not go on
                log.error("agent_failed", flow=self._spec.flow, operator=self.operator, exc_info=True)
                self._on_fatal(error)
                return

    def _seconds_to_sleep(self) -> float | None:
        """How long the thread may sleep without an event."""
        deadlines = [self.mailbox.next_deadline_ms()]
        with self._lock:
            if not self._is_abandoned:  # otherwise none of them does anything when its time has come
                agent_ms = self._agent.next_deadline_ms() if self._retry_ms is None else self._retry_ms
                deadlines += [None if self._is_appending else agent_ms, self._credit_messages.next_deadline_ms()]
        first = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if first is None else max(first - now_ms(), 0) / 1000

    def _take(self, event: AgentEvent | AnyEnvelope) -> None:
        if isinstance(event, Envelope):
            for message in self.mailbox.receive(event):
                self._take_message(message)
        else:
            self._hand_to_agent(event)
        self.mailbox.send_again()
        if not self._is_abandoned:
            self._credit_messages.send_again()

    def _take_message(self, message: ToOperator) -> None:
        match message:
            case CommitPermit():
                self.sink_commits.publish(message)
            case EpochClosed():
                self.snapshotter.epoch_closed(message)
                self._hand_to_agent(message)
            case BarrierRequested() | AckRequested():
                self._hand_to_agent(message)
            case ReleaseEntries():
                self._log_release.request(message.below)
            case InputForked():
                self._inputs.follow_fork(message.channel, lineage_of(list(message.lineage)))
            case _:
                assert_never(message)

    def _hand_to_agent(self, event: AgentEvent) -> None:
        with self._lock:
            if self._is_abandoned:
                return
            if self._retry_ms is None or not isinstance(event, TimePassed):
                self._todo.append(event)
            self._go_on()

    # ------------------------------------------------------------------ batches

    def check_ready(self) -> None:
        """Raises the error because of which the query's gates may not be written; its own thread tries again."""
        with self._lock:
            if self._problem is not None and self._todo and not self._is_appending:
                raise self._problem

    def handle_batch(self, batch: StreamingBatch) -> None:
        """Called by the engine between planning and committing a batch, on the query's own thread."""
        if self._is_abandoned:
            raise StopAtBoundary
        if batch.batch <= self.channel.last_batch:
            self.replay.repeat(batch)
            return
        self.replay.end()
        with self.batches.staged(batch) as finished:
            self._append(finished)
            if not self._is_abandoned:
                self._credit_messages.read(finished.positions)

    def _append(self, finished: FinishedBatch) -> None:
        """Append the batch as soon as there is room for it on the disk; nothing is lost by waiting here."""
        while not self._is_appended(finished):
            pause_ms = max((self._retry_ms or 0) - now_ms(), _LEAST_PAUSE_MS)
            if self.credits.wait_stopped(pause_ms / 1000):
                raise StopAtBoundary

    def _is_appended(self, finished: FinishedBatch) -> bool:
        """Append the batch; False if a resource is away."""
        event = BatchAppended(batch=finished.batch, positions=finished.positions)
        plan = (
            self._ports.query_dirs.plan_of(self.spark_checkpoint_dir, finished.batch) if self.replay.keeps_plans else {}
        )
        with self._lock:
            if self._is_abandoned:
                raise StopAtBoundary
            try:
                self._go_on()
                if self._todo and not self._is_appending:
                    return False  # a barrier that belongs before this batch
                # Before the entry exists: afterwards a re-run would treat the batch as done.
                self._agent.check(event)
                entry = DataEntry(
                    seq=self.channel.end,
                    generation=self._start.generation,
                    batch=finished.batch,
                    rows=finished.rows,
                    segments=finished.segments,
                    staged=dict(finished.staged),
                    positions=dict(finished.positions),
                    plan=plan,
                )
                self._is_appending = not self._is_done(lambda: self.channel.append(entry))
                if self._is_appending:
                    return False
                crashpoint("after-append", self.operator)
                self.sink_commits.publish_immediately(finished.staged)
                self._todo.appendleft(event)  # what came while the batch waited comes after it
                self._go_on()
            except BaseException as error:
                # The agent's decision was not performed. Only a start from the logs makes the two agree again.
                self._on_fatal(error)
                raise
            waits = self._agent.next_deadline_ms() is not None or self._retry_ms is not None
        if waits:
            self._events.put(TimePassed())  # the operator's thread may sleep without knowing of the new deadline
        return True

    # ------------------------------------------------------------------ actions

    def _go_on(self) -> None:
        """Hand events to the agent and perform its decisions, in order; the caller holds the lock.

        While a resource is away, the rest waits: a barrier directly follows the batch at which the agent has cut.
        """
        if self._is_appending or (self._retry_ms is not None and now_ms() < self._retry_ms):
            return
        while self._todo:
            first = self._todo[0]
            if isinstance(first, _ACTIONS):
                if not self._is_done(partial(self._perform, first)):
                    return
                self._todo.popleft()
            else:
                self._todo.popleft()
                self._todo.extendleft(reversed(self._agent.handle(first, now_ms=now_ms())))
        self.credits.set_exempt(self._agent.is_aligning())

    def _is_done(self, step: Callable[[], object]) -> bool:
        """Do it now; False: a resource is away, and it is tried again later."""
        try:
            step()
        except OSError as error:
            outage = outage_of(error)
            if outage is None:
                raise
            self._retry_ms = now_ms() + round(self._ports.outages.failed(self._part, outage) * 1000)
            self._problem = error
            return False
        if self._retry_ms is not None:
            self._retry_ms = self._problem = None
            self._ports.outages.over(self._part)
        return True

    def _perform(self, action: AgentAction) -> None:
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
                lineage = self._inputs.lineage(action.channel)
                first = self._begins_at.get(action.channel, START)
                self._ports.engine.set_gate(self.operator, action.channel, action.admit, lineage, first)
            case _:
                assert_never(action)

    def _append_barrier(self, action: AppendBarrier) -> None:
        self.channel.append(
            BarrierEntry(
                seq=self.channel.end,
                generation=self._start.generation,
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

    # ------------------------------------------------------------------ figures

    @property
    def outages(self) -> Outages:
        return self._ports.outages

    @property
    def batches_total(self) -> int:
        return self.batches.batches_total

    @property
    def rows_total(self) -> int:
        return self.batches.rows_total

    @property
    def last_batch_ms(self) -> float:
        return self.batches.last_batch_ms

    @property
    def busy_ms(self) -> float:
        return self.batches.busy_ms

    @property
    def has_caught_up(self) -> bool:
        """Whether the last batch of its log has run again."""
        return self.replay.has_caught_up

    def aligning(self) -> Mapping[Epoch, tuple[OperatorId, ...]]:
        with self._lock:
            return self._agent.aligning()
