"""The snapshot store of the local tier."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.connectors.replay_guard import check_sources, recorded_positions
from cutline.errors import CutlineError, DamagedRecordError, LostInputError
from cutline.model.ids import NO_BATCH, BatchId, Epoch, Generation, OperatorId, Subtask
from cutline.model.layout import Layout
from cutline.ports import (
    FileSet,
    GenerationRecord,
    LiveDirs,
    LostInput,
    Manifest,
    OperatorRecord,
    Pin,
    PlannedSource,
    SnapshotFile,
    StoredRecord,
    SubtaskRecord,
    Tombstone,
)
from cutline.ports.inspection import FileProblem
from cutline.spark_dir import planned_batch as replay
from cutline.spark_dir import skip_input as skipping
from cutline.spark_dir import start_position as beginning
from cutline.spark_dir.file_set import closure, last_batches, verify_files
from cutline.spark_dir.offsets import load_offsets
from cutline.spark_dir.relocate import relocate
from cutline.storage.blobs import BlobStore

#: Offsets, commits and the like are new in every epoch and tiny: in the record they cost no file and no sync each.
INLINE_BYTES = 8 << 10

_RECORD, _MANIFEST, _TOMBSTONE = "operator", "manifest", "aborted"


def _lost(operator: OperatorId, problem: FileProblem) -> LostInput:
    return LostInput(operator=operator, what=problem.path, why=problem.problem, parts=problem.parts)


def _inline(held: Path, name: str) -> SnapshotFile:
    content = held.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return SnapshotFile(path=name, sha256=digest, size_bytes=len(content), content=content)


class LocalSnapshotStore:
    """Everything on one file system. See ``cutline.ports.SnapshotStore`` for what each method promises."""

    def __init__(
        self,
        layout: Layout,
        *,
        is_reader: bool = False,
        live_dirs: LiveDirs | None = None,
        sources: Mapping[OperatorId, Sequence[PlannedSource]] | None = None,
    ) -> None:
        """For the process that runs the flow; everybody else takes ``reading``.

        ``live_dirs``: where Spark's directories are, if what is in the flow's folder are mirrors of them.
        ``sources``: what operators read now, if that is known.
        """
        self._layout = layout
        self._sources = sources or {}
        self._live_dirs = live_dirs
        self._blobs = BlobStore(layout, is_reader=is_reader)
        #: Content claimed per pending epoch.
        self._claimed: dict[Epoch, list[str]] = {}
        #: A tombstone is not put into a folder that is just being deleted.
        self._folders = threading.Lock()
        if not is_reader:
            self._prepare_folders()

    @classmethod
    def reading(cls, layout: Layout) -> LocalSnapshotStore:
        """A store to look at only: opening it changes nothing, so another process may be running the flow."""
        return cls(layout, is_reader=True)

    def _prepare_folders(self) -> None:
        for folder in (self._layout.checkpoints, self._layout.generations, self._layout.pins):
            durable.make_dir(folder)
        # Pins belong to the process that made them; what an earlier one left holds nothing any more.
        for leftover in [*self._layout.pins.iterdir(), *self._layout.checkpoints.glob(".tmp-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    # ------------------------------------------------------------------ a live spark_checkpoint_dir

    def is_committed(self, spark_checkpoint_dir: Path, batch: BatchId) -> bool:
        if batch == NO_BATCH or (spark_checkpoint_dir / "commits" / str(batch)).exists():
            return True
        if self._live_dirs is None or not self._live_dirs.has(spark_checkpoint_dir, f"commits/{batch}"):
            return False
        self._live_dirs.fetch(spark_checkpoint_dir)
        return (spark_checkpoint_dir / "commits" / str(batch)).exists()

    def files_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
        return closure(spark_checkpoint_dir, batch)

    def live_damage(
        self, spark_checkpoint_dir: Path, last_appended: BatchId, complete: BatchId, *, may_be_behind: bool = False
    ) -> list[str]:
        if self._live_dirs is not None:
            try:
                self._live_dirs.fetch(spark_checkpoint_dir)
            except DamagedRecordError as error:
                return [str(error)]
        planned, committed = last_batches(spark_checkpoint_dir)
        if may_be_behind and planned == NO_BATCH < last_appended:
            return ["there is nothing of Spark's in its folder"]
        if committed < complete and not may_be_behind:
            # It would run again batches whose input may have been let go of.
            return [f"Spark has committed batch {committed}, but batch {complete} is part of a checkpoint"]
        if committed > last_appended or (last_appended > committed + 1 and not may_be_behind):
            return [f"Spark has committed batch {committed}, the log ends with batch {last_appended}"]
        if not committed <= planned <= committed + 1 or (last_appended > planned and not may_be_behind):
            return [f"Spark has planned batch {planned} and committed {committed}, the log ends with {last_appended}"]
        try:
            if planned > committed:
                load_offsets(str(spark_checkpoint_dir), planned)
            if committed == NO_BATCH:
                return []
            files = closure(spark_checkpoint_dir, committed)
        except (CutlineError, OSError) as error:
            return [str(error)]
        names = [*files.shared, *(name for subtask in files.subtasks.values() for name in subtask)]
        return verify_files(spark_checkpoint_dir, names, full=False)

    # ------------------------------------------------------------------ running batches again

    def last_committed(self, spark_checkpoint_dir: Path) -> BatchId:
        return last_batches(spark_checkpoint_dir)[1]

    def plan_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
        return replay.plan_of(spark_checkpoint_dir, batch)

    def put_plan(self, spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
        replay.put_plan(spark_checkpoint_dir, batch, plan)

    def commit_plan(self, spark_checkpoint_dir: Path, batch: BatchId) -> None:
        replay.commit_plan(spark_checkpoint_dir, batch)

    def begin_anew(self, spark_checkpoint_dir: Path) -> None:
        replay.begin_anew(spark_checkpoint_dir)

    # ------------------------------------------------------------------ taking

    def pin(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> Pin:
        folder = self._layout.pin(epoch, operator)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        held: dict[str, Path] = {}
        names = [*files.shared, *(name for subtask in files.subtasks.values() for name in subtask)]
        for number, name in enumerate(names):
            target = folder / str(number)
            try:
                os.link(spark_checkpoint_dir / name, target)
            except FileNotFoundError as error:
                raise DamagedRecordError("a file of the snapshot is gone", path=name, operator=operator) from error
            except OSError:
                shutil.copyfile(spark_checkpoint_dir / name, target)
            held[name] = target
        return Pin(operator=operator, epoch=epoch, files=files, held=held)

    def store_files(self, pin: Pin) -> tuple[list[SubtaskRecord], list[SnapshotFile]]:
        def keep(names: list[str]) -> tuple[list[SnapshotFile], int]:
            files, new = [], 0
            for name in names:
                file, new_bytes = self._blobs.store(pin.held[name], name)
                # Looked up each time: the epoch may have been discarded meanwhile, and is discarded again later.
                self._claimed.setdefault(pin.epoch, []).append(file.sha256)
                files.append(file)
                new += new_bytes
            return files, new

        subtasks = []
        for subtask, names in sorted(pin.files.subtasks.items()):
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
        small = [name for name in pin.files.shared if pin.held[name].stat().st_size <= INLINE_BYTES]
        large, _ = keep([name for name in pin.files.shared if name not in small])
        shared = sorted([*large, *(_inline(pin.held[name], name) for name in small)])
        shutil.rmtree(self._layout.pin(pin.epoch, pin.operator), ignore_errors=True)
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
        self._blobs.claim(content)
        self._claimed.setdefault(epoch, []).extend(content)
        return stored

    def store_manifest(self, manifest: Manifest) -> Manifest | Tombstone:
        path = self._layout.manifest(manifest.epoch)
        there: Manifest | Tombstone = manifest
        if not durable.create(path, records.encode(_MANIFEST, manifest)):
            there = _load_verdict(path)
        if isinstance(there, Manifest):
            self._release_claims(manifest.epoch)
        return there

    def store_tombstone(self, tombstone: Tombstone) -> Manifest | Tombstone:
        path = self._layout.manifest(tombstone.epoch)
        with self._folders:
            durable.make_dir(path.parent)
            if durable.create(path, records.encode(_TOMBSTONE, tombstone)):
                return tombstone
        try:
            return _load_verdict(path)
        except DamagedRecordError:
            return tombstone

    def discard(self, epoch: Epoch) -> None:
        if self._has_manifest(epoch):
            self._release_claims(epoch)
            return
        self._remove_records(epoch)
        shutil.rmtree(self._layout.pins / f"{epoch:012d}", ignore_errors=True)
        self._release_claims(epoch)

    def _has_manifest(self, epoch: Epoch) -> bool:
        try:
            return records.kind_of(self._layout.manifest(epoch).read_bytes()) != _TOMBSTONE
        except FileNotFoundError:
            return False

    def _release_claims(self, epoch: Epoch) -> None:
        self._blobs.unclaim(self._claimed.pop(epoch, []))
        with contextlib.suppress(OSError):
            (self._layout.pins / f"{epoch:012d}").rmdir()

    # ------------------------------------------------------------------ reading

    def epochs(self) -> list[Epoch]:
        return sorted(epoch for epoch in self._stored_epochs() if self._has_manifest(epoch))

    def _stored_epochs(self) -> list[Epoch]:
        """Of which there is anything at all."""
        return [Epoch(int(folder.name)) for folder in self._layout.checkpoints.iterdir() if folder.name.isdigit()]

    def load_manifest(self, epoch: Epoch) -> Manifest:
        return records.load(_MANIFEST, self._layout.manifest(epoch), Manifest)

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        cut = manifest.operators[operator]
        path = self._layout.record(manifest.epoch, operator, cut.generation)
        stored = _load_record(path)
        if stored.sha256 != cut.record_sha256:
            raise DamagedRecordError(
                "operator record is not the one the manifest names", path=path, epoch=manifest.epoch, operator=operator
            )
        return stored.record

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in self._layout.checkpoint(epoch).glob("*.g*.json"))
            return frozenset(OperatorId(name.rsplit(".g", 1)[0]) for name in names)
        return frozenset()

    def file_damage(self, file: SnapshotFile, *, deep: bool) -> str | None:
        """What is wrong with one stored file; not ``deep``: a blob is only held against its size."""
        return self._blobs.damage(file, deep=deep)

    def damage(self, record: OperatorRecord) -> list[str]:
        found = (self._blobs.damage(file) for file in record.files())
        return [problem for problem in found if problem]

    def lost_input(self, record: OperatorRecord, live_dir: Path) -> list[LostInput]:
        if self._live_dirs is not None:
            with contextlib.suppress(DamagedRecordError):  # then the mirror is all that is known
                self._live_dirs.fetch(live_dir)
        # An operator may have another name since.
        planned = self._sources.get(record.operator) or self._planned(live_dir)
        report = check_sources(recorded_positions(record, self._layout), live_dir, planned)
        return [_lost(record.operator, problem) for problem in report.problems]

    def lost_ahead(self, operator: OperatorId, spark_checkpoint_dir: Path) -> list[LostInput]:
        lost = skipping.lost_ahead(spark_checkpoint_dir, self._sources.get(operator, ()))
        return [_lost(operator, problem) for problem in lost]

    def skip_lost_input(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        if self._live_dirs is not None and spark_checkpoint_dir == live_dir:
            raise LostInputError(
                "positions cannot be moved in a directory that is not here",
                next_step="restore the newest checkpoint (restore_to), which moves them on the way",
                path=spark_checkpoint_dir,
            )
        skipping.skip_lost(spark_checkpoint_dir, live_dir, self._planned(spark_checkpoint_dir))

    def _planned(self, spark_checkpoint_dir: Path) -> Sequence[PlannedSource]:
        return self._sources.get(OperatorId(spark_checkpoint_dir.parent.name), ())

    def begin_as_before(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        beginning.begin_as_before(spark_checkpoint_dir, live_dir)

    def restore(self, record: OperatorRecord, spark_checkpoint_dir: Path) -> None:
        shutil.rmtree(spark_checkpoint_dir, ignore_errors=True)
        durable.make_dir(spark_checkpoint_dir)
        for file in record.files():
            self._blobs.place(file, spark_checkpoint_dir / file.path)
        relocate(spark_checkpoint_dir, self._live_dirs.url(spark_checkpoint_dir) if self._live_dirs else None)

    # ------------------------------------------------------------------ generations

    def create_generation(self, record: GenerationRecord) -> bool:
        if any(other.generation > record.generation for other in self.generations()):
            return False
        return durable.create(self._layout.generation(record.generation), records.encode("generation", record))

    def generations(self) -> list[GenerationRecord]:
        paths = sorted(path for path in self._layout.generations.iterdir() if not durable.is_temporary(path.name))
        return [records.load("generation", path, GenerationRecord) for path in paths]

    # ------------------------------------------------------------------ letting go

    def collect(
        self, drop: Collection[Epoch], open_from: Epoch, check_fence: Callable[[], None] = lambda: None
    ) -> Sequence[Epoch]:
        """Each goes at once: killed half-way, an epoch is whole or not there, and the next run finds the rest."""
        gone = []
        for old in sorted(set(drop).intersection(self.epochs())):
            check_fence()
            self._remove_epoch(old)
            gone.append(old)
        complete = self.epochs()
        for epoch in self._stored_epochs():
            with self._folders:
                # Of pending epochs the records are being written.
                if epoch not in complete and epoch < open_from:
                    self._remove_records(epoch)
        check_fence()
        self._blobs.sweep(self._reached, check_fence)
        return gone

    def sweep(
        self, open_from: Epoch, may_go: Callable[[str, Path], bool], check_fence: Callable[[], None] = lambda: None
    ) -> None:
        for epoch in sorted(epoch for epoch in self._stored_epochs() if epoch < open_from):
            check_fence()
            with self._folders:
                self._sweep_records(epoch, may_go)
        check_fence()
        self._blobs.sweep(
            lambda: [*self._reached(), *self._reached_from(open_from)], check_fence, lambda path: may_go("blob", path)
        )

    def _sweep_records(self, epoch: Epoch, may_go: Callable[[str, Path], bool]) -> None:
        """Those that no manifest names: of an epoch that was given up, or of a life before the one that ended it."""
        folder, named = self._layout.checkpoint(epoch), set()
        if self._has_manifest(epoch):
            cuts = self.load_manifest(epoch).operators
            named = {self._layout.record(epoch, operator, cut.generation) for operator, cut in cuts.items()}
        for path in self._records(epoch):
            # Temporary files are looked after by whoever tidies up the folder as a whole.
            if path not in named and not durable.is_temporary(path.name) and may_go("record", path):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # discarded meanwhile, or something is in it again
            if not any(folder.iterdir()) and may_go("record", folder):
                folder.rmdir()

    def _remove_epoch(self, epoch: Epoch) -> None:
        """Its folder gets another name first: nobody then sees records of it and wonders where the manifest is."""
        path = self._layout.manifest(epoch)
        try:
            is_inherited = self.load_manifest(epoch).is_inherited
        except DamagedRecordError:
            is_inherited = False
        if is_inherited:
            # Whoever began it may be thought dead and still want to store it: its place stays taken.
            tombstone = Tombstone(epoch=epoch, generation=Generation(0), reason="it was complete, and collected")
            durable.replace(path, records.encode(_TOMBSTONE, tombstone))
            crashpoint("mid-collect")
            return
        doomed = durable.temporary_beside(path.parent)
        with self._folders:
            path.parent.rename(doomed)
        durable.fsync_dir(self._layout.checkpoints)
        crashpoint("mid-collect")
        shutil.rmtree(doomed, ignore_errors=True)

    def _remove_records(self, epoch: Epoch) -> None:
        """Everything but a tombstone, which stays for good: it bars an epoch against whoever is only thought dead."""
        verdict = self._layout.manifest(epoch)
        for path in self._records(epoch):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the tombstone, or a record that is being stored, keeps it
            verdict.parent.rmdir()

    def _records(self, epoch: Epoch) -> list[Path]:
        """Everything in an epoch's folder but its manifest, or the tombstone in its place."""
        verdict = self._layout.manifest(epoch)
        with contextlib.suppress(FileNotFoundError):
            return sorted(path for path in verdict.parent.iterdir() if path != verdict)
        return []

    def _reached_from(self, open_from: Epoch) -> list[set[str]]:
        """The blobs of epochs that may be under way, as far as their records are written."""
        paths = [path for epoch in self._stored_epochs() if epoch >= open_from for path in self._records(epoch)]
        found = []
        for path in paths:
            # Gone meanwhile: given up, or collected. What this process writes at this moment is claimed.
            if not durable.is_temporary(path.name) and path.exists():
                found.append({file.sha256 for file in _load_record(path).record.files() if file.content is None})
        return found

    def _reached(self) -> list[set[str]]:
        """The blobs of every complete epoch."""
        manifests = [self.load_manifest(epoch) for epoch in self.epochs()]
        return [
            {file.sha256 for file in self.load_record(manifest, operator).files() if file.content is None}
            for manifest in manifests
            for operator in manifest.operators
        ]


def _load_record(path: Path) -> StoredRecord:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedRecordError("operator record is missing", path=path) from error
    return StoredRecord(records.decode(_RECORD, data, OperatorRecord, path=path), records.checksum(data))


def _load_verdict(path: Path) -> Manifest | Tombstone:
    """How the epoch has ended, by what stands in the manifest's place."""
    data = path.read_bytes()
    if records.kind_of(data) == _TOMBSTONE:
        return records.decode(_TOMBSTONE, data, Tombstone, path=path)
    return records.decode(_MANIFEST, data, Manifest, path=path)
