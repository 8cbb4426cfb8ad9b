"""The protocol's state machines in one place, as tables for people; the machines themselves use the same tables."""

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
    """What can be in which state, and which moves there are."""

    name: str
    #: Whose state it is, and what for.
    subject: str
    start: S
    #: From every state there is, in the order in which people read them, to those that may follow.
    moves: Mapping[S, frozenset[S]]
    #: What each state means.
    meanings: Mapping[S, str]

    def states(self) -> tuple[S, ...]:
        return tuple(type(self.start))

    def following(self, state: S) -> tuple[S, ...]:
        """Where it may go from here, in the order of the states."""
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
        checkpoint.EpochState.RECORDING: "its start is being made durable; no barrier has left",
        checkpoint.EpochState.COLLECTING: "barriers are under way, acknowledgements come in",
        checkpoint.EpochState.COMPLETING: "all have acknowledged; the manifest is being created",
        checkpoint.EpochState.COMPLETED: "the manifest exists: the checkpoint exists",
        checkpoint.EpochState.ABORTING: "given up; that is being made durable",
        checkpoint.EpochState.ABORTED: "its barriers mean nothing, its snapshots are collected",
    },
)

CUT = Machine(
    name="Cut",
    subject="One epoch, as one operator sees it.",
    start=agent.CutState.UNSEEN,
    moves=agent.MOVES,
    meanings={
        agent.CutState.UNSEEN: "no barrier has appeared here",
        agent.CutState.ALIGNING: "a barrier has; the gate holds that input",
        agent.CutState.CUT: "the operator's own barrier is in its log; the snapshot is taken and acknowledged",
        agent.CutState.MISSED: "given up here: the operator read on without a cut, and never cuts for it",
        agent.CutState.CLOSED: "complete or aborted: its barriers hold nothing",
    },
)

SINK = Machine(
    name="Sink",
    subject="One sink, as the coordinator sees it.",
    start=publishing.SinkState.IDLE,
    moves=publishing.MOVES,
    meanings={
        publishing.SinkState.IDLE: "everything complete is published",
        publishing.SinkState.COMMITTING: "told to publish the next epoch; the answer is awaited",
        publishing.SinkState.WAITING: "it failed, or said nothing; it is told again later",
    },
)

MACHINES: tuple[Machine[Any], ...] = (EPOCH, CUT, SINK)
