"""Content that is in the remote tier before the checkpoint that needs it, and that no collector may take meanwhile.

Before anything is sent, its name is written into a record there, ``ahead/<generation>.json``, which every collector
reads before it lists the checkpoints. A name leaves the record only when its checkpoint is sealed, or nobody needs it
any more: so whoever does not find it in the record finds it in a checkpoint, or it is garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from cutline.base import records
from cutline.errors import MissingObject, NotDone
from cutline.model.ids import Generation
from cutline.ports.objects import ObjectStore
from cutline.tiers.transfer import Carried

FOLDER = "ahead"
_KIND = "ahead"


class AheadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one generation has sent, or is about to send, for checkpoints to come."""

    names: list[str]


class SentAhead:
    """What this process has sent ahead. Only it writes the record: it has claimed the generation."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._generation = Generation(0)
        #: By name; each stands in the record of the generation, and was sent after it did.
        self._there: dict[str, Carried] = {}

    def find(self, name: str) -> Carried | None:
        return self._there.get(name)

    def enter(self, generation: Generation) -> None:
        """Go on in a generation; what was sent in another is not relied on any more, as its record is nobody's now."""
        if generation != self._generation:
            self._there.clear()
            self._generation = generation

    def announce(self, names: Iterable[str], needed: Collection[str]) -> None:
        """Write down what is about to be sent; what is not ``needed`` any more is let go of. Raises StoreError."""
        # First: whichever of the two records stands there after a failure, it holds all that is relied on.
        self._there = {name: carried for name, carried in self._there.items() if name in needed}
        record = AheadRecord(names=sorted({*self._there, *names}))
        self._store.replace(_path_of(self._generation), records.encode(_KIND, record))

    def add(self, carried: Iterable[Carried]) -> None:
        """Sent, after it was announced."""
        self._there.update((one.file.name, one) for one in carried)

    def drop(self, names: Iterable[str]) -> None:
        """Not to be relied on any more: sealed, or not found there. The record keeps them for a while yet."""
        for name in names:
            self._there.pop(name, None)

    def check(self, generation: Generation) -> None:
        """Raise NotDone, once, if what was sent ahead stands in the record of another generation than the sealing one.

        That record may be collected, and then what stands in it: it must be sent again.
        """
        if self._there and generation != self._generation:
            self._there.clear()
            raise NotDone("what was sent ahead is of an earlier generation and must be sent again")


def held(store: ObjectStore, newest: Generation) -> set[str]:
    """The names that no collector may take: those in the record of the newest generation. Raises StoreError."""
    try:
        data = store.read(_path_of(newest))
    except MissingObject:
        return set()
    return set(records.decode(_KIND, data, AheadRecord, path=_path_of(newest)).names)


def is_stale(path: str, newest: Generation) -> bool:
    """Whether it is the record of a generation that has ended: whoever had written it sends nothing any more."""
    return path.startswith(f"{FOLDER}/") and path < _path_of(newest)


def _path_of(generation: Generation) -> str:
    return f"{FOLDER}/{generation:06d}.json"
