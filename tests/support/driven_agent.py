"""An agent with its inputs' logs, driven by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, OperatorId, Position
from cutline.protocol.cut.agent import AS_FLOW, Agent, AlignmentLimits, CutState, FoundCut
from cutline.protocol.messages.agent import (
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BatchAppended,
    DataAppeared,
    ReportFailure,
    SetGate,
    TakeSnapshot,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import AckRequested, BarrierRequested, EpochClosed


def terms(limit_ms: int | None = None, *, is_binding: bool = False, started_ms: int = 0) -> BarrierTerms:
    return BarrierTerms(alignment_limit_ms=limit_ms, is_binding=is_binding, started_ms=started_ms)


class DrivenAgent:
    """Tells an agent what happens and keeps what it asked for."""

    def __init__(
        self,
        *inputs: str,
        last_epoch: int = NO_EPOCH,
        open_epochs: Iterable[int] = (),
        last_batch: int = NO_BATCH,
        positions: Mapping[str, int] | None = None,
        found_cuts: Iterable[FoundCut] = (),
        first_seq: Mapping[str, int] | None = None,
        own_limit_ms: int | None = AS_FLOW,
        patience_ms: int | None = None,
    ) -> None:
        self.agent = Agent(
            operator=OperatorId("me"),
            inputs=[OperatorId(name) for name in inputs],
            last_epoch=Epoch(last_epoch),
            open_epochs=[Epoch(epoch) for epoch in open_epochs],
            last_batch=BatchId(last_batch),
            positions={OperatorId(name): Position(at) for name, at in (positions or {}).items()},
            found_cuts=found_cuts,
            limits=AlignmentLimits(own_ms=own_limit_ms, give_up_ms=patience_ms),
        )
        self.now_ms = 0
        self.gates: dict[str, int] = {}
        self.actions: list[AgentAction] = []
        self._next_seq = {name: (first_seq or {}).get(name, 0) for name in inputs}
        self._batch = last_batch

    # ------------------------------------------------------------------ what happens

    def tell(self, event: AgentEvent) -> list[AgentAction]:
        actions = self.agent.handle(event, now_ms=self.now_ms)
        self.actions += actions
        self.gates.update({action.channel: action.admit for action in actions if isinstance(action, SetGate)})
        return actions

    def request(self, epoch: int, limit_ms: int | None = None) -> list[AgentAction]:
        return self.tell(BarrierRequested(epoch=Epoch(epoch), terms=terms(limit_ms)))

    def ask(self, epoch: int) -> list[AgentAction]:
        """The coordinator wants to know what became of an epoch."""
        return self.tell(AckRequested(epoch=Epoch(epoch)))

    def rows(self, channel: str, *, count: int = 1) -> None:
        """Data entries with rows appear."""
        for _ in range(count):
            self.tell(DataAppeared(channel=OperatorId(channel), seq=self._seq(channel), has_rows=True))

    def empty(self, channel: str) -> None:
        self.tell(DataAppeared(channel=OperatorId(channel), seq=self._seq(channel), has_rows=False))

    def barrier(
        self,
        channel: str,
        epoch: int,
        limit_ms: int | None = None,
        *,
        is_binding: bool = False,
        started_ms: int = 0,
    ) -> list[AgentAction]:
        event = BarrierAppeared(
            channel=OperatorId(channel),
            seq=self._seq(channel),
            epoch=Epoch(epoch),
            terms=terms(limit_ms, is_binding=is_binding, started_ms=started_ms),
        )
        return self.tell(event)

    def _seq(self, channel: str) -> Position:
        self._next_seq[channel] += 1
        return Position(self._next_seq[channel] - 1)

    def batch(self, **positions: int) -> list[AgentAction]:
        """The next batch is appended, having read so far."""
        self._batch += 1
        read = {OperatorId(name): Position(at) for name, at in positions.items()}
        return self.tell(BatchAppended(batch=BatchId(self._batch), positions=read))

    def close(self, epoch: int) -> list[AgentAction]:
        return self.tell(EpochClosed(epoch=Epoch(epoch)))

    def pass_ms(self, ms: int) -> list[AgentAction]:
        self.now_ms += ms
        return self.tell(TimePassed())

    # ------------------------------------------------------------------ what it asked for

    @property
    def barriers(self) -> list[tuple[int, int]]:
        """(epoch, batch) of every barrier it had appended, in order."""
        return [(action.epoch, action.batch) for action in self.actions if isinstance(action, AppendBarrier)]

    @property
    def failures(self) -> dict[int, str]:
        """Epochs it has said it will never cut for, and why."""
        return {action.epoch: action.reason for action in self.actions if isinstance(action, ReportFailure)}

    def state_of(self, epoch: int) -> CutState:
        return self.agent.state_of(Epoch(epoch))

    @property
    def snapshots(self) -> list[TakeSnapshot]:
        return [action for action in self.actions if isinstance(action, TakeSnapshot)]


def found_cut(epoch: int, batch: int, aligned: bool = True, **positions: int) -> FoundCut:
    return FoundCut(
        epoch=Epoch(epoch),
        batch=BatchId(batch),
        positions={OperatorId(name): Position(at) for name, at in positions.items()},
        aligned=aligned,
    )
