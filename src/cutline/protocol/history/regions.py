"""Which operators are restored together, and when restoring them again is futile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cutline.model.ids import BatchId, Epoch, OperatorId

#: How many times an operator may be restored alone and catch up with its log without getting any further.
FUTILE_RESTORES = 3


def region_of(
    failed: Iterable[OperatorId], consumers: Mapping[OperatorId, Collection[OperatorId]]
) -> frozenset[OperatorId]:
    """The failed operators and everything downstream. Upstream operators continue: the channels have kept the data."""
    region: set[OperatorId] = set()
    todo = list(failed)
    while todo:
        operator = todo.pop()
        if operator not in region:
            region.add(operator)
            todo.extend(consumers.get(operator, ()))
    return frozenset(region)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRestore:
    """When an operator was last restored because it had failed."""

    #: The restored epoch, and the furthest batch that the operator had reached before.
    epoch: Epoch
    reached: BatchId
    #: How many times it has been restored to that epoch since, without getting any further.
    futile: int = 0


def next_restore(
    last: LastRestore | None, *, epoch: Epoch, reached: BatchId, has_caught_up: bool
) -> LastRestore | None:
    """The record of the next restore; None if it is futile: the operator would fail for ever.

    ``has_caught_up``: it has reached the end of its own log since it was restored. That log does not shrink when the
    operator is restored alone, so catching up counts as progress, a few times.
    """
    if last is None or last.epoch != epoch or reached > last.reached:
        return LastRestore(epoch=epoch, reached=reached)
    futile = last.futile + 1
    if not has_caught_up or futile > FUTILE_RESTORES:
        return None
    return LastRestore(epoch=epoch, reached=reached, futile=futile)
