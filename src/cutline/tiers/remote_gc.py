"""Collects the remote tier: released checkpoints, then the objects that no checkpoint needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cutline.errors import MissingObject
from cutline.model.ids import Epoch, Generation
from cutline.model.layout import Layout
from cutline.model.remote import SinkProgress
from cutline.ports.objects import ObjectInfo, ObjectStore
from cutline.protocol.history.remote_retention import ObjectKind, RemoteObject, progress_of_kept, unreferenced
from cutline.tiers import early_upload
from cutline.tiers.checkpoint_files import names_in
from cutline.tiers.early_upload import EarlyUploads
from cutline.tiers.remote_checkpoints import RemoteCheckpoints, epoch_of_manifest, progress_name
from cutline.tiers.transfer import PACKED_SUFFIX
from cutline.tiers.upload import Present


class RemoteCollector:
    """Collects one flow's place in an object store."""

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        *,
        checkpoints: RemoteCheckpoints,
        present: Present,
        early: EarlyUploads,
    ) -> None:
        """``present``, ``early``: what the uploads of this process rely on; they are told what is removed."""
        self._store = store
        self._layout = layout
        self._checkpoints = checkpoints
        self._present = present
        self._early = early
        #: What each kept manifest needs, and what is noted on it: there may be hundreds, and requests cost.
        self._needed: dict[ObjectInfo, frozenset[str]] = {}
        #: Each name once: checkpoints share most of them.
        self._names: dict[str, str] = {}
        self._noted: dict[ObjectInfo, SinkProgress] = {}

    def collect(
        self,
        keep: Collection[Epoch],
        *,
        progress: SinkProgress,
        now_ms: int,
        grace_ms: int,
        check_fence: Callable[[], None],
        is_dry_run: bool = False,
    ) -> list[ObjectInfo]:
        """Remove every other checkpoint, and old objects that none needs; returns the removed objects.

        ``progress``: of the sinks; noted on the checkpoints that stay before any other is removed.
        Manifests go first: after a kill, a checkpoint is whole or absent. Objects younger than ``grace_ms`` may belong
        to a checkpoint that another process is uploading. A dry run returns what would be removed.
        """
        # Read before the checkpoints are listed: a name that leaves the record meanwhile is then in one of them.
        newest = self._checkpoints.newest_generation()
        protected = early_upload.protected(self._store, newest)
        there = self.manifests()
        gone = [info for epoch, info in sorted(there.items()) if epoch not in keep]
        check_fence()
        if gone and not is_dry_run:
            self._note({epoch: info for epoch, info in there.items() if epoch in keep}, progress)
            self._store.delete(info.path for info in gone)
        reached = self.reached(
            {epoch: info for epoch, info in there.items() if epoch in keep} if is_dry_run else self.manifests()
        )
        if not reached:
            return gone
        infos = {info.path: info for info in self._store.walk()}
        objects = map(remote_object, infos.values())
        doomed = unreferenced(objects, needed=reached | protected, newest=newest, now_ms=now_ms, grace_ms=grace_ms)
        leftovers = self._store.leftovers(grace_ms)
        check_fence()
        if not is_dry_run:
            for one in doomed:  # first: a removal that fails may have removed any of them
                self._present.remove(one.name)
                self._early.drop([one.name])
            self._store.delete(one.path for one in doomed)
            self._store.collect_leftovers(grace_ms)
        return [*gone, *(infos[one.path] for one in doomed), *leftovers]

    def manifests(self) -> dict[Epoch, ObjectInfo]:
        """The checkpoints that are there."""
        walk = self._store.walk("checkpoints")
        return {epoch: info for info in walk if (epoch := epoch_of_manifest(info.path)) is not None}

    def _note(self, kept: Mapping[Epoch, ObjectInfo], progress: SinkProgress) -> None:
        """A new host learns from these checkpoints alone that those that are about to go were published."""
        current = set(kept.values())
        self._noted = {info: noted for info, noted in self._noted.items() if info in current}
        for epoch, info in sorted(kept.items()):
            noted = self._noted.get(info) or self._checkpoints.progress_at(epoch)
            merged = progress_of_kept(epoch, noted, progress)
            if merged != noted:
                self._checkpoints.store_progress(epoch, merged)
            self._noted[info] = merged

    def reached(self, kept: Mapping[Epoch, ObjectInfo]) -> set[str]:
        """The objects that these checkpoints need; skips checkpoints that another collector removes meanwhile."""
        reached: set[str] = set()
        before, self._needed = self._needed, {}
        for epoch, info in kept.items():
            reached.add(progress_name(epoch))
            needed = before.get(info) or self._needed_by(epoch)
            if needed is not None:
                self._needed[info] = needed
                reached.update(needed)
        self._names = {name: name for needed in self._needed.values() for name in needed}
        return reached

    def _needed_by(self, epoch: Epoch) -> frozenset[str] | None:
        try:
            names = names_in(self._store, self._checkpoints.load_manifest(epoch), self._layout)
            return frozenset(self._names.setdefault(name, name) for name in names)
        except MissingObject:
            if self._store.find(self._layout.name(self._layout.manifest(epoch))) is not None:
                raise
            return None


def remote_object(info: ObjectInfo) -> RemoteObject:
    """Classifies an object by its path."""
    folder, _, rest = info.path.partition("/")
    kind = ObjectKind.PERMANENT
    generation: Generation | None = None
    if folder == "checkpoints":
        kind = ObjectKind.MANIFEST if info.path.endswith("/manifest.json") else ObjectKind.NEEDED_BY_NAME
    elif folder in ("blobs", "channels", "published"):
        kind = ObjectKind.NEEDED_BY_NAME
    elif folder == early_upload.FOLDER and rest.removesuffix(".json").isdigit():
        kind, generation = ObjectKind.EARLY_UPLOADS, Generation(int(rest.removesuffix(".json")))
    return RemoteObject(
        path=info.path,
        name=info.path.removesuffix(PACKED_SUFFIX),
        kind=kind,
        modified_ms=info.modified_ms,
        generation=generation,
    )
