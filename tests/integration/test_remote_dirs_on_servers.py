"""Spark's directories on a real HDFS, and through S3A on a real S3 server, which are killed and restarted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError

from cutline.errors import ConfigError, DamagedRecordError, Refused
from cutline.runtime.handle import RunningFlow
from cutline.spark.hadoop_errors import asking_hadoop
from cutline.spark.remote_dirs import HadoopDirs
from cutline.testing.servers import jars
from cutline.testing.servers.s3 import SECRET_KEY, S3Server
from tests.support.hadoop import Place, configured, place_on
from tests.support.payments import assert_exactly_once, payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kill]
KINDS = ("hdfs", "s3a")
ROWS = 2_000
WAIT_SECONDS = 90.0
#: Classes of Spark that write its checkpoint files.
PACKAGE = "org.apache.spark.sql.execution.streaming.checkpointing"
CAREFUL = f"{PACKAGE}.FileContextBasedCheckpointFileManager"
CARELESS = "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager"


@pytest.fixture(params=KINDS)
def place(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[Place]:
    found = place_on(request.param, request)
    for _ in configured(spark, found.settings):
        yield found
    found.start()


def start(spark: SparkSession, tmp_path: Path, place: Place, *, rate: float = 0.0, **options: Any) -> RunningFlow:
    flow = payments_flow(tmp_path, card_rows=ROWS, upi_rows=ROWS, rows_per_second=rate)
    settings = {"checkpoint_interval": 0, "storage": str(tmp_path / "storage"), "spark_dirs": place.url, **options}
    return flow.start(spark=spark, **settings)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.timeout(200)
def test_a_flow_waits_for_its_file_system_and_continues(spark: SparkSession, tmp_path: Path, place: Place) -> None:
    run = start(spark, tmp_path, place, rate=160)
    try:
        wait(lambda: run.status().operators["totals"].batches >= 1, "there are no batches")
        run.trigger_checkpoint()
        place.server.kill()
        wait(lambda: run.status().state == "waiting", "the flow does not wait")
        # At first a query fails in the JVM, which does not say whose file system it was; then its start does.
        server = "/".join(place.url.split("/")[:3])
        wait(lambda: any(one.resource == server for one in run.status().waiting), f"{run.status().waiting}")
        assert SECRET_KEY not in f"{run.status()}"
        place.start()
        run.process_all_available()
        assert run.status().state == "running"
    finally:
        run.stop()
    assert_exactly_once(tmp_path, card_rows=ROWS, upi_rows=ROWS)
    assert SECRET_KEY not in (tmp_path / "storage" / "payments" / "live-dirs.json").read_text()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["rocksdb-changelog", "rocksdb", "heap"])
@pytest.mark.parametrize("lost", ["mirrors", "directory", "both"])
def test_it_comes_back_from_what_is_left(
    spark: SparkSession, tmp_path: Path, place: Place, lost: str, backend: str
) -> None:
    run = start(spark, tmp_path, place, rate=1_000, state_backend=backend)
    wait(lambda: run.status().operators["totals"].batches >= 2, "there are no batches")
    run.trigger_checkpoint()
    run.stop()
    dirs = dirs_at(spark, tmp_path, home(tmp_path))
    if lost != "directory":
        shutil.rmtree(tmp_path / "storage" / "payments" / "spark")
    if lost == "directory":
        with asking_hadoop(place.url):
            dirs._files.delete(dirs._path(f"{home(tmp_path)}/totals"), True)
    elif lost == "both":
        dirs.remove()
    run = start(spark, tmp_path, place, rate=1_000, state_backend=backend)
    assert run.status().recovery.path == {"mirrors": "resume", "directory": "regional", "both": "local"}[lost]
    run.process_all_available()
    run.stop()
    assert_exactly_once(tmp_path, card_rows=ROWS, upi_rows=ROWS)


def home(tmp_path: Path) -> str:
    """Where the directories of this flow's folder are."""
    record = json.loads((tmp_path / "storage" / "payments" / "live-dirs.json").read_text())
    return str(record["body"]["url"])


def dirs_at(spark: SparkSession, tmp_path: Path, url: str) -> HadoopDirs:
    return HadoopDirs(spark, url, tmp_path / "mirrors", are_names_final=True)


