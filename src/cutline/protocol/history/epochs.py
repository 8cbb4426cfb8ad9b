"""The rules of recovery that need no disk: which epochs are live, resumable and usable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStart:
    """A generation, and the epoch that it restored; None when it continued where the previous one stopped."""

    generation: Generation
    restored_epoch: Epoch | None
    #: It began from nothing: no earlier epoch belongs to its history.
    is_fresh: bool


def live_epochs(
    complete: Iterable[tuple[Epoch, Generation]], generation_starts: Sequence[GenerationStart]
) -> list[Epoch]:
    """The epochs of the present history, ascending.

    An epoch is given up when a later generation restores an earlier one: its number is never used again, no start
    restores it automatically, and sinks rewind what they published of it.
    """

    def is_live(epoch: Epoch, generation: Generation) -> bool:
        later = [one for one in generation_starts if one.generation > generation]
        return not any(one.is_fresh or (one.restored_epoch is not None and epoch > one.restored_epoch) for one in later)

    return sorted(epoch for epoch, generation in complete if is_live(epoch, generation))


def is_resumable(begun_in: Generation, generation_starts: Iterable[GenerationStart]) -> bool:
    """Whether a pending epoch can still complete: no later generation restored an earlier epoch."""
    return not any(
        one.generation > begun_in and (one.is_fresh or one.restored_epoch is not None) for one in generation_starts
    )


def is_of_history(
    barriers: Mapping[OperatorId, Position], then: Mapping[OperatorId, Lineage], now: Mapping[OperatorId, Lineage]
) -> bool:
    """Whether the logs, as they are read now, hold all barriers of an epoch.

    What a process wrote into an older generation after a newer one forked the logs does not belong to the flow, and
    neither does a checkpoint of it.
    """
    return all(now[name].shows(then[name].owner(barrier), barrier) for name, barrier in barriers.items() if name in now)


def lost_behind(
    live: Sequence[tuple[Epoch, Epoch]],
    *,
    unreadable: Collection[Epoch],
    published: Iterable[Epoch],
    pins: Collection[Epoch] = (),
) -> list[tuple[Epoch, Epoch]]:
    """Of (epoch, previous epoch) pairs, ascending: the epochs that cannot be used because the previous one is lost.

    An epoch publishes what was staged after the previous one, so that one must be known, unless it was released.
    Epochs missing at the beginning were released; so were those missing in between that every sink has published.
    ``published``: how far each sink that has a part in these epochs has published. An unreadable epoch, or one missing
    above that, makes the next unusable.
    """
    slowest = min(published, default=None)
    lost: list[tuple[Epoch, Epoch]] = []
    gone = set(unreadable)
    newest_usable = NO_EPOCH
    for epoch, before in live:
        is_known = newest_usable == before
        # Epochs between a pinned one and the next were released when every sink had published them.
        is_explained = newest_usable in pins or (slowest is not None and slowest >= before)
        is_missing = NO_EPOCH < newest_usable < before and not is_explained
        is_lost = before in gone or is_missing
        if slowest is not None and epoch > slowest and is_lost and not is_known:
            lost.append((epoch, before))
            gone.add(epoch)
        else:
            newest_usable = epoch
    return lost
