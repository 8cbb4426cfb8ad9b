"""Which entries of which log are released: decided here, performed by the operator that writes the log.

Two rules keep every restore possible. An operator that has not reported its needs holds everything that it writes or
reads: it may be about to be restored. And a restore waits until the releases decided before it are performed, so that
no deletion comes late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from cutline.model.ids import START, Generation, OperatorId, Position
from cutline.protocol.history.retention import EpochNeeds, truncation_points
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.protocol.messages.wire import CaughtUp, EntriesReleased, OperatorStarted


def joint_release(requests: Sequence[ReleaseEpochs]) -> ReleaseEpochs:
    """One request instead of several, in the order of the decisions: the newest knows what stays."""
    drop = sorted({epoch for request in requests for epoch in request.drop})
    detach = sorted({epoch for request in requests for epoch in request.detach}.difference(drop))
    return replace(requests[-1], drop=tuple(drop), detach=tuple(detach))


class EntryReleases:
    """What operators need of the logs beyond the retained checkpoints, and which releases are under way."""

    def __init__(self, touched_by: Mapping[OperatorId, Collection[OperatorId]]) -> None:
        """``touched_by``: the writer and readers of each channel."""
        self._touched_by = touched_by
        #: What the checkpoints left after the last collection need; later ones need less, never more.
        self._retained: tuple[EpochNeeds, ...] = ()
        #: The running operators, with what they need to catch up with their own logs.
        self._needs: dict[OperatorId, EpochNeeds] = {}
        #: The operators that are about to be restored.
        self._lost: set[OperatorId] = set()
        self._generations: dict[OperatorId, Generation] = {}
        #: Per channel: told to its writer, not confirmed.
        self._under_way: dict[OperatorId, Position] = {}
        #: Per channel: confirmed by the running writer.
        self._released: dict[OperatorId, Position] = {}

    def started(self, event: OperatorStarted) -> None:
        """An operator has started, in a new generation or in its former one."""
        if event.generation < self._generations.get(event.operator, event.generation):
            return
        self._generations[event.operator] = event.generation
        self._lost.discard(event.operator)
        # Without operators: it says what must stay, not that an operator could begin from there.
        self._needs[event.operator] = EpochNeeds(operators=(), channels=dict(event.needs))
        # Releases told to its predecessor ended with it.
        self._under_way.pop(event.operator, None)
        self._released.pop(event.operator, None)

    def caught_up(self, event: CaughtUp) -> None:
        if event.operator in self._needs and event.generation == self._generations[event.operator]:
            self._needs[event.operator] = EpochNeeds(operators=(), channels={})

    def lost(self, operators: Iterable[OperatorId]) -> None:
        """These operators are about to be restored, to an epoch that is not known yet."""
        for operator in operators:
            self._needs.pop(operator, None)
            self._lost.add(operator)

    def restored(self, operators: Iterable[OperatorId], generation: Generation) -> None:
        """These operators were restored in this generation and have yet to report it; older generations don't count."""
        for operator in operators:
            self._generations[operator] = max(generation, self._generations.get(operator, generation))

    def collected(self, retained: Iterable[EpochNeeds]) -> None:
        """Released checkpoints are collected; ``retained``: what the remaining ones need."""
        self._retained = tuple(retained)

    def decide(self) -> dict[OperatorId, Position]:
        """Per channel: the position below which its writer is to release entries now."""
        points = truncation_points([*self._retained, *self._needs.values()], self._touched_by)
        told = {
            channel: below
            for channel, below in points.items()
            if self._needs.keys() >= set(self._touched_by[channel]) and below > self._known(channel)
        }
        self._under_way.update(told)
        return told

    def _known(self, channel: OperatorId) -> Position:
        return max(self._under_way.get(channel, START), self._released.get(channel, START))

    def released(self, event: EntriesReleased) -> None:
        if event.generation != self._generations.get(event.operator):
            return
        self._released[event.operator] = max(event.below, self._released.get(event.operator, START))
        if event.below >= self._under_way.get(event.operator, START):
            self._under_way.pop(event.operator, None)

    def is_settled(self) -> bool:
        """Whether no release is under way in a log that an operator about to be restored writes or reads."""
        return not any(self._lost & set(self._touched_by[channel]) for channel in self._under_way)
