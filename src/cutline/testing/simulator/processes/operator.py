"""One operator's process: its agent, its log, and what it says to the coordinator and hears from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, assert_never

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.entries import BarrierEntry
from cutline.model.ids import NO_BATCH, START, BatchId, Epoch, Generation, OperatorId, Position
from cutline.model.staging import StagedBatch
from cutline.protocol.cut.agent import Agent, AlignmentLimits, CutState, FoundCut
from cutline.protocol.cut.credits import CreditAccount
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.link import Endpoint, Envelope
from cutline.protocol.messages.agent import (
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BatchAppended,
    DataAppeared,
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
    OperatorStarted,
    ProgressMade,
)
from cutline.protocol.publish.commit import CommitPermit
from cutline.testing.simulator.processes.publishing import Publishing
from cutline.testing.simulator.processes.query import Query
from cutline.testing.simulator.processes.snapshots import Snapshots
from cutline.testing.simulator.storage.log import Data, Entry, Rows, View
from cutline.testing.simulator.storage.sinks import SinkTarget
from cutline.testing.simulator.world import COORDINATOR, Crash, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


class OperatorProcess:
    """One process of one operator, from its start to its death."""

    def __init__(self, flow: SimulatedFlow, operator: OperatorId, session: int) -> None:
        self.is_alive = True
        self.is_zombie = False
        self.operator = operator
        self.flow = flow
        self.world = flow.world
        self.disk = flow.disk
        #: The claim under which its sinks publish.
        self.token = flow.token
        self._book = flow.book
        self._log = flow.disk.logs[operator]
        current = flow.current_generation()
        self.lineage = lineage_of(current.lineage[operator])
        self.input_lineage = {name: lineage_of(current.lineage[name]) for name in flow.graph.inputs[operator]}
        self.generation: Generation = self.lineage.generation
        self.clock_offset_ms = flow.clock_offset()
        self._link: Endpoint[Any] = Endpoint(session, retry_ms=40, retry_limit=6, window=16)
        self.gates: dict[OperatorId, Position] = {}
        self._seen = dict.fromkeys(flow.graph.inputs[operator], START)
        self._armed_ms: int | None = None
        self._link_armed = False
        #: Of epochs whose barrier has appeared: when, and what it says.
        self._asked: dict[Epoch, tuple[int, BarrierTerms]] = {}
        self._appeared = dict.fromkeys(flow.graph.inputs[operator], START)
        view = self.view()
        #: Where its next entry will stand: it is the only writer, or is fenced.
        self._end = view.end
        self.last_batch: BatchId = view.last_batch if view.entries else NO_BATCH
        self.positions: dict[OperatorId, Position] = dict(view.positions)
        self._read_before = dict(view.positions)
        #: Visible, and not known to be synced: their writer may have died first.
        self._unsynced: list[Entry] = left_unsynced(view)
        self._agent, self._open = self._recovered_agent(view)
        self.query = Query(self, flow.disk.spark[operator, current.spark_dirs[operator]])
        self.snapshots = Snapshots(self, flow.completed_batch(operator))
        self.publishing = Publishing(self)
        self.credits = self._account()

    def view(self) -> View:
        """The entries of its own log."""
        return self._log.view(self.lineage)

    def _recovered_agent(self, view: View) -> tuple[Agent, tuple[Epoch, ...]]:
        """As the real service does it: the operator's own log says where it had cut."""
        open_epochs = self.flow.open_epochs(self.operator)
        barriers = [entry for entry in view.entries if isinstance(entry, BarrierEntry)]
        agent = Agent(
            operator=self.operator,
            inputs=self.flow.graph.inputs[self.operator],
            last_epoch=self.flow.last_epoch(),
            open_epochs=open_epochs,
            last_batch=self.last_batch,
            positions=self.positions,
            found_cuts=[
                FoundCut(epoch=one.epoch, batch=one.batch, positions=one.positions, aligned=one.aligned)
                for one in barriers
                if one.epoch in open_epochs
            ],
            limits=AlignmentLimits(
                own_ms=self.flow.settings.own_limits_ms[self.operator], give_up_ms=self.flow.settings.patience_ms
            ),
        )
        return agent, tuple(open_epochs)

    def _account(self) -> CreditAccount:
        graph = self.flow.graph
        account = CreditAccount(
            graph.consumers[self.operator], entries=self.flow.settings.capacity_entries, size_bytes=1_000_000
        )
        for entry in self.view().entries:
            if isinstance(entry, Data):
                account.appended(entry.seq, entry.rows, entry.rows)
        for consumer in graph.consumers[self.operator]:
            account.consumed(consumer, self.flow.position_of(consumer, self.operator))
        account.is_exempt = self._agent.is_aligning()
        account.is_withheld = self.flow.is_paused and not graph.inputs[self.operator]
        return account

    def consumers_went_back(self) -> None:
        """Consumers read again what they had read: the account must know."""
        self.credits = self._account()

    def input_went_on(self, channel: OperatorId, lineage: Lineage) -> None:
        """The operator that writes an input was restored: what follows stands in another generation."""
        self.input_lineage[channel] = lineage

    # ------------------------------------------------------------------ life and death

    def start(self) -> None:
        self.say(OperatorStarted(operator=self.operator, generation=self.generation, open_epochs=self._open))
        self.guarded(self._begin)

    def _begin(self) -> None:
        self._perform(self._agent.start())
        for channel in self._seen:
            self._look(channel)
        self._handle(TimePassed())
        self.flow.consumed(self.operator, self.positions)
        self.query.poke()

    def die(self, why: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self.world.tell(self.operator, "dies", why=why)
            if not self.is_zombie:
                self.flow.operator_died(self)

    def is_aligning(self) -> bool:
        return self._agent.is_aligning()

    def fenced(self, why: str) -> None:
        """Another process has taken over what this one writes to: the whole process ends."""
        self.world.tell(self.operator, "is fenced", why=why)
        if self.is_zombie:
            self.die(why)
        else:
            self.flow.fenced(why)

    def is_current_holder(self) -> bool:
        """Whether no other generation has claimed the sinks since this process's flow did."""
        return not any(self.is_fenced_at(self.flow.sinks[name]) for name in self.flow.graph.sinks)

    def is_fenced_at(self, target: SinkTarget) -> bool:
        return target.ledger.claim != self.token

    def now(self) -> int:
        return self.world.now_ms + self.clock_offset_ms

    def clock_jumped(self) -> None:
        self.guarded(lambda: self._handle(TimePassed()))

    def guarded(self, do: Callable[[], None]) -> None:
        """A process that cannot write its log does not go on."""
        try:
            do()
        except Crash as crash:
            self.die(str(crash))
        except InvariantViolation as error:
            if not self.is_zombie:
                raise
            self.die(str(error))

    def slow(self, delay_ms: int) -> int:
        return delay_ms + (self.world.between(50, 400) if self.world.strikes("slow_disk") else 0)

    # ------------------------------------------------------------------ messages

    def say(self, payload: Any) -> None:
        for envelope in self._link.send(payload, now_ms=self.now()):
            self.flow.network.send(self._book, self.operator, COORDINATOR, envelope)
        self._arm_link()

    def _arm_link(self) -> None:
        deadline = None if self._link_armed else self._link.next_deadline_ms()
        if deadline is not None:
            self._link_armed = True
            self.world.after(deadline - self.now(), self._link_tick, self)

    def _link_tick(self) -> None:
        self._link_armed = False
        for envelope in self._link.time_passed(now_ms=self.now()):
            self.flow.network.send(self._book, self.operator, COORDINATOR, envelope)
        self._arm_link()

    def receive(self, sender: str, envelope: Envelope[Any]) -> None:
        received = self._link.receive(envelope, now_ms=self.now())
        for reply in received.replies:
            self.flow.network.send(self._book, self.operator, sender, reply)
        self._arm_link()
        if received.peer_restarted:
            # The new coordinator knows nothing of what we take for open.
            epochs = self._agent.unsettled()
            self.say(OperatorStarted(operator=self.operator, generation=self.generation, open_epochs=epochs))
        for payload in received.payloads:
            if self.is_alive:
                self.guarded(lambda payload=payload: self._heard(payload))  # type: ignore[misc]

    def _heard(self, payload: Any) -> None:
        match payload:
            case BarrierRequested() | AckRequested():
                self._handle(payload)
            case EpochClosed():
                self.snapshots.closed(payload)
                self._handle(payload)
            case CommitPermit():
                self.publishing.permitted(payload)
            case _:
                raise AssertionError(payload)

    # ------------------------------------------------------------------ the agent

    def _handle(self, event: AgentEvent) -> None:
        self._perform(self._agent.handle(event, now_ms=self.now()))
        self._check_limit(event)
        if self.credits.is_exempt != self._agent.is_aligning():
            self.credits.is_exempt = self._agent.is_aligning()
            self.query.poke()
        deadline = self._agent.next_deadline_ms()
        if deadline is not None and deadline != self._armed_ms:
            self._armed_ms = deadline
            self.world.after(deadline - self.now(), self._tick, self)

    def _check_limit(self, event: AgentEvent) -> None:
        """An operator waits for alignment no longer than a request allows, whatever its own limit says."""
        if isinstance(event, BarrierAppeared | DataAppeared):
            self._appeared[event.channel] = Position(event.seq + 1)
        if isinstance(event, BarrierAppeared):
            self._asked.setdefault(event.epoch, (self.now(), event.terms))
        aligning = [epoch for epoch in self._asked if self._agent.state_of(epoch) is CutState.ALIGNING]
        # Epochs are cut in order, and none before all is seen again that was read before this process.
        if not aligning or any(self._appeared[name] < at for name, at in self._read_before.items()):
            return
        since_ms, terms = self._asked[min(aligning)]
        limit_ms = terms.alignment_limit_ms
        if terms.is_binding and limit_ms is not None and self.now() - since_ms >= limit_ms:
            raise Violation(f"epoch {min(aligning)}: {self.operator} waits although {limit_ms} ms have passed")

    def _tick(self) -> None:
        self._armed_ms = None
        self.guarded(lambda: self._handle(TimePassed()))

    def _perform(self, actions: list[AgentAction]) -> None:
        for action in actions:
            match action:
                case AppendBarrier():
                    self._append_barrier(action)
                case TakeSnapshot():
                    self.snapshots.take(action)
                case ResendAck():
                    self.snapshots.resend(action.epoch)
                case ReportFailure():
                    self.snapshots.failed(action.epoch, action.reason)
                case SetGate():
                    self.gates[action.channel] = action.admit
                    self.query.poke()
                case _:
                    assert_never(action)

    def look(self, channel: OperatorId) -> None:
        """Something may have been appended to an input."""
        self.guarded(lambda: self._look(channel))

    def _look(self, channel: OperatorId) -> None:
        view = self.disk.logs[channel].view(self.input_lineage[channel])
        for entry in view.between(self._seen[channel]):
            self._seen[channel] = Position(entry.seq + 1)
            self._handle(_appeared(channel, entry))

    # ------------------------------------------------------------------ the log

    def _create(self, entry: Entry) -> None:
        """A data entry is synced on return, a barrier is not; a process that dies in between leaves it unsynced."""
        if self.world.strikes("store_refused"):
            raise Crash("its log could not be written")
        if not self._log.create(entry, is_synced=False):
            raise Crash("fenced: another process has written to its log")
        self._end = Position(entry.seq + 1)
        self._unsynced.append(entry)
        if self.world.strikes("store_unknown"):
            raise Crash("its log may have been written")
        if isinstance(entry, Data):
            self.sync_log()

    def _tell_consumers(self) -> None:
        for consumer in self.flow.graph.consumers[self.operator]:
            self.world.after(
                self.world.between(1, 6),
                lambda name=consumer: self.flow.entry_appended(name, self.operator),  # type: ignore[misc]
            )

    def _append_barrier(self, action: AppendBarrier) -> None:
        terms = action.terms
        self._create(
            BarrierEntry(
                seq=self._end,
                generation=self.generation,
                batch=action.batch,
                epoch=action.epoch,
                positions=dict(action.positions),
                aligned=action.aligned,
                alignment_limit_ms=terms.alignment_limit_ms,
                is_binding=terms.is_binding,
                started_ms=terms.started_ms,
                alone=terms.alone,
            )
        )
        self.world.tell(self.operator, "cuts", epoch=action.epoch, batch=action.batch, aligned=action.aligned)
        self._tell_consumers()

    def sync_log(self) -> None:
        """As ``ChannelLog.sync_barriers``: before a data entry is written, and before a cut is acknowledged."""
        for entry in self._unsynced:
            self._log.sync(entry)
        self._unsynced.clear()

    def append(self, batch: BatchId, positions: Mapping[OperatorId, Position], rows: Rows) -> None:
        event = BatchAppended(batch=batch, positions=positions)
        self._agent.check(event)
        self.sync_log()
        count = sum(size for _, _, size in rows)
        entry = Data(
            seq=self._end,
            generation=self.generation,
            batch=batch,
            rows=count,
            segments=[],
            staged=self._staged(batch, rows),
            positions=dict(positions),
            content=rows,
        )
        self._create(entry)
        self.last_batch, self.positions = batch, dict(positions)
        self.credits.appended(entry.seq, count, count)
        self._handle(event)
        self._tell_consumers()
        self.flow.consumed(self.operator, positions)
        self.publishing.happened(entry)
        if self.flow.settings.needs_progress:
            self.say(
                ProgressMade(
                    operator=self.operator,
                    is_source=not self.flow.graph.inputs[self.operator],
                    batches=1,
                    rows=count,
                    watermark_ms=count + batch * 10,
                    is_without_room=not self.credits.has_room(),
                )
            )

    def _staged(self, batch: BatchId, rows: Rows) -> dict[Any, StagedBatch]:
        """What its sinks have staged of the batch; staged files are synced before the entry is written."""
        pieces: list[dict[str, Any]] = [{"rows": rows}] if rows else []
        staged = StagedBatch(generation=self.generation, batch=batch, rows=len(rows), bytes=0, pieces=pieces)
        sinks = self.flow.graph.sinks_of(self.operator)
        for sink in sinks:
            self.flow.sinks[sink].stage(staged)
        return dict.fromkeys(sinks, staged)


def left_unsynced(view: View) -> list[Entry]:
    """The newest data entry and the barriers after it: the process before may have died before it synced them."""
    left: list[Entry] = []
    for entry in reversed(view.entries):
        left.append(entry)
        if isinstance(entry, Data):
            break
    return left


def _appeared(channel: OperatorId, entry: Entry) -> DataAppeared | BarrierAppeared:
    if isinstance(entry, BarrierEntry):
        return BarrierAppeared(channel=channel, seq=entry.seq, epoch=entry.epoch, terms=entry.terms)
    return DataAppeared(channel=channel, seq=entry.seq, has_rows=bool(entry.content))
