"""Which host may write to the remote tier. Decides only: callers read and create the claims.

A generation is claimed by creating an object of its number that holds the claiming process's token. Of two processes
that claim one number, one loses. A process that finds a newer generation than its own has been replaced and stops.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import Generation
from cutline.protocol.history.histories import others_in

#: More generations than the regions of a host begin between two uploads, each of which claims them all.
_LOST_WITH_A_HOST = 100


def newest_generation(begun: Iterable[Generation], claimed: Iterable[Generation]) -> Generation:
    """The newest generation that has begun or was claimed in the remote tier; 0 if none."""
    return max([*begun, *claimed], default=Generation(0))


def generation_to_take(*known: Generation, are_records_lost: bool = False) -> Generation:
    """The lowest number that a starting process may ask for, given the newest ones known here and there.

    ``are_records_lost``: this host has no records of the flow. The host before it may have begun generations for its
    regions that nothing else knows, and until it is fenced it may publish in them.
    """
    newest = max(known, default=Generation(0))
    return Generation(newest + (_LOST_WITH_A_HOST if are_records_lost and newest else 1))


def is_won(token: bytes, *, is_created: bool, found: bytes | None) -> bool:
    """Whether a claim is this process's own: just created, or found with its token (its answer was lost before)."""
    return is_created or found == token


def claims_needed(begun: Generation | None, generation: Generation) -> list[Generation]:
    """The generations that a process must own to write in ``generation``.

    ``begun``: the first one that this process ran; every later one is its own, or it was replaced. A generation that a
    region began while the remote tier was unavailable may meanwhile belong to another host.
    """
    first = min(begun if begun is not None else generation, generation)
    return [Generation(number) for number in range(first, generation + 1)]


def is_replaced(generation: Generation, newest: Generation) -> bool:
    """Whether a process that writes in ``generation`` has been replaced by another host."""
    return newest > generation


def has_diverged(stored: Iterable[GenerationRecord], known: Collection[Identity], begun: Generation) -> bool:
    """Whether another host went on with the flow before a process that began in generation ``begun``.

    ``stored``: the newest generations in the remote tier, ascending; ``known``: those of the process's own history.
    """
    return bool(others_in([one for one in stored if one.generation < begun], known))


class Seal(enum.Enum):
    """The outcome of an attempt to create a manifest in the remote tier."""

    #: This checkpoint is there, sealed now or by an earlier attempt whose answer was lost.
    SEALED = "sealed"
    #: An earlier generation has sealed another checkpoint with this number: this one can never be sealed.
    TAKEN = "taken"
    #: Another flow or a newer generation has sealed this number.
    FENCED = "fenced"


def judge_seal(wanted: Manifest, there: Manifest, generation: Generation) -> Seal:
    """``there``: the manifest that the remote tier has under this number."""
    if there.flow != wanted.flow or there.generation > generation:
        return Seal.FENCED
    return Seal.SEALED if there == wanted else Seal.TAKEN
