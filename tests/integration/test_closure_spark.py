"""The closure on real Spark: a query started from exactly the closure of an earlier batch goes on as before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from cutline.model.ids import BatchId
from cutline.ports.query_dir import FileSet
from cutline.spark.distinct import distinct
from cutline.spark_dir.file_set import closure, last_batches, verify_files
from cutline.spark_dir.relocate import relocate

pytestmark = pytest.mark.spark

PROVIDERS = "org.apache.spark.sql.execution.streaming.state"
STATE = "spark.sql.streaming.stateStore"
SCHEMA = "id long, k long, ts timestamp"


def backend(provider: str, state_format: int, **more: str) -> dict[str, str]:
    return {
        f"{STATE}.providerClass": f"{PROVIDERS}.{provider}",
        f"{STATE}.checkpointFormatVersion": str(state_format),
        f"{STATE}.rocksdb.changelogCheckpointing.enabled": "false",
    } | {name.replace("__", "."): value for name, value in more.items()}


#: A snapshot after every second change, uploaded at once and not by a timer: so every test sees the same files.
SNAPSHOT_EVERY_2 = {f"{STATE}.minDeltasForSnapshot": "2", f"{STATE}.unloadOnCommit": "true"}
CHANGELOG = {f"{STATE}.rocksdb.changelogCheckpointing.enabled": "true"} | SNAPSHOT_EVERY_2
BACKENDS: dict[str, dict[str, str]] = {
    "rocksdb-changelog-2": backend("RocksDBStateStoreProvider", 2) | CHANGELOG,
    "rocksdb-2": backend("RocksDBStateStoreProvider", 2),
    "rocksdb-1": backend("RocksDBStateStoreProvider", 1),
    "hdfs-1": backend("HDFSBackedStateStoreProvider", 1) | SNAPSHOT_EVERY_2,
}


def backends(*in_each_run: str) -> list[Any]:
    """All, those that are not in each run with the soak tests: each query and each backend is in some run."""
    return [name if name in in_each_run else pytest.param(name, marks=pytest.mark.soak) for name in BACKENDS]


# ------------------------------------------------------------------------------------------------- the queries


@dataclass
class Query:
    """One streaming query over folders of small files, one file per batch."""

    spark: SparkSession
    build: Callable[[Callable[[str], DataFrame]], DataFrame]
    inputs: Path
    mode: str = "append"
    #: Options of the state reader, one set for each part of the state to compare.
    state_options: list[dict[str, str]] = field(default_factory=list)
    #: The batch to fail at, once, after its state was written.
    fail_at: int | None = None

    def feed(self, *numbers: int, folder: str = "a") -> None:
        target = self.inputs / folder
        target.mkdir(parents=True, exist_ok=True)
        for number in numbers:
            rows = [{"id": number * 8 + n, "k": n % 5, "ts": f"2024-01-01T00:{number:02}:{n:02}Z"} for n in range(8)]
            temp = target / f".{number}"
            temp.write_text("\n".join(json.dumps(row) for row in rows))
            os.utime(temp, (1_700_000_000 + number, 1_700_000_000 + number))  # Spark reads them in this order
            temp.rename(target / f"{number:04}.json")

    def read(self, folder: str) -> DataFrame:
        (self.inputs / folder).mkdir(parents=True, exist_ok=True)
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.inputs / folder))

    def run(self, spark_checkpoint_dir: Path) -> dict[int, list[str]]:
        """Read everything there is; returns the output of every batch that ran."""
        output: dict[int, list[str]] = {}

        def take(rows: DataFrame, batch: int) -> None:
            output[batch] = sorted(map(str, rows.collect()))
            if batch == self.fail_at:
                self.fail_at = None
                raise RuntimeError("failed on purpose")

        writer = self.build(self.read).writeStream.outputMode(self.mode).foreachBatch(take)
        started = writer.option("checkpointLocation", str(spark_checkpoint_dir)).trigger(availableNow=True).start()
        try:
            started.awaitTermination(120)
        finally:
            started.stop()
        return output

    def state(self, spark_checkpoint_dir: Path) -> list[list[str]]:
        """Every row of the newest state."""
        path = str(spark_checkpoint_dir)
        frames = [self.spark.read.format("statestore").options(**each).load(path) for each in self.state_options]
        return [sorted(map(str, frame.collect())) for frame in frames]


def aggregation(read: Callable[[str], DataFrame]) -> DataFrame:
    return read("a").groupBy("k").agg(F.count("*"), F.sum("id"))


def deduplication(read: Callable[[str], DataFrame]) -> DataFrame:
    return read("a").dropDuplicates(["k", "ts"])


def distinct_within_watermark(read: Callable[[str], DataFrame]) -> DataFrame:
    return distinct(read("a"), key=["k"], time="ts", within="90 seconds")


def join(read: Callable[[str], DataFrame]) -> DataFrame:
    left = read("a").withWatermark("ts", "30 seconds").alias("l")
    right = read("b").withWatermark("ts", "50 seconds").alias("r")
    near = F.expr("l.k = r.k and r.ts between l.ts and l.ts + interval 70 seconds")
    return left.join(right, near, "leftOuter").select("l.id", "l.ts", F.col("r.id").alias("other"))


def join_then_windows(read: Callable[[str], DataFrame]) -> DataFrame:
    return join(read).groupBy(F.window("ts", "2 minutes")).agg(F.count("other"))


def transform_with_state(read: Callable[[str], DataFrame]) -> DataFrame:
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

    class Counts(StatefulProcessor):  # inside the function, so that it travels to the workers by value
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.total = handle.getValueState("total", "n long")
            self.by_second = handle.getMapState("by_second", "second long", "n long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            (total,) = self.total.get() or (0,)
            for row in rows:
                total += row.id
                self.by_second.updateValue((row.ts.second,), (total,))
            self.total.update((total,))
            yield Row(k=key[0], total=total)

        def close(self) -> None:
            pass

    return (
        read("a")
        .groupBy("k")
        .transformWithState(
            statefulProcessor=Counts(), outputStructType="k long, total long", outputMode="Update", timeMode="None"
        )
    )


DEFAULT_STATE = [{"operatorId": "0"}]
#: The join comes second: Spark numbers the operators from the output backwards.
JOIN_STATE = [{"operatorId": "1", "joinSide": "left"}, {"operatorId": "1", "joinSide": "right"}]


@pytest.fixture
def make(spark: SparkSession, tmp_path: Path) -> Callable[..., Query]:
    def make_query(name: str, build: Callable[..., DataFrame], **settings: Any) -> Query:
        session = spark.newSession()
        for key, value in BACKENDS[name].items():
            session.conf.set(key, value)
        session.conf.set("spark.sql.shuffle.partitions", "2")
        session.conf.set("spark.sql.codegen.wholeStage", "false")  # compiling takes longer than these few rows
        session.conf.set("spark.sql.session.timeZone", "UTC")
        manager = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        session.conf.set("spark.sql.streaming.checkpointFileManagerClass", manager)
        return Query(session, build, tmp_path / "in", **settings)

    return make_query


def names_of(files: FileSet) -> list[str]:
    return [*files.shared, *(name for subtask in files.subtasks.values() for name in subtask)]


def restore(source: Path, batch: int, target: Path) -> FileSet:
    """Copy exactly the closure, after checking that every file of it agrees with its checksums."""
    files = closure(source, BatchId(batch))
    names = names_of(files)
    assert len(names) == len(set(names))
    assert verify_files(source, names, full=True) == []
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    # What was restored is whole in itself: the same closure can be taken of it again.
    again = closure(target, BatchId(batch))
    assert sorted(names_of(again)) == sorted(names)
    assert again.watermark_ms == files.watermark_ms
    return files


def goes_on_the_same(query: Query, tmp_path: Path, *batches: int) -> None:
    """Run to the end; then for each batch restore its closure elsewhere, with the original gone, and run on."""
    original = tmp_path / "original"
    output = query.run(original)
    state = query.state(original)
    for batch in batches:
        restore(original, batch, tmp_path / f"restored-{batch}")
    original.rename(tmp_path / "gone")
    for batch in batches:
        restored = tmp_path / f"restored-{batch}"
        relocate(restored)
        assert query.run(restored) == {number: rows for number, rows in output.items() if number > batch}
        assert query.state(restored) == state


# ------------------------------------------------------------------------------------------------- tests


#: By backend: the kinds of state files at batch 2 and at batch 3.
KINDS = {
    "rocksdb-changelog-2": ({".zip", ".sst", ".changelog"}, {".zip", ".sst"}),
    "rocksdb-2": ({".zip", ".sst"}, {".zip", ".sst"}),
    "rocksdb-1": ({".zip", ".sst"}, {".zip", ".sst"}),
    "hdfs-1": ({".snapshot"}, {".snapshot", ".delta"}),
}


@pytest.mark.parametrize("name", backends("rocksdb-changelog-2", "rocksdb-1"))
def test_aggregation(make: Callable[..., Query], tmp_path: Path, name: str) -> None:
    """Restored at a version that is a snapshot, and (if the backend has it) at one that is changes upon a snapshot."""
    query = make(name, aggregation, mode="update", state_options=DEFAULT_STATE)
    query.feed(*range(5))
    goes_on_the_same(query, tmp_path, 2, 3)
    for batch, kinds in zip((2, 3), KINDS[name], strict=True):
        subtasks = closure(tmp_path / "gone", BatchId(batch)).subtasks
        assert {Path(file).suffix for files in subtasks.values() for file in files} == kinds


@pytest.mark.parametrize("name", backends("rocksdb-changelog-2", "hdfs-1"))
def test_stream_stream_join_and_windows(make: Callable[..., Query], tmp_path: Path, name: str) -> None:
    """Five stores in two operators, a watermark, a batch without data at the end."""
    query = make(name, join_then_windows, state_options=[*DEFAULT_STATE, *JOIN_STATE])
    query.feed(*range(4))
    query.feed(*range(4), folder="b")
    goes_on_the_same(query, tmp_path, 2)
    assert closure(tmp_path / "gone", BatchId(2)).watermark_ms > 0


@pytest.mark.parametrize("name", backends("rocksdb-2"))
def test_deduplication(make: Callable[..., Query], tmp_path: Path, name: str) -> None:
    query = make(name, deduplication, state_options=DEFAULT_STATE)
    query.feed(*range(4))
    goes_on_the_same(query, tmp_path, 1)


@pytest.mark.parametrize("name", ["rocksdb-changelog-2", "hdfs-1"])
def test_deduplication_within_a_watermark(make: Callable[..., Query], tmp_path: Path, name: str) -> None:
    """The state holds when each key expires: some keys are dropped again, some have come back by the end."""
    query = make(name, distinct_within_watermark, state_options=DEFAULT_STATE)
    query.feed(*range(5))
    goes_on_the_same(query, tmp_path, 1, 3)
    assert closure(tmp_path / "gone", BatchId(3)).watermark_ms > 0


def test_transform_with_state(make: Callable[..., Query], tmp_path: Path) -> None:
    """Its metadata holds absolute paths: without ``relocate`` it could not start anywhere else."""
    pytest.importorskip("google.protobuf", reason="transformWithState in Python needs protobuf")
    options = [{"stateVarName": "total"}, {"stateVarName": "by_second"}]
    query = make("rocksdb-changelog-2", transform_with_state, mode="update", state_options=options)
    query.feed(*range(3))
    goes_on_the_same(query, tmp_path, 1)


def test_a_source_log_is_cut_across_a_compaction(make: Callable[..., Query], tmp_path: Path) -> None:
    """Spark compacts a file source's log at its tenth entry."""
    query = make("rocksdb-changelog-2", lambda read: read("a").select("id"))
    query.feed(*range(13))
    goes_on_the_same(query, tmp_path, 8, 9, 10)
    sources = [name for name in closure(tmp_path / "gone", BatchId(10)).shared if name.startswith("sources/")]
    assert sources == ["sources/0/10", "sources/0/9.compact"]


