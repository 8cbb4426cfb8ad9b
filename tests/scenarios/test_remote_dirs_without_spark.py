"""Spark's directories elsewhere, with a Hadoop client that is made of Python."""

from __future__ import annotations

import pathlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import DamagedRecordError, LostInputError
from cutline.model.ids import FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.spark.remote_dirs import HadoopDirs, settle_live_dirs
from tests.support.remote import copied, lose_host, remote
from tests.support.running import assert_each_once, running
from tests.support.spark_dirs import SparkDir
from tests.support.sparkless import NUMBERS, TOTALS, HandDrivenEngine, SparklessFlow

BASE = "fake://live"


class _Closeable:
    def close(self) -> None: ...


class _Status:
    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url

    def isDirectory(self) -> bool:
        return self.path.is_dir()

    def getLen(self) -> int:
        return self.path.stat().st_size

    def getModificationTime(self) -> int:
        return int(self.path.stat().st_mtime * 1000)


_PACKAGES_AND_CLASSES = frozenset(
    [
        "_jvm",
        "_jsc",
        "_gateway",
        "java",
        "lang",
        "System",
        "org",
        "apache",
        "hadoop",
        "fs",
        "commons",
        "lang3",
        "FileStatus",
        "FileUtil",
        "ArrayUtils",
    ]
)


