"""One pending epoch: which operators have yet to acknowledge, and the epoch's state.

Pending and complete are different things: a ``PendingEpoch`` never becomes readable; only a stored manifest does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms, OperatorAck
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Subtask


class EpochState(enum.Enum):
    """The state of an epoch. The values are shown to users."""

    RECORDING = "recording"  # its start is being stored; no barrier has been sent
    COLLECTING = "collecting"  # barriers move through the flow, operators acknowledge
    COMPLETING = "completing"  # all have acknowledged; the manifest is being created
    COMPLETED = "completed"  # the manifest exists
    ABORTING = "aborting"  # given up; the abort is being stored
    ABORTED = "aborted"


#: Every legal move. A pair that is not here is a bug in the coordinator.
MOVES: Mapping[EpochState, frozenset[EpochState]] = {
    EpochState.RECORDING: frozenset({EpochState.COLLECTING, EpochState.ABORTING}),
    EpochState.COLLECTING: frozenset({EpochState.COMPLETING, EpochState.ABORTING}),
    # Aborted from here only when the store reports that the manifest was certainly not created.
    EpochState.COMPLETING: frozenset({EpochState.COMPLETED, EpochState.ABORTING}),
    # Complete after all when an earlier coordinator has stored the manifest.
    EpochState.ABORTING: frozenset({EpochState.ABORTED, EpochState.COMPLETED}),
    EpochState.COMPLETED: frozenset(),
    EpochState.ABORTED: frozenset(),
}


class AckOutcome(enum.Enum):
    """How an acknowledgement was counted."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"  # no such pending epoch, operator or subtask
    STALE = "stale"  # of another generation


@dataclass(slots=True, kw_only=True)
class PendingEpoch:
    """The tally: subtask → operator → flow."""

    epoch: Epoch
    #: Of each operator: messages of another generation do not count.
    generations: Mapping[OperatorId, Generation]
    terms: BarrierTerms
    #: When it began, by this coordinator's clock; ``terms`` may hold the time of an earlier coordinator's clock.
    started_ms: int
    #: An earlier coordinator began it.
    is_inherited: bool = False
    #: Per operator, the subtasks that have yet to acknowledge; without any left it is complete. Sets, not counts.
    awaiting: dict[OperatorId, set[Subtask]]
    #: The operators with subtasks left in ``awaiting``: completeness is known without a scan of all operators.
    incomplete: set[OperatorId] = field(init=False)
    #: The acknowledgements of each operator, one or several messages.
    parts: dict[OperatorId, list[OperatorAck]] = field(default_factory=dict)
    state: EpochState = EpochState.RECORDING
    requests: list[str] = field(default_factory=list)
    abort_reason: str = ""
    #: Aborted for a reason unrelated to checkpoints; it does not count towards the flow's health.
    is_excused: bool = False
    #: When the missing operators are asked next, and how often they were asked.
    ask_at_ms: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.incomplete = {operator for operator, subtasks in self.awaiting.items() if subtasks}

    def move(self, to: EpochState) -> None:
        """Move to the next state, if the table allows it."""
        if to not in MOVES[self.state]:
            raise InvariantViolation(f"epoch cannot go from {self.state.value} to {to.value}", epoch=self.epoch)
        self.state = to

    def acknowledge(self, ack: OperatorAck) -> AckOutcome:
        """Count an operator's acknowledgement."""
        if ack.operator not in self.awaiting or self.state is not EpochState.COLLECTING:
            return AckOutcome.UNKNOWN
        if ack.generation != self.generations[ack.operator]:
            return AckOutcome.STALE
        awaiting = self.awaiting[ack.operator]
        fresh = {subtask.subtask for subtask in ack.subtasks} & awaiting
        if not fresh:
            return AckOutcome.DUPLICATE
        known = self.parts.setdefault(ack.operator, [])
        if known and known[0].record_sha256 != ack.record_sha256:
            return AckOutcome.DUPLICATE  # of a snapshot that was taken again; the first one counts
        awaiting -= fresh
        if not awaiting:
            self.incomplete.discard(ack.operator)
        if len(fresh) < len(ack.subtasks):
            ack = replace(ack, subtasks=tuple(subtask for subtask in ack.subtasks if subtask.subtask in fresh))
        known.append(ack)
        return AckOutcome.ACCEPTED

    def merged_acks(self) -> dict[OperatorId, OperatorAck]:
        """One acknowledgement per operator, with all its subtasks."""
        return {
            operator: replace(parts[0], subtasks=tuple(subtask for part in parts for subtask in part.subtasks))
            for operator, parts in self.parts.items()
        }

    def cut_batches(self) -> dict[OperatorId, BatchId]:
        """Per operator: the batch after which it has cut."""
        return {operator: parts[0].cut.batch for operator, parts in self.parts.items()}

    def is_acknowledged_by_all(self) -> bool:
        """Whether the manifest may be created."""
        return not self.incomplete

    def missing(self) -> dict[OperatorId, list[Subtask]]:
        """The operators and subtasks that have not acknowledged."""
        return {operator: sorted(self.awaiting[operator]) for operator in self.awaiting if operator in self.incomplete}