def test_a_source_that_had_read_nothing_yet(make: Callable[..., Query], tmp_path: Path) -> None:
    query = make("rocksdb-changelog-2", lambda read: read("a").union(read("b")).select("id"))
    query.feed(0, 1)
    query.run(tmp_path / "original")
    query.feed(2, 3)
    query.feed(7, 8, folder="b")
    goes_on_the_same(query, tmp_path, 1)


def test_ids_of_purged_commits_are_found_in_the_changelogs(make: Callable[..., Query], tmp_path: Path) -> None:
    """A restored directory, restored again: its commits do not reach back to the first change, and one batch failed."""
    query = make("rocksdb-changelog-2", aggregation, mode="update", state_options=DEFAULT_STATE)
    query.spark.conf.set(f"{STATE}.minDeltasForSnapshot", "100")
    query.spark.conf.set(f"{STATE}.unloadOnCommit", "false")
    query.feed(*range(6))
    query.fail_at = 1
    original, second, third = (tmp_path / name for name in ("original", "second", "third"))
    with pytest.raises(Exception, match="failed on purpose"):
        query.run(original)
    assert last_batches(original) == (1, 0)
    output = query.run(original)
    # Of version 2 there are two tries in every partition.
    assert {len(list(original.glob(f"state/0/{partition}/2_*.changelog"))) for partition in (0, 1)} == {2}
    restore(original, 3, second)
    # The failed tries beside the good ones again: now only the lineage can tell them apart.
    for path in original.glob("state/0/*/2_*.changelog"):
        shutil.copyfile(path, second / path.relative_to(original))
    shutil.rmtree(original)
    assert query.run(second) == {4: output[4], 5: output[5]}
    files = restore(second, 4, third)
    assert all(len(names) == 5 for names in files.subtasks.values())
    shutil.rmtree(second)
    assert query.run(third) == {5: output[5]}