class FakeHadoop:
    """As much of a session, a JVM and a file system as is asked for; its files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: The name of a folder that cannot be listed now.
        self.away: str | None = None
        #: Of the host that is started next.
        self.storage = folder.parent
        folder.mkdir(exist_ok=True)

    # session, context, jvm
    @property
    def sparkContext(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _PACKAGES_AND_CLASSES:
            return self
        raise AttributeError(name)

    def hadoopConfiguration(self) -> Any:
        return self

    def Path(self, url: str) -> Any:
        fake = self

        class _Path(str):
            def getFileSystem(self, _: Any) -> Any:
                return fake

        return _Path(url)

    # py4j's arrays
    def new_array(self, _: Any, count: int) -> list[Any]:
        return [None] * count

    def arraycopy(self, source: list[Any], start: int, target: list[Any], to: int, count: int) -> None:
        target[to : to + count] = source[start : start + count]

    def stat2Paths(self, found: list[_Status]) -> list[str]:
        return [one.url for one in found]

    def toString(self, paths: list[str]) -> str:
        return "{" + ",".join(paths) + "}"

    # file system
    def at(self, url: str) -> pathlib.Path:
        if url.startswith("file://"):
            return pathlib.Path(url.removeprefix("file://"))
        return self.folder / url.removeprefix(BASE).lstrip("/")

    def exists(self, url: str) -> bool:
        return self.at(url).exists()

    def delete(self, url: str, _: bool) -> None:
        path = self.at(url)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def mkdirs(self, url: str) -> None:
        self.at(url).mkdir(parents=True, exist_ok=True)

    def create(self, url: str, _: bool) -> _Closeable:
        self.at(url).touch()
        return _Closeable()

    def copyFromLocalFile(self, _: bool, __: bool, source: str, target: str) -> None:
        path = self.at(source)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, self.at(target))

    def copyToLocalFile(self, _: bool, source: str, target: str, __: bool) -> None:
        shutil.copyfile(self.at(source), self.at(target))

    def listStatus(self, url: str) -> list[_Status]:
        if self.away is not None and url.rstrip("/").endswith(f"/{self.away}"):
            raise ConnectionError("the file system is away")
        return [_Status(path, f"{url}/{path.name}") for path in sorted(self.at(url).iterdir())]


def dirs_of(hadoop: FakeHadoop, layout: Layout) -> HadoopDirs:
    layout.root.mkdir(parents=True, exist_ok=True)
    dirs = settle_live_dirs(hadoop, layout, BASE, FlowName("counting"), are_names_final=True)  # type: ignore[arg-type]
    assert dirs is not None
    return dirs


# ---------------------------------------------------------------------------------------- one flow after another


@pytest.fixture
def hadoop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHadoop:
    """Every flow of the harness has its directories there, and its queries run on them."""
    hadoop = FakeHadoop(tmp_path / "live")

    class Engine(HandDrivenEngine):
        dirs: HadoopDirs

        def live_dirs(self) -> Any:
            return self.dirs

        def start(self, operator: OperatorId, spark_checkpoint_dir: Path, handler: Any) -> Any:
            self.dirs.publish(spark_checkpoint_dir)
            return super().start(operator, spark_checkpoint_dir, handler)

    def engine(graph: Any) -> Engine:
        one = Engine(graph)
        one.dirs = dirs_of(hadoop, Layout(hadoop.storage / "storage", "counting"))
        return one

    def spark_dir(self: SparklessFlow, operator: OperatorId) -> Path:
        mirror = self.layout.spark_checkpoint_dir(operator, self.recovered.spark_dirs[operator])
        place = hadoop.at(self.engine.dirs.url(mirror))  # type: ignore[attr-defined]
        self.wait(lambda: place.with_name(f"{place.name}.in-place").exists())
        return place

    monkeypatch.setattr(SparklessFlow, "engine_type", staticmethod(engine))
    monkeypatch.setattr(SparklessFlow, "spark_dir", spark_dir)
    return hadoop


def test_a_flow_that_starts_over_does_not_run_on_the_directories_of_the_one_before(
    tmp_path: Path, hadoop: FakeHadoop
) -> None:
    with running(tmp_path) as flow:
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
    lose_host(tmp_path)
    shutil.rmtree(tmp_path / "table")  # "to start over, empty the sink's target"
    with running(tmp_path) as flow:
        assert flow.recovered.path == "fresh"
        flow.emit(2)
        flow.drain()
        assert [number for number, _ in flow.sink.rows()] == [0, 1]


# ---------------------------------------------------------------------------------------- two hosts


def test_a_replaced_host_whose_query_starts_again_leaves_the_directory_of_its_successor_alone(tmp_path: Path) -> None:
    hadoop = FakeHadoop(tmp_path / "live")
    old, new = (Layout(tmp_path / host, "counting") for host in ("old", "new"))
    for layout, generation in ((old, 1), (new, 2)):
        SparkDir(layout.spark_dirs / "totals" / f"g{generation:06d}").run(0)
        dirs_of(hadoop, layout).publish(layout.spark_dirs / "totals" / f"g{generation:06d}")
    successor = hadoop.at(dirs_of(hadoop, new).url(new.spark_dirs / "totals" / "g000002"))
    SparkDir(successor).run(1)  # it goes on
    dirs_of(hadoop, old).publish(old.spark_dirs / "totals" / "g000001")
    assert (successor / "commits/1").exists()


def test_what_was_put_in_place_once_is_never_put_there_again(tmp_path: Path) -> None:
    """The mirror is only as new as the last cut; the log has gone on."""
    hadoop, layout = FakeHadoop(tmp_path / "live"), Layout(tmp_path / "host", "counting")
    mirror = layout.spark_dirs / "totals" / "g000001"
    SparkDir(mirror).run(0)
    dirs = dirs_of(hadoop, layout)
    dirs.publish(mirror)
    dirs.publish(mirror)
    shutil.rmtree(hadoop.folder)
    hadoop.folder.mkdir()
    for ask in (dirs.publish, dirs.fetch):
        with pytest.raises(DamagedRecordError, match="is gone"):
            ask(mirror)


def test_a_directory_that_is_gone_is_not_replaced_by_its_mirror_when_the_option_is_changed(tmp_path: Path) -> None:
    hadoop, layout = FakeHadoop(tmp_path / "live"), Layout(tmp_path / "host", "counting")
    mirror = layout.spark_dirs / "totals" / "g000001"
    SparkDir(mirror).run(0)
    dirs_of(hadoop, layout).publish(mirror)
    shutil.rmtree(hadoop.folder)
    hadoop.folder.mkdir()
    session: Any = hadoop
    moved = settle_live_dirs(session, layout, f"{BASE}/other", FlowName("counting"), are_names_final=True)
    assert moved is not None
    with pytest.raises(DamagedRecordError, match="is gone"):
        moved.publish(mirror)


def test_directories_follow_when_the_option_is_changed_or_left_out(tmp_path: Path) -> None:
    hadoop, layout = FakeHadoop(tmp_path / "live"), Layout(tmp_path / "host", "counting")
    mirror = layout.spark_dirs / "totals" / "g000001"
    SparkDir(mirror).run(0)
    dirs = dirs_of(hadoop, layout)
    dirs.publish(mirror)
    SparkDir(hadoop.at(dirs.url(mirror))).run(1)  # Spark goes on; the mirror is behind
    session: Any = hadoop
    moved = settle_live_dirs(session, layout, f"{BASE}/other", FlowName("counting"), are_names_final=True)
    assert moved is not None
    moved.publish(mirror)
    assert (hadoop.at(moved.url(mirror)) / "commits/1").exists()
    SparkDir(hadoop.at(moved.url(mirror))).run(2)
    assert settle_live_dirs(session, layout, "", FlowName("counting"), are_names_final=True) is None
    assert (mirror / "commits/2").exists()
    assert not list(hadoop.folder.rglob("commits"))


def test_a_replaced_host_with_directories_elsewhere_loses_nothing_of_its_successor(
    tmp_path: Path, hadoop: FakeHadoop
) -> None:
    settings = remote(tmp_path)
    old = SparklessFlow(tmp_path, **settings)
    try:
        old.emit(2)
        copied(old, old.checkpoint())
        hadoop.storage = tmp_path / "other"
        hadoop.storage.mkdir()
        (hadoop.storage / "table").symlink_to(tmp_path / "table")
        with running(hadoop.storage, **settings) as new:
            assert new.recovered.path == "remote"
            new.emit(1)
            new.checkpoint()
            new.emit(3)
            # The new host's start has deleted the old one's directories: its queries fail, and are started again.
            for service in old.operators.values():
                old.engine.start(service.operator, service.spark_checkpoint_dir, service.handle_batch)
            # Now the new one's are gone, its queries fail, and are started again.
            for service in new.operators.values():
                new.engine.start(service.operator, service.spark_checkpoint_dir, service.handle_batch)
            for _ in range(12):
                new.step(NUMBERS)
                time.sleep(0.02)
                new.step(TOTALS)
            new.drain()
            emitted = new.operators[NUMBERS].channel.last_batch + 1
            assert [number for number, _ in new.sink.rows()] == list(range(emitted))
    finally:
        old.stop()


# ---------------------------------------------------------------------------------------- mirrors that lag


@pytest.mark.parametrize("away", ["state", "totals/g000001/state/0", "state/0/0"])
def test_a_checkpoint_whose_mirror_was_fetched_in_part_has_its_state(
    tmp_path: Path, hadoop: FakeHadoop, away: str
) -> None:
    """A file system that fails for a moment, while a flow rests: commits are fetched first, the state comes last."""
    with running(tmp_path, retain_checkpoints=1) as flow:
        flow.emit(3)
        hadoop.away = away
        future = flow.request()
        flow.wait(future.done)
        assert future.exception() is not None
        hadoop.away = None
        epoch = flow.checkpoint()
        record = flow.checkpoints.load_record(flow.checkpoints.load_manifest(epoch), TOTALS)
        assert [file.path for file in record.subtasks[0].files]


def test_input_that_was_read_since_and_is_gone_is_found_where_spark_has_noted_it(
    tmp_path: Path, hadoop: FakeHadoop
) -> None:
    with running(tmp_path, retain_checkpoints=3) as flow:
        flow.emit(2)
        epoch = flow.checkpoint()
        flow.emit(1)
        sources = flow.spark_dir(NUMBERS) / "sources" / "0"
        sources.mkdir(parents=True)
        (sources / "0").write_text('v1\n{"path":"file:///gone.json","timestamp":1,"batchId":0}')
    with pytest.raises(LostInputError):
        SparklessFlow(tmp_path, retain_checkpoints=3, restore_to=epoch).stop()
