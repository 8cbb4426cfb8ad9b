"""Reads a flow's remote tier: checkpoints, generations, sink progress. Its layout is that of the flow's folder."""

from __future__ import annotations

from cutline.base import records
from cutline.errors import MissingObject
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, Generation
from cutline.model.layout import Layout
from cutline.model.remote import SinkProgress
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.remote_claims import newest_generation

MANIFEST, GENERATION = "manifest", "generation"
_PROGRESS = "published"


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
        return records.decode(MANIFEST, self._store.read(path), Manifest, path=path)

    def load_generations(self) -> list[GenerationRecord]:
        """All stored generations, ascending."""
        names = sorted(info.path for info in self._store.walk("generations"))
        return [records.decode(GENERATION, self._store.read(name), GenerationRecord, path=name) for name in names]

    def newest_generation(self) -> Generation:
        """The newest generation that has begun or was claimed here; 0 if none."""
        return newest_generation(self._numbers_in("generations"), self._numbers_in("claims"))

    def _numbers_in(self, folder: str) -> list[Generation]:
        names = (info.path.rpartition("/")[2] for info in self._store.walk(folder))
        return [Generation(int(name.removesuffix(".json"))) for name in names]

    def progress_at(self, epoch: Epoch) -> SinkProgress:
        """The sinks' progress when this checkpoint was sealed, if it was recorded."""
        path = progress_name(epoch)
        try:
            return records.decode(_PROGRESS, self._store.read(path), SinkProgress, path=path)
        except MissingObject:
            return SinkProgress()

    def store_progress(self, epoch: Epoch, progress: SinkProgress) -> None:
        self._store.replace(progress_name(epoch), records.encode(_PROGRESS, progress))


def progress_name(epoch: Epoch) -> str:
    return f"published/{epoch:012d}.json"


def epoch_of_manifest(path: str) -> Epoch | None:
    """The epoch of a manifest's path; None for any other path."""
    _, number, *rest = path.split("/")
    return Epoch(int(number)) if rest == ["manifest.json"] else None
