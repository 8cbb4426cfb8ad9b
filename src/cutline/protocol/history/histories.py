"""Whose history it is: generations compared by identity, never by number.

A flow's history is the chain of its generations. Each generation has an identity that no other host can produce. The
storage knows the generations that it has run or restored from; the remote tier stores them beside its checkpoints; and
the target of every sink records which starts took the sink over, and from which epoch each of them continued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity, Takeover
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId

#: How many takeovers a sink's target keeps: a restart each. Older ones matter to no storage that is worth starting.
_TAKEOVERS_KEPT = 50
_MOST_CHARACTERS = 1 << 18

_decoder = msgspec.json.Decoder(list[Takeover])


def identity_of(record: GenerationRecord) -> Identity:
    """The generation's identity. Records of former versions have none: theirs is derived from their content."""
    if record.identity:
        return record.identity
    text = f"{record.generation}/{record.started_ms}/{record.path}/{record.reason}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def identities_of(generations: Iterable[GenerationRecord]) -> frozenset[Identity]:
    return frozenset(map(identity_of, generations))


def others_in(newest: Sequence[GenerationRecord], known: Collection[Identity]) -> tuple[GenerationRecord, ...]:
    """The generations after the last known one: what others did with the flow. ``newest``: ascending."""
    return tuple(newest[_after_last_known([identity_of(one) for one in newest], known) :])


# ---------------------------------------------------------------------- the claim of a sink


def takeovers_in(claim: str) -> tuple[Takeover, ...] | None:
    """The takeovers that a claim records, oldest first; None: it was made by a former version, or there is none.

    A claim is a token of the claiming instance, a space, and the takeovers as JSON.
    """
    history = history_in(claim)
    if not history or len(history) > _MOST_CHARACTERS:
        return None
    try:
        return tuple(_decoder.decode(history))
    except msgspec.MsgspecError:
        return None


def history_in(claim: str) -> str:
    """The part of a claim that its sink stores without interpreting it."""
    return claim.partition(" ")[2]


def with_takeover(claim: str, takeover: Takeover, own: Collection[Identity] = ()) -> str:
    """The history to store with the next claim, after ``claim``. ``own``: generations of the storage that takes over.

    A restart without a new checkpoint in between takes the place of the one before it, so that a flow that is restarted
    in a loop does not fill the list. If the list is full, the oldest entry stands for those that were dropped: nothing
    is shared beyond the lowest epoch that any of them continued from.
    """
    before = list(takeovers_in(claim) or ())
    if len(before) > 1 and before[-1].identity in own and before[-1].epoch == takeover.epoch:
        before.pop()
    taken = [*before, takeover]
    dropped, kept = taken[:-_TAKEOVERS_KEPT], taken[-_TAKEOVERS_KEPT:]
    lowest = min([one.epoch for one in dropped] + [kept[0].epoch])
    kept[0] = msgspec.structs.replace(kept[0], epoch=lowest)
    return msgspec.json.encode(kept).decode()


def others_after(takeovers: Sequence[Takeover], known: Collection[Identity]) -> tuple[Takeover, ...]:
    """The takeovers after the last known one: starts from another storage."""
    return tuple(takeovers[_after_last_known([one.identity for one in takeovers], known) :])


def continued_epoch(
    restored: Epoch | None, manifests: Sequence[Manifest], operator: OperatorId, *, is_per_operator: bool
) -> Epoch:
    """The epoch that a start shares with the storages before it: the restored one, or the newest of its history.

    ``manifests``: of the history that the flow has now, ascending. A checkpoint that an evolution made has a number
    that other storages do not know: the one that it was made from counts.
    """
    if restored is not None:
        return restored
    concerned = [one for one in manifests if operator in one.operators] if is_per_operator else list(manifests)
    if not concerned:
        return NO_EPOCH
    newest = concerned[-1]
    return newest.carried_from if newest.carried_from is not None else newest.epoch


def common_epoch(others: Sequence[Takeover]) -> Epoch | None:
    """Up to this epoch the sink shows what a storage knows, although ``others`` took it over; None: all of it."""
    return min((one.epoch for one in others), default=None)


def _after_last_known(identities: Sequence[Identity], known: Collection[Identity]) -> int:
    return max((index + 1 for index, one in enumerate(identities) if one in known), default=0)
