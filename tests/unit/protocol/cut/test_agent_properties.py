"""Agents of a small flow under random interleavings: every cut is consistent, and every open epoch is cut in the end.

a ─┐
   ├─ c ── d
b ─┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_BATCH, BatchId, Epoch, OperatorId, Position
from cutline.protocol.cut.agent import Agent, FoundCut
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
from cutline.protocol.messages.wire import BarrierRequested, EpochClosed

INPUTS: dict[str, tuple[str, ...]] = {"a": (), "b": (), "c": ("a", "b"), "d": ("c",)}
SOURCES = [name for name, inputs in INPUTS.items() if not inputs]
CONSUMERS = [name for name, inputs in INPUTS.items() if inputs]
EDGES = [(consumer, channel) for consumer, inputs in INPUTS.items() for channel in inputs]
#: Aligned, unaligned, switching.
LIMITS = (None, 0, 10)
MOST_OPEN = 3


@dataclass(frozen=True)
class Data:
    batch: int
    has_rows: bool
    positions: dict[str, int]


@dataclass(frozen=True)
class Barrier:
    epoch: int
    batch: int
    positions: dict[str, int]
    aligned: bool
    terms: BarrierTerms


@dataclass
class Node:
    """An operator: its log is durable, the rest dies with the process."""

    name: str
    log: list[Data | Barrier] = field(default_factory=list)
    #: Spark's offset log: a batch that was planned is run with the same positions after a restart.
    planned: dict[str, int] | None = None
    cuts: dict[int, TakeSnapshot] = field(default_factory=dict)
    agent: Agent = field(init=False)
    gates: dict[str, int] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    inbox: deque[AgentEvent] = field(default_factory=deque)

    @property
    def data(self) -> list[Data]:
        return [entry for entry in self.log if isinstance(entry, Data)]

    @property
    def positions(self) -> dict[str, int]:
        return self.log[-1].positions if self.log else dict.fromkeys(INPUTS[self.name], 0)

    def barrier_at(self, epoch: int) -> int | None:
        found = [i for i, entry in enumerate(self.log) if isinstance(entry, Barrier) and entry.epoch == epoch]
        assert len(found) <= 1, f"{self.name} has cut twice for epoch {epoch}"
        return found[0] if found else None


class Flow(RuleBasedStateMachine):
    """The rules are what can happen; what must hold is checked where it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.last_epoch = 0
        self.open: dict[int, int | None] = {}
        self.nodes = {name: Node(name) for name in INPUTS}
        self.incarnations = 0

    @initialize()
    def start(self) -> None:
        """Everything in memory is gone; agents find themselves again in their logs."""
        self.incarnations += 1
        for node in self.nodes.values():
            found = [entry for entry in node.log if isinstance(entry, Barrier) and entry.epoch in self.open]
            node.agent = Agent(
                operator=OperatorId(node.name),
                inputs=[OperatorId(name) for name in INPUTS[node.name]],
                last_epoch=Epoch(self.last_epoch),
                open_epochs=[Epoch(epoch) for epoch in self.open],
                last_batch=BatchId(node.log[-1].batch if node.log else NO_BATCH),
                positions=_typed(node.positions),
                found_cuts=[
                    FoundCut(
                        epoch=Epoch(barrier.epoch),
                        batch=BatchId(barrier.batch),
                        positions=_typed(barrier.positions),
                        aligned=barrier.aligned,
                    )
                    for barrier in found
                ],
            )
            node.gates, node.delivered, node.inbox = {}, dict.fromkeys(INPUTS[node.name], 0), deque()
        for node in self.nodes.values():
            self.perform(node, node.agent.start())
            # What the inputs hold already is taken in before any query runs.
            for channel in INPUTS[node.name]:
                self.see_entries((node.name, channel), len(self.nodes[channel].log), again=False)
            self.tell(node, TimePassed())
        for epoch, limit_ms in self.open.items():
            self.inject(epoch, limit_ms)

    # ------------------------------------------------------------------ what can happen

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(limit_ms=st.sampled_from(LIMITS))
    def begin_epoch(self, limit_ms: int | None) -> None:
        self.last_epoch += 1
        self.open[self.last_epoch] = limit_ms
        self.inject(self.last_epoch, limit_ms)

    def inject(self, epoch: int, limit_ms: int | None) -> None:
        for source in SOURCES:
            self.nodes[source].inbox.append(
                BarrierRequested(epoch=Epoch(epoch), terms=BarrierTerms(alignment_limit_ms=limit_ms))
            )

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_epoch(self, data: st.DataObject) -> None:
        """Aborted, or complete with all before it: either way it is over for everybody."""
        epoch = data.draw(st.sampled_from(sorted(self.open)))
        if all(epoch in node.cuts for node in self.nodes.values()):
            self.check_consistent(epoch)
        del self.open[epoch]
        for node in self.nodes.values():
            node.inbox.append(EpochClosed(epoch=Epoch(epoch)))

    @rule(name=st.sampled_from(list(INPUTS)), again=st.booleans())
    def hear_coordinator(self, name: str, again: bool) -> None:
        node = self.nodes[name]
        if node.inbox:
            event = node.inbox.popleft()
            self.tell(node, event)
            if again:
                self.tell(node, event)

    @rule(edge=st.sampled_from(EDGES), count=st.integers(1, 5), again=st.booleans())
    def see_entries(self, edge: tuple[str, str], count: int, again: bool) -> None:
        """A consumer learns of the next entries of an input, perhaps of old ones once more."""
        node, log = self.nodes[edge[0]], self.nodes[edge[1]].log
        first = node.delivered[edge[1]]
        for seq in range(first, min(first + count, len(log))):
            node.delivered[edge[1]] = seq + 1
            self.tell(node, _appeared(edge[1], seq, log[seq]))
        if again and first:
            self.tell(node, _appeared(edge[1], first - 1, log[first - 1]))

    @rule(name=st.sampled_from(SOURCES), has_rows=st.booleans())
    def produce(self, name: str, has_rows: bool) -> None:
        self.append(self.nodes[name], {}, has_rows=has_rows)

    @rule(name=st.sampled_from(CONSUMERS), data=st.data())
    def plan_batch(self, name: str, data: st.DataObject) -> None:
        """Spark plans a batch as far as the gates allow (or less far), before it computes it."""
        node = self.nodes[name]
        if node.planned is None and node.gates != node.positions:
            ends = {channel: self.reachable(node, channel) for channel in INPUTS[name]}
            node.planned = {channel: data.draw(st.sampled_from(choices)) for channel, choices in ends.items()}

    def reachable(self, node: Node, channel: str) -> list[int]:
        """Positions where a batch may end: where it is, or after an entry with rows."""
        at, admit = node.positions[channel], node.gates[channel]
        log = self.nodes[channel].log
        return [at, *(seq + 1 for seq in range(at, admit) if _has_rows(log[seq]))]

    @rule(name=st.sampled_from(CONSUMERS), has_rows=st.booleans())
    def finish_batch(self, name: str, has_rows: bool) -> None:
        node = self.nodes[name]
        if node.planned is not None:
            positions, node.planned = node.planned, None
            self.append(node, positions, has_rows=has_rows)

    @rule(name=st.sampled_from(list(INPUTS)))
    def run_a_batch_again(self, name: str) -> None:
        node = self.nodes[name]
        if node.data:
            again = node.data[-1]
            self.tell(node, BatchAppended(batch=BatchId(again.batch), positions=_typed(again.positions)))

    @rule(ms=st.sampled_from([1, 9, 10, 50]))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        for node in self.nodes.values():
            deadline = node.agent.next_deadline_ms()
            if deadline is not None and deadline <= self.now_ms:
                self.tell(node, TimePassed())
                later = node.agent.next_deadline_ms()
                assert later is None or later > self.now_ms, f"{node.name} would spin"

    @rule()
    def crash(self) -> None:
        self.start()

    # ------------------------------------------------------------------ what agents ask for

    def append(self, node: Node, positions: dict[str, int], *, has_rows: bool) -> None:
        batch = node.data[-1].batch + 1 if node.data else 0
        node.log.append(Data(batch, has_rows, positions))
        self.tell(node, BatchAppended(batch=BatchId(batch), positions=_typed(positions)))

    def tell(self, node: Node, event: AgentEvent) -> None:
        self.perform(node, node.agent.handle(event, now_ms=self.now_ms))

    def perform(self, node: Node, actions: list[AgentAction]) -> None:
        for action in actions:
            match action:
                case AppendBarrier():
                    self.append_barrier(node, action)
                case TakeSnapshot():
                    self.take_snapshot(node, action)
                case SetGate():
                    node.gates[action.channel] = action.admit
                case ReportFailure() | ResendAck():
                    raise AssertionError(f"{node.name} was neither asked nor had to give up: {action}")

    def append_barrier(self, node: Node, action: AppendBarrier) -> None:
        earlier = [entry.epoch for entry in node.log if isinstance(entry, Barrier)]
        assert action.epoch > max(earlier, default=0), "barriers stand in the order of their epochs"
        assert action.batch == (node.data[-1].batch if node.data else NO_BATCH), "directly after the last batch"
        positions = {str(channel): int(at) for channel, at in action.positions.items()}
        node.log.append(Barrier(action.epoch, action.batch, positions, action.aligned, action.terms))

    def take_snapshot(self, node: Node, action: TakeSnapshot) -> None:
        assert node.barrier_at(action.epoch) is not None, "the cut is in the log first"
        known = node.cuts.setdefault(action.epoch, action)
        assert (known.batch, dict(known.positions)) == (action.batch, dict(action.positions)), "found again as it was"
        for channel, position in action.positions.items():
            barrier = self.nodes[channel].barrier_at(action.epoch)
            if barrier is not None:
                assert position <= barrier
            if known.aligned:
                assert barrier is not None
                assert not any(_has_rows(entry) for entry in self.nodes[channel].log[position:barrier])

    # ------------------------------------------------------------------ what must hold

    def check_consistent(self, epoch: int) -> None:
        for consumer, channel in EDGES:
            barrier = self.nodes[channel].barrier_at(epoch)
            assert barrier is not None
            assert self.nodes[consumer].cuts[epoch].positions[OperatorId(channel)] <= barrier

    def teardown(self) -> None:
        """Nothing more happens from outside: every open epoch must be cut by everybody, and every row be read."""
        if not self.incarnations:
            return
        for _ in range(4 * len(INPUTS) * (MOST_OPEN + 1)):
            for node in self.nodes.values():
                while node.inbox:
                    self.tell(node, node.inbox.popleft())
                for channel in INPUTS[node.name]:
                    self.see_entries((node.name, channel), len(self.nodes[channel].log), again=False)
                if INPUTS[node.name] and (node.planned or node.gates != node.positions):
                    planned = node.planned or dict(node.gates)
                    node.planned = None
                    self.append(node, planned, has_rows=True)
            self.pass_time(max(limit or 0 for limit in LIMITS))
        for epoch in self.open:
            assert all(epoch in node.cuts for node in self.nodes.values()), f"epoch {epoch} hangs"
            self.check_consistent(epoch)
        for consumer, channel in EDGES:
            unread = self.nodes[channel].log[self.nodes[consumer].positions[channel] :]
            assert not any(_has_rows(entry) for entry in unread), f"{consumer} never read all of {channel}"


def _typed(positions: dict[str, int]) -> dict[OperatorId, Position]:
    return {OperatorId(name): Position(at) for name, at in positions.items()}


def _has_rows(entry: Data | Barrier) -> bool:
    return isinstance(entry, Data) and entry.has_rows


def _appeared(channel: str, seq: int, entry: Data | Barrier) -> DataAppeared | BarrierAppeared:
    if isinstance(entry, Data):
        return DataAppeared(channel=OperatorId(channel), seq=Position(seq), has_rows=entry.has_rows)
    return BarrierAppeared(
        channel=OperatorId(channel),
        seq=Position(seq),
        epoch=Epoch(entry.epoch),
        terms=entry.terms,
    )


TestAgentsOfAFlow = Flow.TestCase
TestAgentsOfAFlow.settings = settings(stateful_step_count=60)
