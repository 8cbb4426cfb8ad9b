"""Whose history it is: generations compared by identity, never by number.

A flow's history is the chain of its generations. Each generation has an identity that no other host can produce. The
storage knows the generations that it has run or restored from; the remote tier stores them beside its checkpoints; and
the target of every sink records which starts took the sink over, and from which epoch each of them continued.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity, Takeover
from cutline.model.ids import Epoch

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


def with_takeover(claim: str, takeover: Takeover) -> str:
    """The history to store with the next claim, after ``claim``."""
    before = takeovers_in(claim) or ()
    return msgspec.json.encode([*before, takeover][-_TAKEOVERS_KEPT:]).decode()


def others_after(takeovers: Sequence[Takeover], known: Collection[Identity]) -> tuple[Takeover, ...]:
    """The takeovers after the last known one: starts from another storage."""
    return tuple(takeovers[_after_last_known([one.identity for one in takeovers], known) :])


def common_epoch(others: Sequence[Takeover]) -> Epoch | None:
    """Up to this epoch the sink shows what a storage knows, although ``others`` took it over; None: all of it."""
    return min((one.epoch for one in others), default=None)


def _after_last_known(identities: Sequence[Identity], known: Collection[Identity]) -> int:
    return max((index + 1 for index, one in enumerate(identities) if one in known), default=0)
