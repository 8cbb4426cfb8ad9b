"""Which complete checkpoints stay, and what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.publish.publishing import CompleteEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Until they are ``until_ms`` old, one checkpoint in each ``every_ms`` stays; 0: each one."""

    until_ms: int
    every_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The newest ``count`` stay, all younger than ``age_ms`` (None: age keeps none), and those on the ``ladder``.

    Only the newest ``count`` need the channels' logs: an older one is detached, that is, what it had in flight is
    stored with it.
    """

    count: int
    age_ms: int | None = None
    #: The youngest first.
    ladder: tuple[Rung, ...] = ()
    #: Whether checkpoints can be detached: not if an operator is restored alone, since it reads the logs up to now.
    detaches: bool = True

    def expendable(
        self, complete: Sequence[CompleteEpoch], *, published_everywhere: Epoch, pins: Collection[Epoch], now_ms: int
    ) -> tuple[Epoch, ...]:
        """The epochs to release, of ``complete`` in ascending order.

        The newest one that every sink has published always stays: the epoch after it publishes what was staged since,
        and only its record says since when.
        """
        on_ladder = self.on_ladder(((item.epoch, item.completed_ms) for item in complete), now_ms)
        return tuple(
            item.epoch
            for item in self._older(complete)
            if item.epoch < published_everywhere
            and item.epoch not in pins
            and item.epoch not in on_ladder
            and (self.age_ms is None or now_ms - item.completed_ms >= self.age_ms)
        )

    def detachable(self, complete: Sequence[CompleteEpoch], *, published_everywhere: Epoch) -> tuple[Epoch, ...]:
        """Of the epochs that stay, those that need no logs."""
        if not self.detaches:
            return ()
        return tuple(item.epoch for item in self._older(complete) if item.epoch < published_everywhere)

    def _older(self, complete: Sequence[CompleteEpoch]) -> Sequence[CompleteEpoch]:
        return complete[: max(len(complete) - self.count, 0)]

    def on_ladder(self, times: Iterable[tuple[Epoch, int]], now_ms: int) -> dict[Epoch, Rung]:
        """The epochs that stay for their age, each with its rung; ``times``: ascending epochs, when each was completed.

        Older than the ladder is long, they stay as they were until half of it has been climbed anew: after a long
        pause, or by a clock that was set forward, a flow would else lose its whole history at once.
        """
        present: list[tuple[Epoch, int]] = []
        past: list[tuple[Epoch, int]] = []
        for one in times:
            (past if self._rung_of(one[1], now_ms) is None else present).append(one)
        staying = self._in_slots(present, now_ms)
        if past and self.ladder and not any(now_ms - at >= self.ladder[-1].until_ms // 2 for _, at in present):
            staying |= self._in_slots(past, max(at for _, at in past))
        return staying

    def _in_slots(self, times: Iterable[tuple[Epoch, int]], now_ms: int) -> dict[Epoch, Rung]:
        """The oldest epoch of each slot. Slots begin at fixed times: a day begins with one of its hours."""
        staying: dict[tuple[int, int], tuple[Epoch, Rung]] = {}
        for epoch, completed_ms in times:
            rung = self._rung_of(completed_ms, now_ms)
            if rung is not None:
                slot = completed_ms // rung.every_ms if rung.every_ms else epoch
                staying.setdefault((rung.every_ms, slot), (epoch, rung))
        return dict(staying.values())

    def _rung_of(self, completed_ms: int, now_ms: int) -> Rung | None:
        return next((rung for rung in self.ladder if now_ms - completed_ms < rung.until_ms), None)

    def next_expiry_ms(self, complete: Sequence[CompleteEpoch], pins: Collection[Epoch], now_ms: int) -> int | None:
        """When the next epoch that stays only for its age becomes too old; None if there is none."""
        limits = [rung.until_ms for rung in self.ladder] + ([self.age_ms] if self.age_ms is not None else [])
        older = [item for item in self._older(complete) if item.epoch not in pins]
        expiries = (item.completed_ms + limit for item in older for limit in limits)
        return min((expiry for expiry in expiries if expiry > now_ms), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochNeeds:
    """What must stay for an epoch to be restorable."""

    #: The operators whose snapshots it holds.
    operators: Collection[OperatorId]
    #: Per channel that they write or read: the lowest entry that a restore would need.
    channels: Mapping[OperatorId, Position]

    @classmethod
    def of(cls, barriers: Mapping[OperatorId, Position], read: Iterable[Mapping[OperatorId, Position]]) -> EpochNeeds:
        """``barriers`` of the operators' own logs, and how far each of them had ``read`` its inputs."""
        channels = dict(barriers)
        for positions in read:
            for channel, position in positions.items():
                channels[channel] = min(position, channels.get(channel, position))
        return cls(operators=frozenset(barriers), channels=channels)


def truncation_points(
    retained: Iterable[EpochNeeds], touched_by: Mapping[OperatorId, Collection[OperatorId]]
) -> dict[OperatorId, Position]:
    """Per channel: the position below which no retained epoch needs an entry.

    ``touched_by``: the writer and readers of each channel. One without a snapshot would begin at the beginning.
    """
    needs = list(retained)
    covered = {operator for need in needs for operator in need.operators}
    return {
        channel: min(need.channels[channel] for need in needs if channel in need.channels)
        for channel, operators in touched_by.items()
        if covered.issuperset(operators)
    }


def unreachable(stored: Iterable[str], reached: Iterable[Collection[str]], claimed: Collection[str]) -> set[str]:
    """Content that no complete epoch reaches and no pending one references."""
    gone = set(stored)
    for content in reached:
        gone.difference_update(content)
    return gone - set(claimed)


def needs_of(manifest: Manifest) -> EpochNeeds:
    """What a restore to this epoch would read."""
    return EpochNeeds.of(
        {name: cut.barrier for name, cut in manifest.operators.items()},
        [cut.positions for cut in manifest.operators.values()],
    )
