"""Spark's directories on a file system of Spark's own: mirrored, put in place as a whole, and restored to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.errors import ConfigError
from cutline.runtime.handle import RunningFlow
from cutline.spark.remote_dirs import HadoopDirs
from tests.support.payments import assert_exactly_once, payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def elsewhere(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A file system that only Spark's Hadoop client can open, over a folder that the test can look into."""
    (tmp_path / "live").mkdir()
    context: Any = spark.sparkContext._jsc
    name = f"test{abs(hash(str(tmp_path)))}"
    context.hadoopConfiguration().set(f"fs.viewfs.mounttable.{name}.link./live", (tmp_path / "live").as_uri())
    yield f"viewfs://{name}/live"
    context.hadoopConfiguration().unset(f"fs.viewfs.mounttable.{name}.link./live")


def start(spark: SparkSession, tmp_path: Path, elsewhere: str, *, upi: int, **options: Any) -> RunningFlow:
    flow = payments_flow(tmp_path, card_rows=2_000, upi_rows=upi)
    settings = {"checkpoint_interval": 0, "storage": str(tmp_path / "storage"), "spark_dirs": elsewhere, **options}
    return flow.start(spark=spark, **settings)


def home(tmp_path: Path) -> Path:
    """Where the directories of this life of the flow's folder are."""
    [folder] = (tmp_path / "live" / "payments").iterdir()
    return folder


def lose_directory(tmp_path: Path) -> None:
    [folder] = (home(tmp_path) / "totals").glob("g??????")
    shutil.rmtree(folder)


def lose_mirrors(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "storage" / "payments" / "spark")


def lose_both(tmp_path: Path) -> None:
    lose_mirrors(tmp_path)
    shutil.rmtree(tmp_path / "live" / "payments")


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "mirrors": (lose_mirrors, "resume", "rocksdb-changelog"),
    "directory": (lose_directory, "regional", "rocksdb-changelog"),
    "both": (lose_both, "local", "rocksdb-changelog"),
    "both, heap": (lose_both, "local", "heap"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.soak) if case == "both" else case for case in CASES]
)
def test_it_comes_back_from_what_is_left(spark: SparkSession, tmp_path: Path, elsewhere: str, case: str) -> None:
    damage, path, backend = CASES[case]
    run = start(spark, tmp_path, elsewhere, upi=1_000, state_backend=backend)
    run.process_all_available()
    epoch = run.trigger_checkpoint()
    run.stop()
    assert {one.name for one in home(tmp_path).iterdir()} == {"cards", "totals", "upi"}
    damage(tmp_path)
    run = start(spark, tmp_path, elsewhere, upi=2_000, state_backend=backend)
    recovery = run.status().recovery
    assert recovery.path == path, recovery
    if path != "resume":
        assert recovery.epoch == epoch
        # The directory of the life before is gone with it.
        assert len(list((home(tmp_path) / "totals").glob("g??????"))) == 1
    run.process_all_available()
    run.stop()
    assert_exactly_once(tmp_path, card_rows=2_000, upi_rows=2_000)


def dirs_of(spark: SparkSession, tmp_path: Path, elsewhere: str, *, are_names_final: bool = True) -> HadoopDirs:
    return HadoopDirs(spark, f"{elsewhere}/flow", tmp_path / "mirrors", are_names_final=are_names_final)


def test_a_mirror_that_was_put_in_place_half_is_put_there_again(
    spark: SparkSession, tmp_path: Path, elsewhere: str
) -> None:
    """Killed on the way there: what is there is not the truth, the mirror is."""
    dirs, mirror = dirs_of(spark, tmp_path, elsewhere), tmp_path / "mirrors" / "op" / "g000001"
    (mirror / "state/0/0").mkdir(parents=True)
    (mirror / "state/0/0/1_ab.changelog").write_bytes(b"state")
    (mirror / "metadata").write_text("{}")
    there = tmp_path / "live" / "flow" / "op" / "g000001"
    there.mkdir(parents=True)
    (there / "of a life before").write_text("?")
    dirs.fetch(mirror)
    assert (mirror / "state/0/0/1_ab.changelog").exists()
    dirs.publish(mirror)
    assert sorted(path.name for path in there.rglob("*") if not path.name.startswith(".")) == [
        "0",
        "0",
        "1_ab.changelog",
        "metadata",
        "state",
    ]
    (mirror / "metadata").write_text("changed here")
    dirs.publish(mirror)
    assert (there / "metadata").read_text() == "{}"


def test_a_mirror_follows_what_is_new_changed_and_gone(spark: SparkSession, tmp_path: Path, elsewhere: str) -> None:
    dirs = dirs_of(spark, tmp_path, elsewhere, are_names_final=False)
    mirror = tmp_path / "mirrors" / "op" / "g000001"
    mirror.mkdir(parents=True)
    dirs.publish(mirror)
    there = tmp_path / "live" / "flow" / "op" / "g000001"
    (there / "state/0/0").mkdir(parents=True)
    (there / "state/0/0/1.delta").write_bytes(b"one")
    (there / ".2.delta.tmp").write_bytes(b"under way")
    dirs.fetch(mirror)
    assert (mirror / "state/0/0/1.delta").read_bytes() == b"one"
    assert not (mirror / ".2.delta.tmp").exists()
    (there / "state/0/0/1.delta").unlink()
    (there / "state/0/0/1.delta").write_bytes(b"another")
    (there / "state/0/0/2.delta").write_bytes(b"two")
    dirs.fetch(mirror)
    assert (mirror / "state/0/0/1.delta").read_bytes() == b"another"
    shutil.rmtree(there / "state/0")
    dirs.fetch(mirror)
    assert not (mirror / "state/0").exists()
    assert dirs.has(mirror, "state")
    assert not dirs.has(mirror, "state/0")
    with pytest.raises(FileNotFoundError):
        dirs.read(mirror, "offsets/7")


@pytest.mark.parametrize("options", [{"spark_dirs": "some/folder"}, {"mode": "per-operator"}])
def test_what_cannot_work_is_refused(
    spark: SparkSession, tmp_path: Path, elsewhere: str, options: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="spark_dirs"):
        start(spark, tmp_path, elsewhere, upi=10, **options)
