"""Query directories in memory: files by name, without Spark's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import OperatorRecord, SnapshotFile
from cutline.model.generation import LostInput
from cutline.model.ids import NO_BATCH, BatchId, OperatorId, Subtask
from cutline.ports.query_dir import FileSet
from cutline.protocol.history.live_directory import mismatch


class MemoryQueryDir:
    """See ``cutline.ports.query_dir`` for what each method promises. A query has one state partition."""

    def __init__(self, content: Callable[[SnapshotFile], bytes] = lambda file: file.content or b"") -> None:
        """``content`` returns the content of a stored file."""
        self.content = content
        self.files: dict[Path, dict[str, bytes]] = {}
        #: Input that sources cannot read again, set by a test: since an operator's checkpoint, and ahead of it.
        self.lost: dict[OperatorId, list[LostInput]] = {}
        self.ahead: dict[OperatorId, list[LostInput]] = {}
        #: Directories whose positions were moved past lost input.
        self.skipped: list[Path] = []

    # ------------------------------------------------------------------ what a query does

    def run(self, spark_checkpoint_dir: Path, batch: int, *, state: str = "") -> None:
        """A query plans and finishes a batch."""
        self.plan(spark_checkpoint_dir, batch)
        files = self.files[spark_checkpoint_dir]
        files[f"state/0/0/{batch + 1}.delta"] = (state or str(batch)).encode()
        files[f"commits/{batch}"] = b"{}"

    def plan(self, spark_checkpoint_dir: Path, batch: int) -> None:
        self.files.setdefault(spark_checkpoint_dir, {"metadata": b"id"})[f"offsets/{batch}"] = b"plan %d" % batch

    def read(self, path: Path) -> bytes:
        """The content of a file, for a checkpoint store that holds it."""
        for folder, files in self.files.items():
            if path.is_relative_to(folder) and (name := path.relative_to(folder).as_posix()) in files:
                return files[name]
        raise FileNotFoundError(path)

    def _last(self, spark_checkpoint_dir: Path, kind: str) -> BatchId:
        names = self.files.get(spark_checkpoint_dir, {})
        numbers = (int(name.partition("/")[2]) for name in names if name.startswith(f"{kind}/"))
        return BatchId(max(numbers, default=NO_BATCH))

    # ------------------------------------------------------------------ a query that runs, or ran

    def is_committed(self, spark_checkpoint_dir: Path, batch: BatchId) -> bool:
        return batch == NO_BATCH or f"commits/{batch}" in self.files.get(spark_checkpoint_dir, {})

    def last_committed(self, spark_checkpoint_dir: Path) -> BatchId:
        return self._last(spark_checkpoint_dir, "commits")

    def files_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> FileSet:
        if batch == NO_BATCH:
            return FileSet(batch=batch, subtasks={}, shared=[])
        files = self.files.get(spark_checkpoint_dir, {})
        state = [f"state/0/0/{number + 1}.delta" for number in range(batch + 1)]
        shared = ["metadata", f"offsets/{batch}", f"commits/{batch}"]
        if missing := [name for name in [*state, *shared] if name not in files]:
            raise DamagedRecordError("a file that the state needs is missing", path=missing[0])
        return FileSet(batch=batch, subtasks={Subtask(0): state}, shared=shared)

    def live_damage(
        self, spark_checkpoint_dir: Path, last_appended: BatchId, complete: BatchId, *, may_be_behind: bool = False
    ) -> list[str]:
        committed = self.last_committed(spark_checkpoint_dir)
        problem = mismatch(
            planned=self._last(spark_checkpoint_dir, "offsets"),
            committed=committed,
            last_appended=last_appended,
            complete=complete,
            may_be_behind=may_be_behind,
        )
        if problem is not None:
            return [problem]
        try:
            self.files_of(spark_checkpoint_dir, committed)
        except DamagedRecordError as error:
            return [str(error)]
        return []

    # ------------------------------------------------------------------ repeating batches of the log

    def plan_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
        name = f"offsets/{batch}"
        try:
            return {name: self.files[spark_checkpoint_dir][name]}
        except KeyError as error:
            raise DamagedRecordError("the batch was not planned", path=name) from error

    def put_plan(self, spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
        files = self.files.setdefault(spark_checkpoint_dir, {"metadata": b"id"})
        for name in [name for name in files if name.startswith("offsets/") and int(name[8:]) >= batch]:
            del files[name]
        files.update(plan)

    def commit_plan(self, spark_checkpoint_dir: Path, batch: BatchId) -> None:
        self.files[spark_checkpoint_dir][f"commits/{batch}"] = b"{}"

    # ------------------------------------------------------------------ preparing a directory

    def begin_anew(self, spark_checkpoint_dir: Path) -> None:
        self.files[spark_checkpoint_dir] = {}

    def restore(self, record: OperatorRecord, spark_checkpoint_dir: Path) -> None:
        self.files[spark_checkpoint_dir] = {file.path: self.content(file) for file in record.files()}

    def begin_as_before(self, spark_checkpoint_dir: Path, live_dir: Path) -> None: ...

    def record_sources(self, operator: OperatorId, spark_checkpoint_dir: Path) -> None: ...

    # ------------------------------------------------------------------ input that is gone

    def lost_input(self, record: OperatorRecord, live_dir: Path) -> list[LostInput]:
        return list(self.lost.get(record.operator, []))

    def lost_ahead(self, operator: OperatorId, spark_checkpoint_dir: Path) -> list[LostInput]:
        return list(self.ahead.get(operator, []))

    def skip_lost_input(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        self.skipped.append(spark_checkpoint_dir)
