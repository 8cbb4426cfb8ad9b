"""Uploads checkpoints: first all that a checkpoint needs, then its manifest, once. It is stored whole or not at all.

Content is named by its hash or numbered, and never changes, so existing content is not uploaded again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.channels.segment_store import SegmentStore
from cutline.errors import DamagedRecordError, FencedError, MissingObject, OutcomeUnknown, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.model.layout import Layout
from cutline.model.remote import SinkProgress
from cutline.ports.objects import ObjectStore
from cutline.protocol.history.remote_claims import Seal, judge_seal
from cutline.tiers.checkpoint_files import content_paths, names_in, record_paths
from cutline.tiers.driver_transfer import PARALLELISM, Transfer
from cutline.tiers.early_upload import EarlyUploads
from cutline.tiers.fencing import RemoteFence, fenced
from cutline.tiers.remote_checkpoints import MANIFEST, RemoteCheckpoints
from cutline.tiers.transfer import UPLOAD, File, Transferred

#: Content uploaded longer ago is uploaded again: a collector with a short grace period may have removed it.
_YOUNG_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """The files that the upload of a checkpoint transferred."""

    epoch: Epoch
    #: Of this upload alone; existing content is not uploaded again.
    files: int
    size_bytes: int
    #: As transferred, possibly compressed.
    sent_bytes: int

    @classmethod
    def of(cls, epoch: Epoch, sent: Collection[Transferred]) -> Uploaded:
        return cls(
            epoch=epoch,
            files=len(sent),
            size_bytes=sum(one.file.size_bytes for one in sent),
            sent_bytes=sum(one.stored_bytes for one in sent),
        )


class Present:
    """Content that this process knows to be in the remote tier and safe from collection for now."""

    def __init__(self, store: ObjectStore, layout: Layout, checkpoints: RemoteCheckpoints) -> None:
        self._store = store
        self._layout = layout
        self._checkpoints = checkpoints
        #: The content of the newest remote checkpoint, which no collector removes; None: not read yet. Other objects
        #: may be removed at any time, so they are uploaded again.
        self._trusted: frozenset[str] | None = None
        #: Uploaded recently for a checkpoint that is not sealed: too young for any collector.
        self._recent: dict[str, float] = {}

    def missing(self, paths: Iterable[Path]) -> list[Path]:
        """The paths that are neither in the newest remote checkpoint nor were uploaded recently, each once."""
        if self._trusted is None:
            self._trusted = self._needed_by_newest()
        young = time.monotonic() - _YOUNG_SECONDS
        self._recent = {name: sent_s for name, sent_s in self._recent.items() if sent_s > young}
        return [path for path in dict.fromkeys(paths) if not self.has(path)]

    def has(self, path: Path) -> bool:
        name = self._layout.name(path)
        return name in self._recent or name in (self._trusted or ())

    def add(self, name: str, begun_s: float) -> None:
        self._recent[name] = begun_s

    def remove(self, name: str) -> None:
        self._recent.pop(name, None)

    def trust(self, names: frozenset[str] | None) -> None:
        """Set the content of the newest remote checkpoint; None: it must be read again."""
        self._trusted = names
        if names is not None:
            self._recent.clear()

    def _needed_by_newest(self) -> frozenset[str]:
        for epoch in reversed(self._checkpoints.epochs()):
            with contextlib.suppress(DamagedRecordError, MissingObject):
                return frozenset(names_in(self._store, self._checkpoints.load_manifest(epoch), self._layout))
        return frozenset()


class Uploader:
    """Uploads on behalf of a generation that this process has claimed. One upload at a time."""

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        *,
        checkpoints: RemoteCheckpoints,
        fence: RemoteFence,
        transfer: Transfer,
    ) -> None:
        self._store = store
        self._layout = layout
        self._checkpoints = checkpoints
        self._fence = fence
        self._transfer = transfer
        self.present = Present(store, layout, checkpoints)
        #: Uploaded before its checkpoint, possibly long ago, and protected from collection.
        self.early = EarlyUploads(store)
        #: Small objects that are never collected.
        self._created: set[str] = set()

    def send(self, manifest: Manifest, generation: Generation) -> Uploaded:
        """Upload everything that the checkpoint needs except its manifest, on behalf of ``generation``.

        Raises StoreError; the call is idempotent.
        """
        # First: the names of entries and segments contain the generation, and another host may use the same number.
        self._fence.check_claim(generation)
        missing = self.present.missing(content_paths(manifest, self._layout))
        # Early uploads are protected, and checked nevertheless: the checkpoint is about to rely on them.
        found = {path: self.early.find(self._layout.name(path)) for path in missing}
        doubtful = {path: there for path, there in found.items() if there is not None}
        lost = self._not_arrived(doubtful.values())
        self.early.drop(lost)
        sent: list[Transferred] = []
        self._send_content((path for path in missing if path not in doubtful or self._layout.name(path) in lost), sent)
        for path in [self._layout.identity, *self._generations(manifest.generation)]:
            self._create(path)
        for path in record_paths(manifest, self._layout).values():
            self._store.create(self._layout.name(path), path.read_bytes())
        return Uploaded.of(manifest.epoch, sent)

    def send_early(self, manifest: Manifest, operators: Collection[OperatorId], generation: Generation) -> Uploaded:
        """Upload some operators' content of a checkpoint that is not sealed yet, on behalf of ``generation``.

        The content is kept until a checkpoint that needs it is sealed, or until no checkpoint of a later early upload
        needs it. Raises StoreError, DamagedRecordError or FencedError.
        """
        self.early.enter(generation)
        needed = set(map(self._layout.name, content_paths(manifest, self._layout)))
        wanted = [
            path
            for path in self.present.missing(content_paths(manifest, self._layout, operators))
            if self.early.find(self._layout.name(path)) is None
        ]
        sent: list[Transferred] = []
        if wanted:
            self._fence.check_claim(generation)
            self.early.announce(map(self._layout.name, wanted), needed)
            crashpoint("remote-announced")
            try:
                self._send_content(wanted, sent)
            finally:
                self.early.add(sent)
        return Uploaded.of(manifest.epoch, sent)

    def seal(self, manifest: Manifest, generation: Generation, progress: SinkProgress | None = None) -> Manifest:
        """Create the manifest, on behalf of ``generation``, after ``send``: from then on the checkpoint exists.

        Returns the stored manifest: an earlier generation may have sealed it without recording that here.
        Raises StoreError; after OutcomeUnknown it may be stored, and ``seal`` must be repeated until that is known.
        """
        self._fence.check_claim(generation)
        self.early.check(generation)
        if progress is not None:
            self._checkpoints.store_progress(manifest.epoch, progress)
        path = self._layout.name(self._layout.manifest(manifest.epoch))
        is_created = self._store.create(path, records.encode(MANIFEST, manifest))
        # Once more: a host that claimed in between may have listed the checkpoints before this one was stored.
        try:
            self._fence.check_fence(generation)
        except StoreError as error:
            raise OutcomeUnknown(f"it is sealed, but whether another host runs the flow is unknown: {error}") from error
        if is_created:
            needed = frozenset(map(self._layout.name, content_paths(manifest, self._layout)))
            self.present.trust(needed)
            self.early.drop(needed)
            return manifest
        self.present.trust(None)  # another process stored it, or an attempt whose outcome was unknown: read it again
        there = self._checkpoints.load_manifest(manifest.epoch)
        if judge_seal(manifest, there, generation) is Seal.FENCED:
            raise FencedError(
                "another checkpoint of this number is in the remote tier",
                next_step="stop this process if another one runs the flow, or give this flow its own remote location",
                epoch=manifest.epoch,
                flow=manifest.flow,
            )
        return there

    def _create(self, path: Path) -> None:
        """Identity and generations: small, written once, never collected."""
        name = self._layout.name(path)
        if name in self._created:
            return
        data = path.read_bytes()
        if not self._store.create(name, data) and (there := self._store.read(name, records.MOST_BYTES)) != data:
            if not records.is_whole(there):
                self._store.replace(name, data)  # damaged there, and whole here
            elif path != self._layout.identity:
                raise fenced(Generation(int(path.stem)))
        self._created.add(name)

    def _generations(self, newest: Generation) -> list[Path]:
        paths = [path for path in self._layout.generations.iterdir() if not durable.is_temporary(path.name)]
        return sorted(path for path in paths if int(path.stem) <= newest)

    def _not_arrived(self, sent: Collection[Transferred]) -> set[str]:
        with ThreadPoolExecutor(PARALLELISM) as pool:
            found = pool.map(lambda one: UPLOAD.has_arrived(self._store, self._layout.root, one), sent)
            return {one.file.name for one, is_there in zip(sent, found, strict=True) if not is_there}

    def _send_content(self, paths: Iterable[Path], sent: list[Transferred]) -> None:
        """Appends every file that has arrived to ``sent``, also if the rest fails."""

        def note(transferred: Transferred, begun_s: float) -> None:
            sent.append(transferred)
            self.present.add(transferred.file.name, begun_s)

        with ThreadPoolExecutor(PARALLELISM) as pool:
            files = list(pool.map(self._file, paths))
        self._transfer.run(UPLOAD, files, note)

    def _file(self, path: Path) -> File:
        name = self._layout.name(path)
        try:
            self._bring_near(path)
            return File(name, path.stat().st_size)
        except OSError as error:
            raise DamagedRecordError(f"a file of the checkpoint cannot be read: {error}", path=name) from error

    def _bring_near(self, path: Path) -> None:
        """A segment may be only in the channels' object store; the local copy is removed together with its entry."""
        if path.parents[2] == self._layout.channels and not path.exists():
            SegmentStore.of(path.parents[1]).local_copy(path.name)
