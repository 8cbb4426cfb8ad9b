"""Which operators are restored together, and when restoring them again is futile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cutline.model.ids import BatchId, OperatorId

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
    """Where an operator stood when it was last restored because it had failed."""

    #: The last batch in the checkpoint that it was restored to.
    batch: BatchId
    #: The furthest batch that it had finished before.
    reached: BatchId
    #: How many times it has been restored since, without finishing a batch that it had not finished before.
    futile: int = 0


def next_restore(
    last: LastRestore | None, *, batch: BatchId, reached: BatchId, has_caught_up: bool
) -> LastRestore | None:
    """The record of the next restore; None if it is futile: the operator would fail for ever.

    Progress is a finished batch: one beyond all before, or one that a later checkpoint holds (a restored operator may
    read the same rows in fewer batches). A newer epoch alone is no progress: epochs go on while an operator fails.
    ``has_caught_up``: it has reached the end of its own log since it was restored. That log does not shrink when the
    operator is restored alone, so catching up counts as progress, a few times.
    """
    if last is None or batch > last.batch or reached > last.reached:
        return LastRestore(batch=batch, reached=reached if last is None else max(reached, last.reached))
    futile = last.futile + 1
    if not has_caught_up or futile > FUTILE_RESTORES:
        return None
    return LastRestore(batch=batch, reached=last.reached, futile=futile)
