"""Reads a flow's remote tier: checkpoints, generations, sink progress. Its layout is that of the flow's folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from cutline.base import records
from cutline.errors import DamagedRecordError, MissingObject, NotDone
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, Generation
from cutline.model.layout import Layout
from cutline.model.remote import SinkProgress
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.remote_claims import newest_generation

MANIFEST, GENERATION = "manifest", "generation"
_PROGRESS = "published"
#: Numbers as in ``cutline.model.layout``; more digits than these do not fit into 62 bits.
_NUMBERED = re.compile(r"(\d{6,18})\.json", re.ASCII)
_MANIFEST_NAME = re.compile(r"checkpoints/(\d{12,18})/manifest\.json", re.ASCII)
_RECORD_NAME = re.compile(
    r"generations/\d{6,18}\.json|checkpoints/\d{12,18}/(manifest|[A-Za-z][A-Za-z0-9_-]{0,62}\.g\d{6,18})\.json",
    re.ASCII,
)

#: Generations that are read to find one that this host knows; with more in between, the story is told without it.
_MOST_READ = 50

T = TypeVar("T")


class RemoteCheckpoints:
    """Reads one flow's place in an object store. Raises StoreError or DamagedRecordError."""

    def __init__(self, store: ObjectStore, layout: Layout) -> None:
        self._store = store
        self._layout = layout

    def epochs(self) -> list[Epoch]:
        """Epochs whose manifest is there, ascending."""
        found = (epoch_of_manifest(info.path) for info in self._store.walk("checkpoints"))
        return sorted(epoch for epoch in found if epoch is not None)

    def load_manifest(self, epoch: Epoch) -> Manifest:
        path = self._layout.name(self._layout.manifest(epoch))
        manifest = self._read(MANIFEST, path, Manifest)
        records.check_identity(MANIFEST, manifest.epoch, epoch, path=path, flow=self._layout.flow)
        return manifest

    def load_generations(self) -> list[GenerationRecord]:
        """All stored generations, ascending."""
        return [self._load_generation(name) for name in sorted(self._generation_names())]

    def newest_generations(self, is_enough: Callable[[GenerationRecord], bool]) -> list[GenerationRecord]:
        """The newest stored generations, back to the first that is enough, ascending; at most a limited number."""
        found: list[GenerationRecord] = []
        for name in sorted(self._generation_names(), reverse=True):
            found.insert(0, self._load_or_local(name))
            if is_enough(found[0]) or len(found) == _MOST_READ:
                break
        return found

    def newest_epochs(self, is_enough: Callable[[Manifest], bool]) -> list[tuple[Epoch, Generation]]:
        """The newest readable checkpoints, back to the first that is enough, ascending, with their generations.

        One made by an evolution counts once its generation is here.
        """
        found: list[tuple[Epoch, Generation]] = []
        begun: set[Generation] | None = None
        for epoch in reversed(self.epochs()):
            try:
                manifest = self.load_manifest(epoch)
            except (DamagedRecordError, MissingObject):
                continue
            if manifest.carried_from is not None:
                begun = set(self._numbers_in("generations")) if begun is None else begun
                if manifest.generation not in begun:
                    continue
            found.insert(0, (epoch, manifest.generation))
            if is_enough(manifest):
                break
        return found

    def _load_or_local(self, name: str) -> GenerationRecord:
        """A damaged record does no harm if this host has the same one. Raises StoreError if it has not."""
        try:
            return self._load_generation(name)
        except DamagedRecordError as error:
            local = self._layout.root / name
            if not local.exists():
                raise NotDone(
                    f"a generation record in the remote tier cannot be read: {error.what}",
                    next_step="restore the object from a backup, or delete it if its host is gone for good",
                    store=self._store.url,
                    path=name,
                ) from error
            return records.load(GENERATION, local, GenerationRecord, flow=self._layout.flow)

    def _generation_names(self) -> list[str]:
        return [info.path for info in self._store.walk("generations") if is_record(info.path)]

    def _load_generation(self, path: str) -> GenerationRecord:
        record = self._read(GENERATION, path, GenerationRecord)
        expected = self._layout.name(self._layout.generation(record.generation))
        records.check_identity(GENERATION, expected, path, path=path, flow=self._layout.flow)
        return record

    def _read(self, kind: str, path: str, type_: type[T]) -> T:
        """Objects of a bucket are not trusted: neither their size nor their content."""
        data = self._store.read(path, records.MOST_BYTES)
        return records.decode(kind, data, type_, path=path, flow=self._layout.flow)

    def newest_generation(self) -> Generation:
        """The newest generation that has begun or was claimed here; 0 if none."""
        return newest_generation(self._numbers_in("generations"), self._numbers_in("claims"))

    def _numbers_in(self, folder: str) -> list[Generation]:
        """Of the objects in a folder that are named by a generation; others belong to other programs, or to no one."""
        names = (info.path.removeprefix(f"{folder}/") for info in self._store.walk(folder))
        return [Generation(int(found[1])) for name in names if (found := _NUMBERED.fullmatch(name))]

    def progress_at(self, epoch: Epoch) -> SinkProgress:
        """The sinks' progress when this checkpoint was sealed, if it was recorded."""
        path = progress_name(epoch)
        try:
            return self._read(_PROGRESS, path, SinkProgress)
        except MissingObject:
            return SinkProgress()

    def store_progress(self, epoch: Epoch, progress: SinkProgress) -> None:
        self._store.replace(progress_name(epoch), records.encode(_PROGRESS, progress))


def progress_name(epoch: Epoch) -> str:
    return f"published/{epoch:012d}.json"


def epoch_of_manifest(path: str) -> Epoch | None:
    """The epoch of a manifest's path; None for any other path."""
    found = _MANIFEST_NAME.fullmatch(path)
    return Epoch(int(found[1])) if found else None


def is_record(path: str) -> bool:
    """Whether an object has a name that Cutline gives to the record of a checkpoint or a generation."""
    return _RECORD_NAME.fullmatch(path) is not None
