"""One epoch on its way: who has yet to acknowledge, and what state it is in.

Pending and complete are different things: a ``PendingEpoch`` never becomes readable; only a stored manifest does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cutline.errors import InvariantViolation
from cutline.ids import Epoch, Generation, OperatorId, Subtask
from cutline.protocol.messages import OperatorAck


class EpochState(enum.Enum):
    """Where an epoch stands. The values are what people read."""

    RECORDING = "recording"  # being made durable; no barrier has left
    COLLECTING = "collecting"  # barriers are under way, acknowledgements come in
    COMPLETING = "completing"  # all are there; the manifest is being created
    COMPLETED = "completed"  # the manifest exists
    ABORTING = "aborting"  # given up; being made durable
    ABORTED = "aborted"


#: Every legal move. A pair that is not here is a bug in the coordinator.
MOVES: Mapping[EpochState, frozenset[EpochState]] = {
    EpochState.RECORDING: frozenset({EpochState.COLLECTING, EpochState.ABORTING}),
    EpochState.COLLECTING: frozenset({EpochState.COMPLETING, EpochState.ABORTING}),
    # Aborted from here only when the store says that the manifest was certainly not created.
    EpochState.COMPLETING: frozenset({EpochState.COMPLETED, EpochState.ABORTING}),
    EpochState.ABORTING: frozenset({EpochState.ABORTED}),
    EpochState.COMPLETED: frozenset(),
    EpochState.ABORTED: frozenset(),
}


class AckOutcome(enum.Enum):
    """What became of an acknowledgement."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"  # no such pending epoch, operator or subtask
    STALE = "stale"  # of another generation


@dataclass(slots=True, kw_only=True)
class PendingEpoch:
    """The tally: subtask → operator → flow."""

    epoch: Epoch
    generation: Generation
    started_ms: int
    alignment_limit_ms: int | None
    #: Still to acknowledge, per operator. An operator without any left is complete. Tracks who, not how many.
    awaiting: dict[OperatorId, set[Subtask]]
    acks: dict[OperatorId, OperatorAck] = field(default_factory=dict)
    state: EpochState = EpochState.RECORDING
    requests: list[str] = field(default_factory=list)
    abort_reason: str = ""

    def move(self, to: EpochState) -> None:
        """Go to the next state, if the table allows it."""
        if to not in MOVES[self.state]:
            raise InvariantViolation(f"epoch cannot go from {self.state.value} to {to.value}", epoch=self.epoch)
        self.state = to

    def acknowledge(self, ack: OperatorAck) -> AckOutcome:
        """Count an operator's acknowledgement."""
        if ack.generation != self.generation:
            return AckOutcome.STALE
        if ack.operator not in self.awaiting or self.state is not EpochState.COLLECTING:
            return AckOutcome.UNKNOWN
        awaiting = self.awaiting[ack.operator]
        fresh = {subtask.subtask for subtask in ack.subtasks} & awaiting
        if not fresh:
            return AckOutcome.DUPLICATE
        awaiting -= fresh
        known = self.acks.get(ack.operator)
        if known is not None:  # in parts: what was said before still counts
            added = tuple(subtask for subtask in ack.subtasks if subtask.subtask in fresh)
            ack = replace(ack, subtasks=(*known.subtasks, *added))
        self.acks[ack.operator] = ack
        return AckOutcome.ACCEPTED

    def is_acknowledged_by_all(self) -> bool:
        """Whether the manifest may be created."""
        return not any(self.awaiting.values())

    def missing(self) -> dict[OperatorId, list[Subtask]]:
        """Who has not acknowledged, for people."""
        return {operator: sorted(subtasks) for operator, subtasks in self.awaiting.items() if subtasks}
