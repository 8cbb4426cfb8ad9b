"""The rules by which a flow comes back, as far as they need no disk: what is live, usable, open; who goes back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """A generation, and the epoch it went back to; None when it went on where the one before had stopped."""

    generation: Generation
    restored_epoch: Epoch | None
    #: It began from nothing: no earlier epoch belongs to its history.
    is_fresh: bool


def live_epochs(complete: Iterable[tuple[Epoch, Generation]], incarnations: Sequence[Incarnation]) -> list[Epoch]:
    """The epochs of the present history, ascending.

    An epoch that a later generation went back behind was given up: its number is never used again, nothing may be
    restored from it by itself, and what sinks published of it must be undone.
    """

    def is_live(epoch: Epoch, generation: Generation) -> bool:
        later = [one for one in incarnations if one.generation > generation]
        return not any(one.is_fresh or (one.restored_epoch is not None and epoch > one.restored_epoch) for one in later)

    return sorted(epoch for epoch, generation in complete if is_live(epoch, generation))


def is_resumable(begun_in: Generation, incarnations: Iterable[Incarnation]) -> bool:
    """Whether an epoch that was pending can still complete: no later generation went back behind it."""
    return not any(
        one.generation > begun_in and (one.is_fresh or one.restored_epoch is not None) for one in incarnations
    )


def is_of_history(
    barriers: Mapping[OperatorId, Position], then: Mapping[OperatorId, Lineage], now: Mapping[OperatorId, Lineage]
) -> bool:
    """Whether all barriers of an epoch stand in the logs as they are read now.

    What an old life wrote into its own generation after another one had forked the logs is no part of the flow, and
    neither is a checkpoint of it.
    """
    return all(now[name].shows(then[name].owner(barrier), barrier) for name, barrier in barriers.items() if name in now)


def lost_behind(
    live: Sequence[tuple[Epoch, Epoch]],
    *,
    unreadable: Collection[Epoch],
    published: Iterable[Epoch],
    pins: Collection[Epoch] = (),
) -> list[tuple[Epoch, Epoch]]:
    """Of (epoch, the one before it), ascending: those that cannot be used because the one before them is lost.

    An epoch publishes what was staged after the one before it, so that one must be known. A beginning that is gone was
    let go of, and needed by nobody; one that cannot be read, or is missing in between, takes the next along.
    """
    slowest = min(published, default=None)
    lost: list[tuple[Epoch, Epoch]] = []
    gone = set(unreadable)
    newest_usable = NO_EPOCH
    for epoch, before in live:
        is_known = newest_usable == before
        # Between a pinned epoch and the next one others were let go of, when every sink had published them.
        is_explained = newest_usable in pins or (slowest is not None and slowest >= before)
        is_missing = NO_EPOCH < newest_usable < before and not is_explained
        is_lost = before in gone or is_missing
        if slowest is not None and epoch > slowest and is_lost and not is_known:
            lost.append((epoch, before))
            gone.add(epoch)
        else:
            newest_usable = epoch
    return lost


def region_of(
    failed: Iterable[OperatorId], consumers: Mapping[OperatorId, Collection[OperatorId]]
) -> frozenset[OperatorId]:
    """What failed and everything downstream of it. What is upstream goes on: the channels have kept the data."""
    region: set[OperatorId] = set()
    todo = list(failed)
    while todo:
        operator = todo.pop()
        if operator not in region:
            region.add(operator)
            todo.extend(consumers.get(operator, ()))
    return frozenset(region)
