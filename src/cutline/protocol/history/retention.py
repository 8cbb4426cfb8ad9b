"""Which complete checkpoints stay, and what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.publish.publishing import CompleteEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The newest ``count`` stay, and all younger than ``age_ms`` (None: age keeps none)."""

    count: int
    age_ms: int | None = None

    def expendable(
        self, complete: Sequence[CompleteEpoch], *, published_everywhere: Epoch, pins: Collection[Epoch], now_ms: int
    ) -> tuple[Epoch, ...]:
        """The epochs to release, of ``complete`` in ascending order.

        The newest one that every sink has published always stays: the epoch after it publishes what was staged since,
        and only its record says since when.
        """
        surplus = complete[: max(len(complete) - self.count, 0)]
        return tuple(
            item.epoch
            for item in surplus
            if item.epoch < published_everywhere
            and item.epoch not in pins
            and (self.age_ms is None or now_ms - item.completed_ms >= self.age_ms)
        )

    def next_expiry_ms(self, complete: Sequence[CompleteEpoch], pins: Collection[Epoch], now_ms: int) -> int | None:
        """When the next epoch that stays only for its age becomes too old; None if there is none."""
        if self.age_ms is None:
            return None
        surplus = complete[: max(len(complete) - self.count, 0)]
        ages = [item.completed_ms + self.age_ms for item in surplus if item.epoch not in pins]
        return min((expiry for expiry in ages if expiry > now_ms), default=None)


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
