"""Content uploaded before the checkpoint that needs it, and protected from collection until then.

Before the upload, its name is written into a record in the remote tier, ``ahead/<generation>.json``, which every
collector reads before it lists the checkpoints. A name leaves the record only when its checkpoint is sealed, or when no
checkpoint needs it any more: content that a collector finds neither in the record nor in a checkpoint is garbage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cutline.base import records
from cutline.errors import MissingObject, NotDone
from cutline.model.ids import Generation
from cutline.model.remote import EarlyUploadRecord
from cutline.ports.objects import ObjectStore
from cutline.tiers.transfer import Transferred

FOLDER = "ahead"
_KIND = "ahead"


class EarlyUploads:
    """The early uploads of this process. Only this process writes the record: it has claimed the generation."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._generation = Generation(0)
        #: By name; each name was in the generation's record before its content was uploaded.
        self._there: dict[str, Transferred] = {}

    def find(self, name: str) -> Transferred | None:
        return self._there.get(name)

    def enter(self, generation: Generation) -> None:
        """Continue in a generation. Uploads of another one are not relied on: no process maintains its record now."""
        if generation != self._generation:
            self._there.clear()
            self._generation = generation

    def announce(self, names: Iterable[str], needed: Collection[str]) -> None:
        """Record what is about to be uploaded; names not ``needed`` any more leave the record. Raises StoreError."""
        # First: after a failure, both the old and the new record contain every upload that is relied on.
        self._there = {name: sent for name, sent in self._there.items() if name in needed}
        record = EarlyUploadRecord(names=sorted({*self._there, *names}))
        self._store.replace(_path_of(self._generation), records.encode(_KIND, record))

    def add(self, transferred: Iterable[Transferred]) -> None:
        """Note uploads that were announced before."""
        self._there.update((one.file.name, one) for one in transferred)

    def drop(self, names: Iterable[str]) -> None:
        """Stop relying on uploads that are sealed or were not found. The record keeps them until ``announce``."""
        for name in names:
            self._there.pop(name, None)

    def check(self, generation: Generation) -> None:
        """Raise NotDone, once, if early uploads are in the record of another generation than the sealing one.

        That record may be collected, and then the content that it names, which must be uploaded again.
        """
        if self._there and generation != self._generation:
            self._there.clear()
            raise NotDone("early uploads belong to an earlier generation and must be uploaded again")


def protected(store: ObjectStore, newest: Generation) -> set[str]:
    """The names in the record of the newest generation, which no collector may remove. Raises StoreError."""
    try:
        data = store.read(_path_of(newest), records.MOST_BYTES)
    except MissingObject:
        return set()
    return set(records.decode(_KIND, data, EarlyUploadRecord, path=_path_of(newest)).names)


def _path_of(generation: Generation) -> str:
    return f"{FOLDER}/{generation:06d}.json"
