"""The directories that Spark's queries use: in the flow's folder, or mirrored there from a remote file system."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cutline.base import durable
from cutline.base.paths import inside
from cutline.errors import CutlineError, DamagedRecordError, LostInputError
from cutline.model.checkpoint import OperatorRecord, SnapshotFile
from cutline.model.generation import LostInput
from cutline.model.ids import NO_BATCH, BatchId, OperatorId
from cutline.model.layout import Layout
from cutline.model.plan import PlannedSource
from cutline.ports.engine import LiveDirs
from cutline.ports.inspection import FileProblem
from cutline.ports.query_dir import FileSet
from cutline.ports.source_guard import SourceGuard
from cutline.protocol.history.live_directory import mismatch
from cutline.spark_dir import planned_batch, skip_input, start_position
from cutline.spark_dir.file_set import closure, last_batches, verify_files
from cutline.spark_dir.offsets import load_offsets
from cutline.spark_dir.recorded_sources import load_recorded, store_recorded
from cutline.spark_dir.relocate import relocate
from cutline.spark_dir.source_check import check_sources
from cutline.storage.recorded_positions import recorded_positions, recorded_sources


class LocalQueryDir:
    """See ``cutline.ports.query_dir`` for what each method promises."""

    def __init__(
        self,
        layout: Layout,
        place: Callable[[SnapshotFile, Path], None],
        guard: SourceGuard,
        *,
        live_dirs: LiveDirs | None = None,
        sources: Mapping[OperatorId, Sequence[PlannedSource]] | None = None,
    ) -> None:
        """``place`` puts a stored file where Spark will read it. ``guard`` checks whether input still exists.

        ``live_dirs``: Spark's directories, if those in the flow's folder are mirrors of them.
        ``sources``: what operators read now, if known.
        """
        self._layout = layout
        self._place = place
        self._guard = guard
        self._live_dirs = live_dirs
        self._sources = sources or {}

    # ------------------------------------------------------------------ a query that runs, or ran

    def is_committed(self, spark_checkpoint_dir: Path, batch: BatchId) -> bool:
        if batch == NO_BATCH or (spark_checkpoint_dir / "commits" / str(batch)).exists():
            return True
        if self._live_dirs is None or not self._live_dirs.has(spark_checkpoint_dir, f"commits/{batch}"):
            return False
        self._live_dirs.fetch(spark_checkpoint_dir)
        return (spark_checkpoint_dir / "commits" / str(batch)).exists()

    def last_committed(self, spark_checkpoint_dir: Path) -> BatchId:
        return last_batches(spark_checkpoint_dir)[1]

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
        problem = mismatch(
            planned=planned,
            committed=committed,
            last_appended=last_appended,
            complete=complete,
            may_be_behind=may_be_behind,
        )
        if problem is not None:
            return [problem]
        try:
            if planned > committed:
                load_offsets(str(spark_checkpoint_dir), planned)
            if committed == NO_BATCH:
                return []
            files = closure(spark_checkpoint_dir, committed)
        except (CutlineError, OSError) as error:
            return [str(error)]
        return verify_files(spark_checkpoint_dir, files.names(), full=False)

    # ------------------------------------------------------------------ repeating batches of the log

    def plan_of(self, spark_checkpoint_dir: Path, batch: BatchId) -> dict[str, bytes]:
        return planned_batch.plan_of(spark_checkpoint_dir, batch)

    def put_plan(self, spark_checkpoint_dir: Path, batch: BatchId, plan: Mapping[str, bytes]) -> None:
        planned_batch.put_plan(spark_checkpoint_dir, batch, plan)

    def commit_plan(self, spark_checkpoint_dir: Path, batch: BatchId) -> None:
        planned_batch.commit_plan(spark_checkpoint_dir, batch)

    # ------------------------------------------------------------------ preparing a directory

    def begin_anew(self, spark_checkpoint_dir: Path) -> None:
        planned_batch.begin_anew(spark_checkpoint_dir)

    def restore(self, record: OperatorRecord, spark_checkpoint_dir: Path) -> None:
        shutil.rmtree(spark_checkpoint_dir, ignore_errors=True)
        durable.make_dir(spark_checkpoint_dir)
        for file in record.files():
            self._place(file, inside(spark_checkpoint_dir, file.path, operator=record.operator, epoch=record.epoch))
        relocate(spark_checkpoint_dir, self._live_dirs.url(spark_checkpoint_dir) if self._live_dirs else None)

    def begin_as_before(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        start_position.begin_as_before(self._guard, spark_checkpoint_dir, live_dir)

    def record_sources(self, operator: OperatorId, spark_checkpoint_dir: Path) -> None:
        former = load_recorded(spark_checkpoint_dir)
        sources = self._guard.recorded(self._sources.get(operator, ()), former)
        if sources != former:
            store_recorded(spark_checkpoint_dir, sources)

    # ------------------------------------------------------------------ input that is gone

    def lost_input(self, record: OperatorRecord, live_dir: Path) -> list[LostInput]:
        if self._live_dirs is not None:
            with contextlib.suppress(DamagedRecordError):  # then the mirror is the only information
                self._live_dirs.fetch(live_dir)
        # The operator may have been renamed since.
        planned = self._sources.get(record.operator) or self._planned(live_dir)
        positions, recorded = recorded_positions(record, self._layout), recorded_sources(record, self._layout)
        report = check_sources(self._guard, positions, live_dir, planned, recorded)
        return [_lost(record.operator, problem) for problem in report.problems]

    def lost_ahead(self, operator: OperatorId, spark_checkpoint_dir: Path) -> list[LostInput]:
        lost = skip_input.lost_ahead(self._guard, spark_checkpoint_dir, self._sources.get(operator, ()))
        return [_lost(operator, problem) for problem in lost]

    def skip_lost_input(self, spark_checkpoint_dir: Path, live_dir: Path) -> None:
        if self._live_dirs is not None and spark_checkpoint_dir == live_dir:
            raise LostInputError(
                "positions cannot be moved in a directory on a remote file system",
                next_step="restore the newest checkpoint (restore_to), which also moves them",
                path=spark_checkpoint_dir,
            )
        skip_input.skip_lost(self._guard, spark_checkpoint_dir, live_dir, self._planned(spark_checkpoint_dir))

    def _planned(self, spark_checkpoint_dir: Path) -> Sequence[PlannedSource]:
        return self._sources.get(OperatorId(spark_checkpoint_dir.parent.name), ())


def _lost(operator: OperatorId, problem: FileProblem) -> LostInput:
    return LostInput(operator=operator, what=problem.path, why=problem.problem, parts=problem.parts)
