"""The operator's agent: decides when its operator cuts, and how far it may read until then.

Sources cut as soon as they are asked, unaligned operators as soon as the first barrier shows on any input: at the
last *appended* batch, whatever batch is being computed. Only alignment waits, and only as long as the barrier allows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, OperatorId, Position
from cutline.protocol.cut.gate import InputGate
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
from cutline.protocol.messages.wire import AckRequested, BarrierRequested, EpochClosed

#: Epochs further behind the newest closed one than this count as closed without being remembered one by one.
CLOSED_EPOCHS_REMEMBERED = 4096


class CutState(enum.Enum):
    """The state of one epoch at one operator. The values are shown to users."""

    UNSEEN = "unseen"  # no barrier has appeared here
    ALIGNING = "aligning"  # a barrier has appeared; the gate holds that input
    CUT = "cut"  # the operator's own barrier is in its log; the snapshot is taken and acknowledged
    MISSED = "missed"  # given up by the operator: it read on without a cut, and never cuts for this epoch
    CLOSED = "closed"  # complete or aborted


#: Every legal move. A pair that is not here is a bug in the agent.
MOVES: Mapping[CutState, frozenset[CutState]] = {
    # A source, an unaligned operator, and an operator that has read everything up to the barrier cut immediately.
    CutState.UNSEEN: frozenset({CutState.ALIGNING, CutState.CUT, CutState.MISSED, CutState.CLOSED}),
    CutState.ALIGNING: frozenset({CutState.CUT, CutState.MISSED, CutState.CLOSED}),
    CutState.CUT: frozenset({CutState.CLOSED}),
    CutState.MISSED: frozenset({CutState.CLOSED}),
    CutState.CLOSED: frozenset(),
}

#: Means "the limit that the barrier names".
AS_FLOW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCut:
    """A cut that the agent finds in its own log when it starts: the logs are the truth, not memory."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentLimits:
    """How long one operator waits for alignment."""

    #: Its own limit, which overrides the barrier's unless that is binding. None: it waits without limit.
    own_ms: int | None = AS_FLOW
    #: After this time it gives the epoch up by itself, so that it never waits for a dead coordinator.
    give_up_ms: int | None = None


@dataclass(slots=True, kw_only=True)
class _Alignment:
    """An epoch whose first barrier has appeared and for which the operator has not cut."""

    since_ms: int
    limit_ms: int | None
    terms: BarrierTerms

    def is_expired(self, now_ms: int) -> bool:
        return self.limit_ms is not None and now_ms - self.since_ms >= self.limit_ms