def test_a_directory_is_put_in_place_as_a_whole_or_again(spark: SparkSession, tmp_path: Path, place: Place) -> None:
    dirs, mirror = dirs_at(spark, tmp_path, f"{place.url}/flow"), tmp_path / "mirrors" / "op" / "g000001"
    for name in ("state/0/0/1_ab.changelog", "state/0/0/SSTs/1-ab.sst", "commits/0", "metadata"):
        (mirror / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror / name).write_text(name)
    # Of a start that was killed on its way: not authoritative without the file beside it.
    half = HadoopDirs(spark, f"{place.url}/flow", tmp_path / "half", are_names_final=True)
    (tmp_path / "half/op/g000001/offsets").mkdir(parents=True)
    (tmp_path / "half/op/g000001/offsets/9").write_text("of an earlier start")
    half.publish(tmp_path / "half/op/g000001")
    with asking_hadoop(place.url):
        dirs._files.delete(dirs._path(dirs._note(mirror)), False)
    dirs.fetch(mirror)
    assert not (mirror / "offsets").exists()
    dirs.publish(mirror)
    assert not dirs.has(mirror, "offsets/9")
    assert dirs.read(mirror, "state/0/0/SSTs/1-ab.sst") == b"state/0/0/SSTs/1-ab.sst"
    # From now on what is there counts.
    (mirror / "metadata").write_text("changed here")
    (mirror / "state/0/0/1_ab.changelog").unlink()
    dirs.publish(mirror)
    dirs.fetch(mirror)
    assert (mirror / "metadata").read_text() == "metadata"
    assert (mirror / "state/0/0/1_ab.changelog").exists()
    # Another generation takes its place.
    shutil.copytree(mirror, second := mirror.parent / "g000002", ignore=shutil.ignore_patterns(".*"))
    dirs.publish(second)
    assert dirs.has(second, "commits/0")
    assert not dirs.has(mirror, "commits/0")
    with pytest.raises(FileNotFoundError):
        dirs.read(second, "offsets/7")
    with pytest.raises(DamagedRecordError, match="is gone"):
        dirs.fetch(mirror)


def test_a_mirror_follows_a_file_that_is_replaced_within_a_second(
    spark: SparkSession, tmp_path: Path, place: Place
) -> None:
    """Object stores tell whole seconds only."""
    dirs = HadoopDirs(spark, f"{place.url}/flow", tmp_path / "mirrors", are_names_final=False)
    mirror = tmp_path / "mirrors" / "op" / "g000001"
    mirror.mkdir(parents=True)
    dirs.publish(mirror)
    for content in (b"one", b"two", b"six"):
        out = dirs._files.create(dirs._path(f"{dirs.url(mirror)}/1.delta"), True)
        out.write(bytearray(content))
        out.close()
        dirs.fetch(mirror)
        assert (mirror / "1.delta").read_bytes() == content


def test_a_file_system_that_spark_cannot_open_is_refused_at_once(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Refused) as failed:
        HadoopDirs(spark, "s4a://bucket/live", tmp_path, are_names_final=True)
    assert "s4a" in failed.value.what
    assert "spark.jars" in failed.value.next_step


# ------------------------------------------------------------------ which class writes Spark's files


def manager(spark: SparkSession, name: str, place: Place) -> Any:
    found: Any = spark._jvm
    for part in name.split("."):
        found = getattr(found, part)
    path: Any = spark._jvm
    context: Any = spark.sparkContext._jsc
    return found(path.org.apache.hadoop.fs.Path(place.url), context.hadoopConfiguration())


def begin(spark: SparkSession, files: Any, url: str, content: bytes, *, replace: bool) -> Any:
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(url)
    files.mkdirs(path.getParent())
    out = files.createAtomic(path, replace)
    out.write(bytearray(content))
    return out


def test_spark_replaces_a_file_only_where_it_was_told_to(spark: SparkSession, tmp_path: Path, place: Place) -> None:
    files, url = manager(spark, CAREFUL, place), f"{place.url}/op/offsets/0"
    begin(spark, files, url, b"one", replace=False).close()
    with pytest.raises(Py4JJavaError, match="already exists"):
        begin(spark, files, url, b"two", replace=False).close()
    dirs = dirs_at(spark, tmp_path, place.url)
    assert dirs.read(tmp_path / "mirrors" / "op", "offsets/0") == b"one"
    begin(spark, files, url, b"three", replace=True).close()
    assert dirs.read(tmp_path / "mirrors" / "op", "offsets/0") == b"three"
    local = manager(spark, f"{PACKAGE}.FileSystemBasedCheckpointFileManager", place)
    begin(spark, local, url, b"four", replace=True).close()
    assert dirs.read(tmp_path / "mirrors" / "op", "offsets/0") == b"three", "then Cutline need not avoid it here"


def test_a_class_that_ignores_failed_writes_is_refused(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if jars.why_not(jars.SPARK_CLOUD):
        pytest.skip(jars.why_not(jars.SPARK_CLOUD))
    place = place_on("s3a", request)
    server: S3Server = request.getfixturevalue("s3_server")
    for _ in configured(spark, place.settings):
        outs = {
            name: begin(spark, manager(spark, name, place), f"{place.url}/{name}", b"state", replace=False)
            for name in (CAREFUL, CARELESS)
        }
        server.kill()
        try:
            outs[CARELESS].close()  # it says nothing
            with pytest.raises(Py4JJavaError, match="Connection refused"):
                outs[CAREFUL].close()
        finally:
            server.start()
        dirs = dirs_at(spark, tmp_path, place.url)
        assert not dirs.has(tmp_path / "mirrors", CARELESS), "then Cutline need not refuse it"
        spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", CARELESS)
        try:
            with pytest.raises(ConfigError, match="ignores failed writes"):
                start(spark, tmp_path, place)
        finally:
            spark.conf.unset("spark.sql.streaming.checkpointFileManagerClass")
