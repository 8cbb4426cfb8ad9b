"""Which complete epochs belong to the history that the flow is in now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cutline.ids import Epoch, Generation


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
