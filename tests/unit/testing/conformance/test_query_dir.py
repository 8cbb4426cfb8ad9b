"""Query directories pass the suite of their port."""

from __future__ import annotations

from pathlib import Path

from cutline.model.checkpoint import OperatorRecord
from cutline.model.cut import Timings
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.query_dir import QueryDir
from cutline.ports.source_guard import NoGuard
from cutline.storage.local import LocalStore
from cutline.testing.conformance.query_dir import QueryDirCase, QueryDirConformance
from cutline.testing.twins.checkpoint_store import MemoryCheckpointStore
from cutline.testing.twins.query_dir import MemoryQueryDir
from tests.support.spark_dirs import SparkDir


class _Case:
    """A query without sources, whose snapshots one checkpoint store keeps."""

    def __init__(self, query_dirs: QueryDir, checkpoints: CheckpointStore) -> None:
        self.query_dirs = query_dirs
        self._checkpoints = checkpoints

    def run(self, spark_checkpoint_dir: Path, batch: int) -> None:
        SparkDir(spark_checkpoint_dir).run(batch)

    def plan(self, spark_checkpoint_dir: Path, batch: int) -> None:
        SparkDir(spark_checkpoint_dir).plan(batch)

    def record(self, spark_checkpoint_dir: Path, batch: int) -> OperatorRecord:
        files = self.query_dirs.files_of(spark_checkpoint_dir, BatchId(batch))
        held = self._checkpoints.hold(OperatorId("totals"), Epoch(1), spark_checkpoint_dir, files)
        subtasks, shared = self._checkpoints.store_files(held)
        return OperatorRecord(
            flow=FlowName("flow"),
            operator=held.operator,
            epoch=held.epoch,
            generation=Generation(1),
            batch=files.batch,
            barrier=Position(1),
            positions={},
            aligned=True,
            watermark_ms=0,
            subtasks=subtasks,
            shared=shared,
            sinks={},
            timings=Timings(),
        )


class _MemoryCase(_Case):
    def __init__(self) -> None:
        self.memory = MemoryQueryDir()
        checkpoints = MemoryCheckpointStore(self.memory.read)
        self.memory.content = checkpoints.content
        super().__init__(self.memory, checkpoints)

    def run(self, spark_checkpoint_dir: Path, batch: int) -> None:
        self.memory.run(spark_checkpoint_dir, batch)

    def plan(self, spark_checkpoint_dir: Path, batch: int) -> None:
        self.memory.plan(spark_checkpoint_dir, batch)


class TestLocalQueryDirs(QueryDirConformance):
    def make_case(self, tmp_path: Path) -> QueryDirCase:
        store = LocalStore.open(Layout(tmp_path / "storage", "flow"), NoGuard())
        return _Case(store.query_dirs, store.checkpoints)


class TestMemoryQueryDirs(QueryDirConformance):
    def make_case(self, tmp_path: Path) -> QueryDirCase:
        return _MemoryCase()
