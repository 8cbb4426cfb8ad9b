"""The operator's agent: decides when its operator cuts, and how far it may read until then.

Sources cut as soon as they are asked, unaligned operators as soon as the first barrier shows on any input: at the
last *appended* batch, whatever batch is being computed. Only alignment waits, and only as long as the barrier allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from cutline.errors import InvariantViolation
from cutline.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, OperatorId, Position
from cutline.protocol.gate import InputGate
from cutline.protocol.messages import (
    AgentAction,
    AgentEvent,
    AppendBarrier,
    BarrierAppeared,
    BarrierRequested,
    BatchAppended,
    DataAppeared,
    EpochClosed,
    SetGate,
    TakeSnapshot,
    TimePassed,
)

#: Epochs further behind the newest closed one than this are taken as closed without being remembered one by one.
CLOSED_EPOCHS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCut:
    """A cut that the agent finds in its own log when it starts: the logs are the truth, memory is not needed."""

    epoch: Epoch
    batch: BatchId
    positions: Mapping[OperatorId, Position]
    aligned: bool


@dataclass(slots=True, kw_only=True)
class _Alignment:
    """An epoch whose first barrier has appeared and for which the operator has not cut."""

    since_ms: int
    limit_ms: int | None

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
    ) -> None:
        """``last_epoch``: highest epoch ever given out; those up to it that are not in ``open_epochs`` are over."""
        self.operator = operator
        self.last_batch = last_batch
        self._positions = {channel: (positions or {}).get(channel, START) for channel in inputs}
        self._gates = {channel: InputGate(position) for channel, position in self._positions.items()}
        self._admitted: dict[OperatorId, Position] = {}
        #: Epochs up to the floor are over unless named in _open_below_floor.
        self._floor = last_epoch
        self._open_below_floor = set(open_epochs)
        self._closed: set[Epoch] = set()
        #: Disjoint from _cut.
        self._aligning: dict[Epoch, _Alignment] = {}
        self._found_cuts = tuple(found_cuts)
        self._cut: set[Epoch] = {cut.epoch for cut in self._found_cuts}
        self._last_cut = max(self._cut, default=NO_EPOCH)

    # ------------------------------------------------------------------ the one door

    def start(self) -> list[AgentAction]:
        """Finish what an earlier incarnation began: snapshots of cuts that are in the log and still open."""
        return [
            TakeSnapshot(
                epoch=cut.epoch,
                batch=cut.batch,
                # A cut before the first batch has no entry that names positions; it has read nothing of any input.
                positions={channel: cut.positions.get(channel, START) for channel in self._gates},
                aligned=cut.aligned,
                alignment_ms=0,
            )
            for cut in self._found_cuts
            if self._is_open(cut.epoch)
        ]

    def handle(self, event: AgentEvent, *, now_ms: int) -> list[AgentAction]:
        """Take in one event and say what is to be done about it."""
        actions: list[AgentAction] = []
        match event:
            case BarrierRequested():
                if self._gates:
                    raise InvariantViolation(
                        "a barrier was requested of an operator with inputs", operator=self.operator
                    )
                self._begin_alignment(event.epoch, event.alignment_limit_ms, now_ms)
            case DataAppeared():
                self._gate(event.channel).data_appeared(event.seq, has_rows=event.has_rows)
            case BarrierAppeared():
                uncut = self._is_uncut(event.epoch)
                self._gate(event.channel).barrier_appeared(event.seq, event.epoch, is_uncut=uncut)
                if uncut:
                    self._begin_alignment(event.epoch, event.alignment_limit_ms, now_ms)
            case BatchAppended():
                self._batch_appended(event)
            case EpochClosed():
                self._close(event.epoch)
            case TimePassed():
                pass
            case _:
                assert_never(event)
        actions.extend(self._cut_what_is_ready(now_ms))
        actions.extend(self._moved_gates())
        return actions

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` would change something; None if never."""
        if not self._aligning:
            return None
        # Epochs are cut in order, so only the first one can become ready by time alone.
        first = self._aligning[min(self._aligning)]
        return None if first.limit_ms is None else first.since_ms + first.limit_ms

    def aligning(self) -> Mapping[Epoch, tuple[OperatorId, ...]]:
        """Per epoch being aligned: the inputs whose barrier has not been reached. For people who wait."""
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
                "entry of a channel that is no input", operator=self.operator, channel=channel
            ) from None

    def _begin_alignment(self, epoch: Epoch, limit_ms: int | None, now_ms: int) -> None:
        # An epoch below the last cut can no longer be cut in order; it is left to its timeout.
        if self._is_uncut(epoch) and epoch > self._last_cut and epoch not in self._aligning:
            self._aligning[epoch] = _Alignment(since_ms=now_ms, limit_ms=limit_ms)

    def check(self, event: BatchAppended) -> None:
        """Raise if this batch must not be appended: out of order, or read past the gate. To be asked before it is."""
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
        self._cut.discard(epoch)
        for gate in self._gates.values():
            gate.release(epoch)
        if len(self._closed) > 2 * CLOSED_EPOCHS_REMEMBERED:
            self._floor = Epoch(max(self._closed) - CLOSED_EPOCHS_REMEMBERED)
            self._closed = {closed for closed in self._closed if closed > self._floor}

    def _cut_what_is_ready(self, now_ms: int) -> list[AgentAction]:
        actions: list[AgentAction] = []
        # In the order of epochs, so that barriers stand in the log in that order: the first to wait holds the rest.
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
                    alignment_limit_ms=alignment.limit_ms,
                    aligned=aligned,
                )
            )
            actions.append(
                TakeSnapshot(
                    epoch=epoch,
                    batch=self.last_batch,
                    positions=positions,
                    aligned=aligned,
                    alignment_ms=now_ms - alignment.since_ms,
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

    def _is_open(self, epoch: Epoch) -> bool:
        return epoch not in self._closed and (epoch > self._floor or epoch in self._open_below_floor)

    def _is_uncut(self, epoch: Epoch) -> bool:
        return self._is_open(epoch) and epoch not in self._cut

    def _stands_at_barrier(self, channel: OperatorId, epoch: Epoch) -> bool:
        at = self._gates[channel].barrier_position(epoch)
        return at is not None and self._positions[channel] >= at
