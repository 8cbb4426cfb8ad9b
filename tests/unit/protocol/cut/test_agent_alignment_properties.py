"""One operator with several inputs, limits, patience and restarts: every cut is consistent, every move in the table."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_BATCH, BatchId, Epoch, OperatorId, Position
from cutline.protocol.cut.agent import AS_FLOW, MOVES, Agent, AlignmentLimits, CutState, FoundCut
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
from cutline.protocol.messages.wire import AckRequested, EpochClosed

EPOCHS = 5
PATIENCE_MS = 60
LIMITS = (None, 0, 10, 100)


@dataclass(frozen=True)
class Row:
    has_rows: bool


@dataclass(frozen=True)
class Mark:
    epoch: int
    terms: BarrierTerms


@dataclass
class Channel:
    """An input's log, and how much of it the operator has been shown in this life."""

    log: list[Row | Mark] = field(default_factory=list)
    shown: int = 0

    def barrier(self, epoch: int) -> int | None:
        return next((i for i, entry in enumerate(self.log) if isinstance(entry, Mark) and entry.epoch == epoch), None)

    def rows_in(self, first: int, end: int) -> list[int]:
        return [seq for seq in range(first, end) if self.log[seq] == Row(has_rows=True)]


class Operator(RuleBasedStateMachine):
    """Producers write what they like, in the order of epochs; some never hear of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.channels: dict[str, Channel] = {}
        self.own_limit_ms: int | None = AS_FLOW
        self.patience_ms: int | None = None
        self.closed: set[int] = set()
        self.batch = int(NO_BATCH)
        self.positions: dict[str, int] = {}
        #: Durable: the operator's own barriers, in the order of its log.
        self.cuts: dict[int, AppendBarrier] = {}
        self.gates: dict[str, int] = {}
        self.reported: set[int] = set()
        self.agent: Agent

    @initialize(
        inputs=st.integers(1, 3), own=st.sampled_from([AS_FLOW, *LIMITS]), patience=st.sampled_from([None, PATIENCE_MS])
    )
    def begin(self, inputs: int, own: int | None, patience: int | None) -> None:
        self.channels = {name: Channel() for name in "abc"[:inputs]}
        self.positions = dict.fromkeys(self.channels, 0)
        self.own_limit_ms, self.patience_ms = own, patience
        self.be_born()

    def be_born(self) -> None:
        self.agent = Agent(
            operator=OperatorId("me"),
            inputs=[OperatorId(name) for name in self.channels],
            last_epoch=Epoch(EPOCHS),
            open_epochs=[Epoch(epoch) for epoch in range(1, EPOCHS + 1) if epoch not in self.closed],
            last_batch=BatchId(self.batch),
            positions=_typed(self.positions),
            found_cuts=[
                FoundCut(epoch=cut.epoch, batch=cut.batch, positions=cut.positions, aligned=cut.aligned)
                for epoch, cut in self.cuts.items()
                if epoch not in self.closed
            ],
            limits=AlignmentLimits(own_ms=self.own_limit_ms, give_up_ms=self.patience_ms),
        )
        self.gates, self.reported = {}, set()
        for channel in self.channels.values():
            channel.shown = 0
        again = [action.epoch for action in self.agent.start() if isinstance(action, TakeSnapshot)]
        assert again == [epoch for epoch in self.cuts if epoch not in self.closed]

    # ------------------------------------------------------------------ what can happen

    @rule(data=st.data(), has_rows=st.booleans())
    def a_producer_writes(self, data: st.DataObject, has_rows: bool) -> None:
        self.channels[data.draw(st.sampled_from(sorted(self.channels)))].log.append(Row(has_rows))

    @rule(data=st.data(), skip=st.sampled_from([0, 0, 0, 1]))
    def a_producer_cuts(self, data: st.DataObject, skip: int) -> None:
        """For the next epoch; a producer that has missed one goes on with the one after it."""
        channel = self.channels[data.draw(st.sampled_from(sorted(self.channels)))]
        last = max((entry.epoch for entry in channel.log if isinstance(entry, Mark)), default=0)
        epoch = last + 1 + skip
        if epoch <= EPOCHS:
            channel.log.append(Mark(epoch, _terms(epoch)))

    @rule(data=st.data(), count=st.integers(1, 4), again=st.booleans())
    def entries_show(self, data: st.DataObject, count: int, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.channels)))
        self.show(name, count)
        if again and self.channels[name].shown:
            self.tell(self.appeared(name, self.channels[name].shown - 1))

    def show(self, name: str, count: int) -> None:
        channel = self.channels[name]
        for _ in range(min(count, len(channel.log) - channel.shown)):
            channel.shown += 1
            self.tell(self.appeared(name, channel.shown - 1))

    @rule(data=st.data())
    def a_batch_is_appended(self, data: st.DataObject) -> None:
        ends = {
            name: [at, *(seq + 1 for seq in self.channels[name].rows_in(at, self.gates.get(name, 0)))]
            for name, at in self.positions.items()
        }
        self.positions = {name: data.draw(st.sampled_from(choices)) for name, choices in ends.items()}
        self.batch += 1
        self.tell(BatchAppended(batch=BatchId(self.batch), positions=_typed(self.positions)))

    @rule(ms=st.sampled_from([1, 9, 10, 50, 60]))
    def time_passes(self, ms: int) -> None:
        deadline = self.agent.next_deadline_ms()
        self.now_ms += ms
        actions = self.tell(TimePassed())
        decided = [action for action in actions if not isinstance(action, SetGate)]
        assert not decided or (deadline is not None and deadline <= self.now_ms), "the timer was set too late"
        later = self.agent.next_deadline_ms()
        assert later is None or later > self.now_ms, "it would spin"

    @rule(epoch=st.integers(1, EPOCHS))
    def an_epoch_ends(self, epoch: int) -> None:
        self.closed.add(epoch)
        self.tell(EpochClosed(epoch=Epoch(epoch)))

    @rule(epoch=st.integers(1, EPOCHS))
    def the_coordinator_asks(self, epoch: int) -> None:
        state = self.agent.state_of(Epoch(epoch))
        answers = [action for action in self.tell(AckRequested(epoch=Epoch(epoch))) if not isinstance(action, SetGate)]
        assert (ResendAck(epoch=Epoch(epoch)) in answers) == (state is CutState.CUT)
        if state is CutState.MISSED:
            assert any(isinstance(action, ReportFailure) and action.epoch == epoch for action in answers)

    @precondition(lambda self: self.batch >= 0)
    @rule()
    def spark_runs_a_batch_again(self) -> None:
        self.tell(BatchAppended(batch=BatchId(self.batch), positions=_typed(self.positions)))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The logs are shown from the start before the query runs, in any order of inputs."""
        self.be_born()
        for name in data.draw(st.permutations(sorted(self.channels))):
            self.show(name, len(self.channels[name].log))
        self.tell(TimePassed())

    # ------------------------------------------------------------------ what must hold

    def appeared(self, name: str, seq: int) -> AgentEvent:
        entry = self.channels[name].log[seq]
        if isinstance(entry, Row):
            return DataAppeared(channel=OperatorId(name), seq=Position(seq), has_rows=entry.has_rows)
        return BarrierAppeared(channel=OperatorId(name), seq=Position(seq), epoch=Epoch(entry.epoch), terms=entry.terms)

    def tell(self, event: AgentEvent) -> list[AgentAction]:
        before = self.states()
        actions = self.agent.handle(event, now_ms=self.now_ms)
        for epoch, state in self.states().items():
            assert state is before[epoch] or state in MOVES[before[epoch]], f"{epoch}: {before[epoch]} to {state}"
        for action in actions:
            match action:
                case AppendBarrier():
                    self.check_cut(action)
                    self.cuts[action.epoch] = action
                case ReportFailure():
                    assert action.epoch not in self.reported or isinstance(event, AckRequested), "said once"
                    self.reported.add(action.epoch)
                    assert self.agent.state_of(action.epoch) is CutState.MISSED
                case SetGate():
                    self.gates[action.channel] = action.admit
                case TakeSnapshot():
                    assert self.cuts[action.epoch].batch == action.batch, "the cut is in the log first"
                case ResendAck():
                    assert action.epoch in self.cuts
        self.check_gates()
        return actions

    def states(self) -> dict[int, CutState]:
        return {epoch: self.agent.state_of(Epoch(epoch)) for epoch in range(1, EPOCHS + 1)}

    def check_cut(self, cut: AppendBarrier) -> None:
        assert cut.epoch not in self.cuts, "one cut for an epoch"
        assert cut.epoch not in self.reported, "not after it was given up"
        assert cut.epoch not in self.closed
        assert cut.batch == self.batch
        assert {str(name): int(at) for name, at in cut.positions.items()} == self.positions
        for name, channel in self.channels.items():
            barrier = channel.barrier(cut.epoch)
            if cut.aligned:
                assert barrier is not None
                assert channel.rows_in(self.positions[name], barrier) == [], "everything before the barrier was read"
            if barrier is not None:
                assert self.positions[name] <= barrier, "nothing behind the barrier was read"

    def check_gates(self) -> None:
        """Never past the first barrier that the operator has not cut for, and never short of it."""
        for name, channel in self.channels.items():
            if name not in self.gates:
                continue
            shown = channel.log[: channel.shown]
            holding = [
                seq
                for seq, entry in enumerate(shown)
                if isinstance(entry, Mark) and self.agent.state_of(Epoch(entry.epoch)) is CutState.ALIGNING
            ]
            first = min(holding, default=len(shown))
            end = max((seq + 1 for seq in channel.rows_in(0, first)), default=0)
            # What was read before a restart stays admitted, also while the log is being shown again.
            assert self.gates[name] == end or self.gates[name] == self.positions[name] > end
            assert not [seq for seq in holding if seq < self.positions[name]], "read past an uncut barrier"

    def teardown(self) -> None:
        """When every epoch has ended, every row may be read."""
        if not self.channels:
            return
        for epoch in range(1, EPOCHS + 1):
            self.tell(EpochClosed(epoch=Epoch(epoch)))
        for name, channel in self.channels.items():
            self.show(name, len(channel.log))
            assert channel.rows_in(self.gates.get(name, 0), len(channel.log)) == []
        assert self.agent.aligning() == {}
        assert self.agent.next_deadline_ms() is None


def _terms(epoch: int) -> BarrierTerms:
    """All barriers of an epoch say the same; the epochs differ."""
    return BarrierTerms(alignment_limit_ms=LIMITS[epoch % len(LIMITS)], is_binding=epoch % 3 == 0)


def _typed(positions: dict[str, int]) -> dict[OperatorId, Position]:
    return {OperatorId(name): Position(at) for name, at in positions.items()}


TestOperator = Operator.TestCase
TestOperator.settings = settings(stateful_step_count=60)
