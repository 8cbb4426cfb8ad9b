"""Checkpoints of the local tier: manifests, operator records, tombstones, and the content they name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile, SubtaskRecord, Tombstone
from cutline.model.ids import Epoch, Generation, OperatorId, Subtask
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import HeldFiles, StoredRecord
from cutline.ports.query_dir import FileSet
from cutline.storage.blobs import BlobStore
from cutline.storage.held_files import FileHolder
from cutline.storage.reached import ReachedContent

#: Offsets, commits and similar files are new in every epoch and tiny: inside the record they need no file and no sync.
INLINE_BYTES = 8 << 10

_RECORD, _MANIFEST, _TOMBSTONE = "operator", "manifest", "aborted"


class LocalCheckpointStore:
    """Everything on one file system. See ``cutline.ports.checkpoint_store`` for what each method promises."""

    def __init__(self, layout: Layout, *, is_reader: bool = False) -> None:
        """``is_reader``: opening it changes nothing, so another process may be running the flow."""
        self._layout = layout
        self._blobs = BlobStore(layout, is_reader=is_reader)
        self._holder = FileHolder(layout)
        #: Content that each pending epoch references.
        self._referenced: dict[Epoch, list[str]] = {}
        #: No tombstone is written into a folder that is being deleted.
        self._folders = threading.Lock()
        #: Epochs whose manifests were seen: there may be hundreds, and only this store replaces or removes one.
        self._complete: set[Epoch] = set()
        self._complete_lock = threading.Lock()
        self._is_reader = is_reader
        self._reached = ReachedContent(self._content_of)
        if not is_reader:
            self._prepare_folders()

    def _prepare_folders(self) -> None:
        durable.make_dir(self._layout.checkpoints)
        self._holder.prepare_folder()
        for leftover in self._layout.checkpoints.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for epoch in self._stored_epochs():
            # A process that died may have left a manifest that is visible and not synced. Sinks publish because of it,
            # and earlier checkpoints are collected: a power cut must not take it afterwards.
            durable.fsync_dir(self._layout.checkpoint(epoch))

    # ------------------------------------------------------------------ taking a snapshot

    def hold(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> HeldFiles:
        return self._holder.hold(operator, epoch, spark_checkpoint_dir, files)

    def store_files(self, held: HeldFiles) -> tuple[list[SubtaskRecord], list[SnapshotFile]]:
        def keep(names: list[str]) -> tuple[list[SnapshotFile], int]:
            files, new = [], 0
            for name in names:
                file, new_bytes = self._blobs.store(held.paths[name], name)
                # Looked up each time: the epoch may have been discarded meanwhile; it is discarded again later.
                self._referenced.setdefault(held.epoch, []).append(file.sha256)
                files.append(file)
                new += new_bytes
            return files, new

        subtasks = []
        for subtask, names in sorted(held.files.subtasks.items()):
            begun = time.perf_counter()
            files, new = keep(names)
            subtasks.append(
                SubtaskRecord(
                    subtask=Subtask(subtask),
                    files=files,
                    size_bytes=sum(file.size_bytes for file in files),
                    new_bytes=new,
                    async_ms=round((time.perf_counter() - begun) * 1000, 3),
                )
            )
        small = [name for name in held.files.shared if held.paths[name].stat().st_size <= INLINE_BYTES]
        large, _ = keep([name for name in held.files.shared if name not in small])
        shared = sorted([*large, *(_inline(held.paths[name], name) for name in small)])
        self._holder.release(held)
        return subtasks, shared

    def store_record(self, record: OperatorRecord) -> StoredRecord:
        durable.make_dir(self._layout.checkpoint(record.epoch))
        path = self._layout.record(record.epoch, record.operator, record.generation)
        data = records.encode(_RECORD, record)
        if not durable.create(path, data):
            return _load_record(path)
        return StoredRecord(record, records.checksum(data))

    def find_record(self, epoch: Epoch, operator: OperatorId, generation: Generation) -> StoredRecord | None:
        path = self._layout.record(epoch, operator, generation)
        if not path.exists():
            return None
        stored = _load_record(path)
        content = [file.sha256 for file in stored.record.files() if file.content is None]
        self._blobs.add_references(content)
        self._referenced.setdefault(epoch, []).extend(content)
        return stored

    # ------------------------------------------------------------------ ending an epoch

    def store_manifest(self, manifest: Manifest) -> Manifest | Tombstone:
        path = self._layout.manifest(manifest.epoch)
        there: Manifest | Tombstone = manifest
        if not durable.create(path, records.encode(_MANIFEST, manifest)):
            there = _load_verdict(path)
            durable.fsync_dir(path.parent)  # its creator may have died, or not have come that far
        if isinstance(there, Manifest):
            self._drop_references(manifest.epoch)
        return there

    def store_tombstone(self, tombstone: Tombstone) -> Manifest | Tombstone:
        path = self._layout.manifest(tombstone.epoch)
        with self._folders:
            durable.make_dir(path.parent)
            if durable.create(path, records.encode(_TOMBSTONE, tombstone)):
                return tombstone
        durable.fsync_dir(path.parent)  # its creator may have died, or not have come that far
        try:
            return _load_verdict(path)
        except DamagedRecordError:
            return tombstone

    def discard(self, epoch: Epoch) -> None:
        if self._has_manifest(epoch):
            self._drop_references(epoch)
            return
        self._remove_records(epoch)
        self._holder.discard(epoch)
        self._drop_references(epoch)

    def _has_manifest(self, epoch: Epoch) -> bool:
        try:
            return records.kind_of(self._layout.manifest(epoch).read_bytes()) != _TOMBSTONE
        except FileNotFoundError:
            return False

    def _drop_references(self, epoch: Epoch) -> None:
        self._blobs.drop_references(self._referenced.pop(epoch, []))
        self._holder.remove_empty(epoch)

    # ------------------------------------------------------------------ reading

    def epochs(self) -> list[Epoch]:
        stored = self._stored_epochs()
        if self._is_reader:  # the process that runs the flow removes epochs at any time
            return sorted(epoch for epoch in stored if self._has_manifest(epoch))
        with self._complete_lock:
            self._complete.intersection_update(stored)
            self._complete.update(
                epoch for epoch in stored if epoch not in self._complete and self._has_manifest(epoch)
            )
            return sorted(self._complete)

    def _stored_epochs(self) -> list[Epoch]:
        """Epochs that have a folder."""
        if self._is_reader and not self._layout.checkpoints.exists():
            return []  # the flow has never run here
        names = os.listdir(self._layout.checkpoints)
        return [Epoch(int(name)) for name in names if name.isascii() and name.isdigit()]

    def load_manifest(self, epoch: Epoch) -> Manifest:
        path = self._layout.manifest(epoch)
        manifest = records.load(_MANIFEST, path, Manifest, flow=self._layout.flow)
        records.check_identity(_MANIFEST, manifest.epoch, epoch, path=path, flow=self._layout.flow)
        return manifest

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        cut = manifest.operators[operator]
        path = self._layout.record(manifest.epoch, operator, cut.generation)
        stored = _load_record(path)
        if stored.sha256 != cut.record_sha256:
            raise DamagedRecordError(
                "operator record is not the one the manifest names", path=path, epoch=manifest.epoch, operator=operator
            )
        found = (stored.record.epoch, stored.record.operator, stored.record.generation)
        records.check_identity(_RECORD, found, (manifest.epoch, operator, cut.generation), path=path)
        return stored.record

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in self._layout.checkpoint(epoch).glob("*.g*.json"))
            return frozenset(OperatorId(name.rsplit(".g", 1)[0]) for name in names)
        return frozenset()

    def file_damage(self, file: SnapshotFile, *, deep: bool) -> str | None:
        """What is wrong with one stored file; not ``deep``: checks only the size of a blob."""
        return self._blobs.damage(file, deep=deep)

    def damage(self, record: OperatorRecord) -> list[str]:
        found = (self._blobs.damage(file) for file in record.files())
        return [problem for problem in found if problem]

    def place(self, file: SnapshotFile, target: Path) -> None:
        """Put a stored file where Spark will read it."""
        self._blobs.place(file, target)

    # ------------------------------------------------------------------ collecting

    def collect(
        self, released: Collection[Epoch], open_from: Epoch, check_fence: Callable[[], None] = lambda: None
    ) -> Sequence[Epoch]:
        """Renames each epoch in one step: after a crash, an epoch is whole or gone; the next run removes the rest."""
        gone = []
        for old in sorted(set(released).intersection(self.epochs())):
            check_fence()
            self._remove_epoch(old)
            gone.append(old)
        for epoch in set(self._stored_epochs()).difference(self.epochs()):
            with self._folders:
                # The records of pending epochs are still being written.
                if epoch < open_from and not self._has_manifest(epoch):
                    self._remove_records(epoch)
        check_fence()
        self._blobs.collect(self._reached_now, check_fence)
        return gone

    def collect_unreferenced(
        self, open_from: Epoch, may_go: Callable[[str, Path], bool], check_fence: Callable[[], None] = lambda: None
    ) -> None:
        for epoch in sorted(epoch for epoch in self._stored_epochs() if epoch < open_from):
            check_fence()
            with self._folders:
                self._collect_records(epoch, may_go)
        check_fence()

        def reached() -> tuple[Container[str], Iterable[str]]:
            content, lost = self._reached_now()
            return _Either(content, frozenset().union(*self._reached_from(open_from))), lost

        self._blobs.collect(reached, check_fence, lambda path: may_go("blob", path), is_whole=True)

    def _collect_records(self, epoch: Epoch, may_go: Callable[[str, Path], bool]) -> None:
        """Collects records that no manifest names: of an aborted epoch, or of a generation that did not complete it."""
        folder, named = self._layout.checkpoint(epoch), set()
        if self._has_manifest(epoch):
            cuts = self.load_manifest(epoch).operators
            named = {self._layout.record(epoch, operator, cut.generation) for operator, cut in cuts.items()}
        for path in self._records(epoch):
            # Temporary files are collected with the rest of the flow's folder.
            if path not in named and not durable.is_temporary(path.name) and may_go("record", path):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # discarded meanwhile, or no longer empty
            if not any(folder.iterdir()) and may_go("record", folder):
                folder.rmdir()

    def _remove_epoch(self, epoch: Epoch) -> None:
        """Renames the folder first, so that no reader sees the records without their manifest."""
        path = self._layout.manifest(epoch)
        try:
            is_inherited = self.load_manifest(epoch).is_inherited
        except DamagedRecordError:
            is_inherited = False
        if is_inherited:
            # The process that began it may still run and try to store its manifest: the tombstone prevents that.
            tombstone = Tombstone(epoch=epoch, generation=Generation(0), reason="it was complete, and collected")
            with self._complete_lock:
                durable.replace(path, records.encode(_TOMBSTONE, tombstone))
                self._complete.discard(epoch)
            crashpoint("mid-collect")
            return
        doomed = durable.temporary_beside(path.parent)
        with self._folders:
            path.parent.rename(doomed)
        durable.fsync_dir(self._layout.checkpoints)
        crashpoint("mid-collect")
        shutil.rmtree(doomed, ignore_errors=True)

    def _remove_records(self, epoch: Epoch) -> None:
        """Removes all but a tombstone, which stays: it bars the epoch for a process that is wrongly believed dead."""
        verdict = self._layout.manifest(epoch)
        for path in self._records(epoch):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the tombstone, or a record that is being stored, keeps it
            verdict.parent.rmdir()

    def _records(self, epoch: Epoch) -> list[Path]:
        """All files in an epoch's folder except its manifest or tombstone."""
        verdict = self._layout.manifest(epoch)
        with contextlib.suppress(FileNotFoundError):
            return sorted(path for path in verdict.parent.iterdir() if path != verdict)
        return []

    def _reached_from(self, open_from: Epoch) -> list[set[str]]:
        """The blobs of epochs that may be in progress and whose records are written."""
        paths = [path for epoch in self._stored_epochs() if epoch >= open_from for path in self._records(epoch)]
        found = []
        for path in paths:
            # Gone meanwhile: aborted, or collected. Content that this process is writing is referenced.
            if not durable.is_temporary(path.name) and path.exists():
                found.append({file.sha256 for file in _load_record(path).record.files() if file.content is None})
        return found

    def _reached_now(self) -> tuple[Container[str], Iterable[str]]:
        """The blobs of every complete epoch, and those that have ceased to be."""
        lost = self._reached.update(self.epochs())
        return self._reached, lost

    def _content_of(self, epoch: Epoch) -> Iterator[str]:
        manifest = self.load_manifest(epoch)
        for operator in manifest.operators:
            yield from (file.sha256 for file in self.load_record(manifest, operator).files() if file.content is None)


@dataclass(frozen=True, slots=True)
class _Either:
    """What is in one of two collections."""

    one: Container[str]
    other: Container[str]

    def __contains__(self, digest: object) -> bool:
        return digest in self.one or digest in self.other


def _inline(held: Path, name: str) -> SnapshotFile:
    content = held.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return SnapshotFile(path=name, sha256=digest, size_bytes=len(content), content=content)


def _load_record(path: Path) -> StoredRecord:
    data = records.read(_RECORD, path)
    return StoredRecord(records.decode(_RECORD, data, OperatorRecord, path=path), records.checksum(data))


def _load_verdict(path: Path) -> Manifest | Tombstone:
    """How the epoch ended: its manifest, or the tombstone in its place."""
    data = path.read_bytes()
    if records.kind_of(data) == _TOMBSTONE:
        return records.decode(_TOMBSTONE, data, Tombstone, path=path)
    return records.decode(_MANIFEST, data, Manifest, path=path)
