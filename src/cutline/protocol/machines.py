"""The protocol's state machines in one place, as documented tables; the machines themselves use the same tables."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cutline.protocol.checkpoint import pending_epoch as checkpoint
from cutline.protocol.cut import agent
from cutline.protocol.publish import publishing

S = TypeVar("S", bound=enum.Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Generic[S]):
    """The states of one machine, their meanings, and the legal moves between them."""

    name: str
    #: What the state describes, and from whose view.
    subject: str
    start: S
    #: Every state, in reading order, with the states that may follow it.
    moves: Mapping[S, frozenset[S]]
    #: What each state means.
    meanings: Mapping[S, str]

    def states(self) -> tuple[S, ...]:
        return tuple(type(self.start))

    def following(self, state: S) -> tuple[S, ...]:
        """The states that may follow, in the order of the states."""
        return tuple(other for other in self.states() if other in self.moves[state])

    def is_final(self, state: S) -> bool:
        return not self.moves[state]

    def all_moves(self) -> Iterator[tuple[S, S]]:
        for state in self.states():
            for other in self.following(state):
                yield state, other


EPOCH = Machine(
    name="Epoch",
    subject="One epoch, as the coordinator sees it.",
    start=checkpoint.EpochState.RECORDING,
    moves=checkpoint.MOVES,
    meanings={
        checkpoint.EpochState.RECORDING: "the start of the epoch is being stored; no barrier has been sent",
        checkpoint.EpochState.COLLECTING: "barriers move through the flow, operators acknowledge",
        checkpoint.EpochState.COMPLETING: "all operators have acknowledged; the manifest is being created",
        checkpoint.EpochState.COMPLETED: "the manifest exists: the checkpoint exists",
        checkpoint.EpochState.ABORTING: "the epoch is given up; the abort is being stored",
        checkpoint.EpochState.ABORTED: "its barriers have no effect, its snapshots are discarded",
    },
)

CUT = Machine(
    name="Cut",
    subject="One epoch, as one operator sees it.",
    start=agent.CutState.UNSEEN,
    moves=agent.MOVES,
    meanings={
        agent.CutState.UNSEEN: "no barrier has appeared here",
        agent.CutState.ALIGNING: "a barrier has appeared; the gate holds that input",
        agent.CutState.CUT: "the operator's own barrier is in its log; the snapshot is taken and acknowledged",
        agent.CutState.MISSED: "the operator has given the epoch up: it read on without a cut and never cuts for it",
        agent.CutState.CLOSED: "complete or aborted: its barriers hold no input",
    },
)

SINK = Machine(
    name="Sink",
    subject="One sink, as the coordinator sees it.",
    start=publishing.SinkState.IDLE,
    moves=publishing.MOVES,
    meanings={
        publishing.SinkState.IDLE: "every complete epoch is published",
        publishing.SinkState.COMMITTING: "the sink was told to publish the next epoch; its answer is awaited",
        publishing.SinkState.WAITING: "the sink failed or did not answer; the coordinator retries later",
    },
)

MACHINES: tuple[Machine[Any], ...] = (EPOCH, CUT, SINK)
