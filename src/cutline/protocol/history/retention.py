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


def flow_time_ms(newest: CompleteEpoch | None, now_ms: int, pause_ms: int | None) -> int:
    """The flow's own time: the clock, but of the time since the newest checkpoint at most ``pause_ms`` counts.

    Checkpoints age by it. While a flow is stopped nothing new takes the place of its history, and a clock that was set
    forward says nothing about the flow: neither may release checkpoints.
    """
    if newest is None:
        return now_ms
    passed_ms = max(now_ms - newest.completed_ms, 0)
    return newest.moment_ms + (passed_ms if pause_ms is None else min(passed_ms, pause_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The newest ``count`` stay, all younger than ``age_ms`` (None: age keeps none), and those on the ``ladder``.

    Only the newest ``count`` need the channels' logs: an older one is detached, that is, what it had in flight is
    stored with it. Ages are measured in the flow's own time.
    """

    count: int
    age_ms: int | None = None
    #: The youngest first.
    ladder: tuple[Rung, ...] = ()
    #: Whether checkpoints can be detached: not if an operator is restored alone, since it reads the logs up to now.
    detaches: bool = True
    #: A longer time without a checkpoint is a pause, see ``flow_time_ms``; None: there are no pauses.
    pause_ms: int | None = None

    def expendable(
        self, complete: Sequence[CompleteEpoch], *, published_everywhere: Epoch, pins: Collection[Epoch], now_ms: int
    ) -> tuple[Epoch, ...]:
        """The epochs to release, of ``complete`` in ascending order.

        The newest one that every sink has published always stays: the epoch after it publishes what was staged since,
        and only its record says since when.
        """
        on_ladder = self.on_ladder(complete, now_ms)
        flow_ms = self._flow_time_ms(complete, now_ms)
        older = {item.epoch for item in self._older(complete)}

        def is_kept(item: CompleteEpoch) -> bool:
            is_young = self.age_ms is not None and flow_ms - item.moment_ms < self.age_ms
            return item.epoch not in older or item.epoch in on_ladder or is_young

        return tuple(
            item.epoch
            for item in complete
            if item.epoch < published_everywhere
            and item.epoch not in pins
            and not (item.is_restorable and is_kept(item))
        )

    def detachable(self, complete: Sequence[CompleteEpoch], *, published_everywhere: Epoch) -> tuple[Epoch, ...]:
        """Of the epochs that stay, those that need no logs."""
        if not self.detaches:
            return ()
        return tuple(item.epoch for item in self._older(complete) if item.epoch < published_everywhere)

    def _older(self, complete: Sequence[CompleteEpoch]) -> Sequence[CompleteEpoch]:
        return complete[: max(len(complete) - self.count, 0)]

    def _flow_time_ms(self, complete: Sequence[CompleteEpoch], now_ms: int) -> int:
        return flow_time_ms(complete[-1] if complete else None, now_ms, self.pause_ms)

    def on_ladder(self, complete: Sequence[CompleteEpoch], now_ms: int) -> dict[Epoch, Rung]:
        """The epochs that stay for their age, each with its rung: the oldest of each slot.

        Slots begin at fixed times, so that a day begins with one of its hours.
        """
        flow_ms = self._flow_time_ms(complete, now_ms)
        staying: dict[tuple[int, int], tuple[Epoch, Rung]] = {}
        for item in complete:
            age_ms = flow_ms - item.moment_ms
            rung = next((rung for rung in self.ladder if age_ms < rung.until_ms), None)
            if rung is not None:
                slot = item.moment_ms // rung.every_ms if rung.every_ms else item.epoch
                staying.setdefault((rung.every_ms, slot), (item.epoch, rung))
        return dict(staying.values())

    def next_expiry_ms(self, complete: Sequence[CompleteEpoch], pins: Collection[Epoch], now_ms: int) -> int | None:
        """When the next epoch that stays only for its age becomes too old; None if none does before a checkpoint."""
        if not complete:
            return None
        flow_ms = self._flow_time_ms(complete, now_ms)
        newest = complete[-1]
        last_ms = None if self.pause_ms is None else newest.moment_ms + self.pause_ms
        limits = [rung.until_ms for rung in self.ladder] + ([self.age_ms] if self.age_ms is not None else [])
        older = [item for item in self._older(complete) if item.epoch not in pins]
        expiries = (item.moment_ms + limit for item in older for limit in limits)
        first_ms = min((one for one in expiries if one > flow_ms and (last_ms is None or one <= last_ms)), default=None)
        return None if first_ms is None else newest.completed_ms + first_ms - newest.moment_ms


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