class Agent:
    """One operator's side of the protocol."""

    def __init__(
        self,
        *,
        operator: OperatorId,
        inputs: Iterable[OperatorId],
        last_epoch: Epoch = NO_EPOCH,
        open_epochs: Iterable[Epoch] = (),
        last_batch: BatchId = NO_BATCH,
        positions: Mapping[OperatorId, Position] | None = None,
        found_cuts: Iterable[FoundCut] = (),
        limits: AlignmentLimits | None = None,
    ) -> None:
        """``last_epoch``: the highest epoch ever begun; those up to it that are not in ``open_epochs`` are closed.

        ``last_batch``, ``positions`` and ``found_cuts`` come from its own log.
        """
        self.operator = operator
        self._limits = limits or AlignmentLimits()
        self.last_batch = last_batch
        self._positions = {channel: (positions or {}).get(channel, START) for channel in inputs}
        self._gates = {channel: InputGate(position) for channel, position in self._positions.items()}
        self._admitted: dict[OperatorId, Position] = {}
        #: Epochs up to the floor are closed unless named in _open_below_floor.
        self._floor = last_epoch
        self._open_below_floor = set(open_epochs)
        self._closed: set[Epoch] = set()
        #: Disjoint: an epoch is aligning, cut, missed, or none of these.
        self._aligning: dict[Epoch, _Alignment] = {}
        self._missed: dict[Epoch, str] = {}
        self._found_cuts = tuple(found_cuts)
        self._cut: set[Epoch] = {cut.epoch for cut in self._found_cuts}
        self._last_cut = max(self._cut, default=NO_EPOCH)

    # ------------------------------------------------------------------ the one door

    def start(self) -> list[AgentAction]:
        """Finish what an earlier process began: snapshots of cuts that are in the log and still open."""
        return [
            TakeSnapshot(
                epoch=cut.epoch,
                batch=cut.batch,
                # A cut before the first batch has no entry with positions: the operator has read nothing yet.
                positions={channel: cut.positions.get(channel, START) for channel in self._gates},
                aligned=cut.aligned,
                alignment_ms=0,
            )
            for cut in self._found_cuts
            if self._is_open(cut.epoch)
        ]

    def handle(self, event: AgentEvent, *, now_ms: int) -> list[AgentAction]:
        """Handle one event and return the actions to perform."""
        actions: list[AgentAction] = []
        match event:
            case BarrierRequested():
                if self._gates and event.terms.alone is None:
                    raise InvariantViolation(
                        "a barrier was requested of an operator with inputs", operator=self.operator
                    )
                actions.extend(self._begin_alignment(event.epoch, event.terms, now_ms))
            case DataAppeared():
                self._gate(event.channel).data_appeared(event.seq, has_rows=event.has_rows)
            case BarrierAppeared():
                # A barrier of an operator that cuts alone concerns no other operator.
                uncut = event.terms.alone is None and self._is_uncut(event.epoch)
                if not self._gate(event.channel).barrier_appeared(event.seq, event.epoch, is_uncut=uncut):
                    actions.extend(self._miss(event.epoch, "an earlier process of the operator had given it up"))
                elif uncut:
                    actions.extend(self._begin_alignment(event.epoch, event.terms, now_ms))
            case BatchAppended():
                self._batch_appended(event)
            case EpochClosed():
                self._close(event.epoch)
            case AckRequested():
                actions.extend(self._answer(event.epoch))
            case TimePassed():
                pass
            case _:
                assert_never(event)
        actions.extend(self._give_up_what_lasts(now_ms))
        actions.extend(self._cut_what_is_ready(now_ms))
        actions.extend(self._moved_gates())
        return actions

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` would change something; None if never."""
        if not self._aligning:
            return None
        # Epochs are cut in order, so only the first one can become ready by time alone.
        first = self._aligning[min(self._aligning)]
        is_limited = first.limit_ms is not None and self._has_caught_up()
        deadlines = [first.since_ms + (first.limit_ms or 0)] if is_limited else []
        if self._limits.give_up_ms is not None:
            # Any epoch may be given up; the barrier of a later epoch may have appeared first.
            deadlines.append(min(one.since_ms for one in self._aligning.values()) + self._limits.give_up_ms)
        return min(deadlines, default=None)

    def state_of(self, epoch: Epoch) -> CutState:
        """The state of an epoch at this operator."""
        if not self._is_open(epoch):
            return CutState.CLOSED
        if epoch in self._missed:
            return CutState.MISSED
        if epoch in self._cut:
            return CutState.CUT
        return CutState.ALIGNING if epoch in self._aligning else CutState.UNSEEN

    def is_aligning(self) -> bool:
        """Whether a barrier waits for this operator to read up to it."""
        return bool(self._aligning)

    def unsettled(self) -> tuple[Epoch, ...]:
        """The epochs that have reached this operator and that it does not know to be closed."""
        return tuple(sorted({*self._aligning, *self._cut, *self._missed}))

    def aligning(self) -> Mapping[Epoch, tuple[OperatorId, ...]]:
        """Per epoch being aligned: the inputs whose barrier the operator has not reached. For the status."""
        return {
            epoch: tuple(channel for channel in self._gates if not self._stands_at_barrier(channel, epoch))
            for epoch in self._aligning
        }

    # ------------------------------------------------------------------ steps

    def _gate(self, channel: OperatorId) -> InputGate:
        try:
            return self._gates[channel]
        except KeyError:
            raise InvariantViolation(
                "entry of a channel that is not an input", operator=self.operator, channel=channel
            ) from None

    def _begin_alignment(self, epoch: Epoch, terms: BarrierTerms, now_ms: int) -> list[AgentAction]:
        if not self._is_uncut(epoch) or epoch in self._aligning:
            return []
        if epoch < self._last_cut:
            return self._miss(epoch, f"epoch {self._last_cut} was cut before it")
        if terms.alone is not None:
            limit_ms: int | None = 0
        elif terms.is_binding or self._limits.own_ms == AS_FLOW:
            limit_ms = terms.alignment_limit_ms
        else:
            limit_ms = self._limits.own_ms
        self._aligning[epoch] = _Alignment(since_ms=now_ms, limit_ms=limit_ms, terms=terms)
        return []

    def _miss(self, epoch: Epoch, reason: str) -> list[AgentAction]:
        """Never cut for this epoch: it cannot complete, so the gates need not hold any input for it."""
        self._missed[epoch] = reason
        self._aligning.pop(epoch, None)
        for gate in self._gates.values():
            gate.release(epoch)
        return [ReportFailure(epoch=epoch, reason=reason)]

    def _give_up_what_lasts(self, now_ms: int) -> list[AgentAction]:
        if self._limits.give_up_ms is None:
            return []
        lasting = [
            e for e, alignment in self._aligning.items() if now_ms - alignment.since_ms >= self._limits.give_up_ms
        ]
        reason = f"no alignment within {self._limits.give_up_ms} ms"
        return [action for epoch in lasting for action in self._miss(epoch, reason)]

    def _answer(self, epoch: Epoch) -> list[AgentAction]:
        if epoch in self._cut:
            return [ResendAck(epoch=epoch)]
        if epoch in self._missed:
            return [ReportFailure(epoch=epoch, reason=self._missed[epoch])]
        return []

    def check(self, event: BatchAppended) -> None:
        """Raise if this batch must not be appended: it is out of order or has read past the gate. Call it before."""
        if event.batch > self.last_batch + 1:
            raise InvariantViolation(f"batch {event.batch} comes after batch {self.last_batch}", operator=self.operator)
        for channel, position in event.positions.items():
            admit = self._gate(channel).admit()
            if position > admit and event.batch > self.last_batch:
                raise InvariantViolation(
                    f"batch {event.batch} read {channel} up to {position}, the gate stands at {admit}",
                    operator=self.operator,
                )

    def _batch_appended(self, event: BatchAppended) -> None:
        self.check(event)
        if event.batch <= self.last_batch:
            return  # Spark re-ran a batch whose entry is in the log already.
        self.last_batch = event.batch
        self._positions.update(event.positions)

    def _close(self, epoch: Epoch) -> None:
        self._closed.add(epoch)
        self._open_below_floor.discard(epoch)
        self._aligning.pop(epoch, None)
        self._missed.pop(epoch, None)
        self._cut.discard(epoch)
        for gate in self._gates.values():
            gate.release(epoch)
        if len(self._closed) > 2 * CLOSED_EPOCHS_REMEMBERED:
            self._floor = Epoch(max(self._closed) - CLOSED_EPOCHS_REMEMBERED)
            self._closed = {closed for closed in self._closed if closed > self._floor}

    def _cut_what_is_ready(self, now_ms: int) -> list[AgentAction]:
        actions: list[AgentAction] = []
        if not self._has_caught_up():
            return actions
        # In the order of epochs, so that the log has barriers in that order: the first to wait holds up the rest.
        for epoch in sorted(self._aligning):
            alignment = self._aligning[epoch]
            aligned = all(self._stands_at_barrier(channel, epoch) for channel in self._gates)
            if not aligned and not alignment.is_expired(now_ms):
                break
            del self._aligning[epoch]
            self._cut.add(epoch)
            self._last_cut = epoch
            for gate in self._gates.values():
                gate.release(epoch)
            positions = dict(self._positions)
            actions.append(
                AppendBarrier(
                    epoch=epoch,
                    batch=self.last_batch,
                    positions=positions,
                    aligned=aligned,
                    terms=alignment.terms,
                )
            )
            actions.append(
                TakeSnapshot(
                    epoch=epoch,
                    batch=self.last_batch,
                    positions=positions,
                    aligned=aligned,
                    alignment_ms=now_ms - alignment.since_ms,
                    start_delay_ms=max(alignment.since_ms - alignment.terms.started_ms, 0),
                )
            )
        return actions

    def _moved_gates(self) -> list[AgentAction]:
        moved: list[AgentAction] = []
        for channel, gate in self._gates.items():
            admit = gate.admit()
            if self._admitted.get(channel) != admit:
                self._admitted[channel] = admit
                moved.append(SetGate(channel=channel, admit=admit))
        return moved

    # ------------------------------------------------------------------ questions

    def _has_caught_up(self) -> bool:
        return all(gate.has_caught_up() for gate in self._gates.values())

    def _is_open(self, epoch: Epoch) -> bool:
        return epoch not in self._closed and (epoch > self._floor or epoch in self._open_below_floor)

    def _is_uncut(self, epoch: Epoch) -> bool:
        return self._is_open(epoch) and epoch not in self._cut and epoch not in self._missed

    def _stands_at_barrier(self, channel: OperatorId, epoch: Epoch) -> bool:
        at = self._gates[channel].barrier_position(epoch)
        return at is not None and self._positions[channel] >= at