def test_a_query_that_was_made_smaller(make: Callable[..., Query], tmp_path: Path) -> None:
    """Format 1 leaves the folders of the old partitions where they are."""
    query = make("rocksdb-1", aggregation, mode="update", state_options=DEFAULT_STATE)
    query.feed(0, 1)
    query.run(tmp_path / "original")
    query.spark._streamingCheckpointManager.repartition(str(tmp_path / "original"), 1)
    query.feed(2, 3)
    goes_on_the_same(query, tmp_path, 2, 3)
    assert (tmp_path / "gone/state/0/1").is_dir()
    assert list(closure(tmp_path / "gone", BatchId(2)).subtasks) == [0]


def test_damage_to_real_files_is_found(make: Callable[..., Query], tmp_path: Path) -> None:
    query = make("rocksdb-changelog-2", aggregation, mode="update")
    query.feed(*range(3))
    query.run(tmp_path)
    names = names_of(closure(tmp_path, last_batches(tmp_path)[1]))
    assert verify_files(tmp_path, names, full=False) == []
    kinds = {Path(name).suffix: name for name in names}
    assert {".zip", ".changelog", ".sst"} <= kinds.keys()
    for name in kinds.values():
        path = tmp_path / name
        content = path.read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
            path.write_bytes(damaged)
            assert verify_files(tmp_path, names, full=False) != []
        path.write_bytes(content)
