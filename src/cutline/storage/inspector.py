"""Inspects stored snapshots without changing anything, also while another process runs the flow."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cutline.errors import CutlineError, DamagedRecordError, StoreError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.ports.inspection import FileProblem, SourceReport
from cutline.ports.source_guard import SourceGuard
from cutline.spark_dir.file_set import closure, verify_files
from cutline.spark_dir.source_check import check_sources
from cutline.storage.checkpoints import LocalCheckpointStore
from cutline.storage.recorded_positions import recorded_positions, recorded_sources


class LocalInspector:
    """See ``cutline.ports.inspection.SnapshotInspector`` for what each method promises."""

    def __init__(self, layout: Layout, guard: SourceGuard) -> None:
        self._layout = layout
        self._guard = guard
        self._store = LocalCheckpointStore(layout, is_reader=True)
        #: Blobs hashed and found whole: epochs share most of their content, and it is read once.
        self._whole: set[str] = set()

    def epochs(self) -> list[Epoch]:
        return self._store.epochs() if self._layout.checkpoints.is_dir() else []

    def load_manifest(self, epoch: Epoch) -> Manifest:
        return self._store.load_manifest(epoch)

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        return self._store.load_record(manifest, operator)

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        return self._store.recorded(epoch)

    def file_damage(self, file: SnapshotFile, *, deep: bool) -> str | None:
        is_blob = file.content is None
        problem = self._store.file_damage(file, deep=deep and not (is_blob and file.sha256 in self._whole))
        if deep and is_blob and problem is None:
            self._whole.add(file.sha256)
        return problem

    def incomplete(self, record: OperatorRecord) -> list[FileProblem]:
        """Lays the files out as a tree of links and computes the closure, as for a snapshot of Spark's directory."""
        with tempfile.TemporaryDirectory(prefix="cutline-verify-") as folder:
            root = Path(folder).resolve()
            stored = {file.path for file in record.files()}
            try:
                for file in record.files():
                    self._lay_out(file, root)
                needed = closure(root, record.batch)
            except DamagedRecordError as error:
                path = str(error.where.get("path", ".")).removeprefix(f"{root}/")
                return [FileProblem(path, error.what)]
            except OSError as error:
                return [FileProblem(str(error.filename or ".").removeprefix(f"{root}/"), str(error.strerror))]
            names = needed.names()
            missing = [name for name in names if name not in stored]
            lines = verify_files(root, [name for name in names if name in stored], full=False)
        problems = [FileProblem(name, "a file that the state needs is not part of the snapshot") for name in missing]
        problems += [FileProblem(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
        # Subtasks without state are recorded too, so there may be more of them.
        for subtask in sorted(set(needed.subtasks).difference(one.subtask for one in record.subtasks)):
            problems.append(FileProblem("state", f"the record has no subtask {subtask}, but its files have"))
        return problems

    def _lay_out(self, file: SnapshotFile, root: Path) -> None:
        target = root / file.path
        if root not in target.resolve().parents:
            raise DamagedRecordError("the path of a snapshot's file leads out of its folder", path=file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.content is not None:
            target.write_bytes(file.content)
        else:
            # Symbolic: the temporary folder may be on another file system.
            target.symlink_to(self._layout.blob(file.sha256).absolute())

    def sources(self, record: OperatorRecord, live_dir: Path | None) -> SourceReport:
        try:
            positions = recorded_positions(record, self._layout)
        except CutlineError as error:
            return SourceReport(problems=[FileProblem(f"offsets/{record.batch}", str(error))])
        try:
            return check_sources(self._guard, positions, live_dir, recorded=recorded_sources(record, self._layout))
        except StoreError as error:
            return SourceReport(
                problems=[FileProblem(f"offsets/{record.batch}", f"whether its input is there: {error}")]
            )
