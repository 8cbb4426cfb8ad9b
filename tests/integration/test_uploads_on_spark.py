"""Content that Spark's executors carry to a real S3 server and back, beside the queries of a flow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.errors import ExecutorsFailedError
from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.spark.executor_jobs import SparkExecutors
from cutline.tiers.driver_transfer import DriverTransfer
from cutline.tiers.executor_transfer import ExecutorTransfer
from cutline.tiers.transfer import DOWNLOAD, UPLOAD, File, Transferred, sha256_of
from tests.support import jvm_lost_while_sending
from tests.support.payments import assert_exactly_once, payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.testing.servers.s3 import S3Server

pytestmark = pytest.mark.spark


class CountingExecutors(SparkExecutors):
    """Remembers how many files its jobs were given."""

    files = 0

    def run(self, work: Callable[[Any], Any], parts: Sequence[Any], *, limit_s: float) -> list[Any]:
        CountingExecutors.files += sum(len(part) for part in parts)
        return super().run(work, parts, limit_s=limit_s)


def blobs(root: Path, count: int, size_bytes: int) -> list[File]:
    files = []
    for _ in range(count):
        content = os.urandom(size_bytes)
        path = root / "unnamed"
        path.write_bytes(content)
        digest = sha256_of(path)
        target = root / "blobs" / digest[:2] / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        files.append(File(f"blobs/{digest[:2]}/{digest}", size_bytes))
    return files


def test_executors_carry_blobs_to_s3_and_back(spark: SparkSession, tmp_path: Path, s3_server: S3Server) -> None:
    opening = partial(open_store, s3_server.fresh_url(), s3_server.options)
    store = opening()
    executors = CountingExecutors(spark, "carrying")
    layout = Layout(tmp_path, "flow")
    root = layout.root
    root.mkdir()
    layout.identity.write_bytes(b"the flow's folder")
    driver = DriverTransfer(store, root, 1)
    # A driver that carries nothing itself: whatever is done was done by the executors.
    driver.give_up()
    carrier = ExecutorTransfer(executors, opening, layout, driver, least_bytes=1)
    files = [*blobs(root, 6, 100_000), *blobs(root, 1, 34 << 20)]
    done: list[Transferred] = []
    carrier.run(UPLOAD, files, lambda carried, _: done.append(carried))
    assert {one.file for one in done} == set(files)
    assert {info.path: info.size_bytes for info in store.walk()} == dict(files)
    shutil.rmtree(root / "blobs")
    carrier.run(DOWNLOAD, files, lambda *_: None)
    assert all(sha256_of(root / file.name) == file.name.rpartition("/")[2] for file in files)


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_job_is_cancelled_at_once_and_the_next_one_runs(spark: SparkSession) -> None:
    executors = SparkExecutors(spark, "cancelled")
    begun = time.monotonic()
    threading.Timer(1.0, executors.cancel).start()
    with pytest.raises(ExecutorsFailedError, match="cancelled"):
        executors.run(_sleep, [60.0], limit_s=120)
    with pytest.raises(ExecutorsFailedError, match="cancelled"):
        executors.run(_sleep, [60.0], limit_s=1)
    assert time.monotonic() - begun < 30
    assert executors.run(_sleep, [0.0], limit_s=30) == [0.0]
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


@pytest.mark.kill
def test_the_driver_sends_what_executors_were_sending_when_the_jvm_was_killed(tmp_path: Path) -> None:
    program = Path(jvm_lost_while_sending.__file__)
    subprocess.run([sys.executable, program, tmp_path], stdout=subprocess.DEVNULL, check=True, timeout=120)
    arrived = json.loads((tmp_path / "arrived.json").read_text())
    assert arrived == [f"file-{number}" for number in range(5)]
    assert sorted(info.path for info in open_store(str(tmp_path / "store")).walk()) == arrived


def test_a_lost_host_comes_back_with_what_executors_sent(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.spark.executor_jobs.SparkExecutors", CountingExecutors)
    options: dict[str, Any] = {
        "storage": str(tmp_path / "storage"),
        "checkpoint_interval": 0,
        "remote": s3_server.fresh_url(),
        "remote_options": s3_server.options,
        "executor_transfer_bytes": 1,
    }
    before = CountingExecutors.files
    run = payments_flow(tmp_path, card_rows=2_000, upi_rows=1_000).start(spark=spark, **options)
    run.process_all_available()
    assert run.wait_remote(run.trigger_checkpoint(), timeout="60s")
    sent = CountingExecutors.files
    assert sent > before
    run.stop()
    shutil.rmtree(tmp_path / "storage")
    run = payments_flow(tmp_path, card_rows=2_000, upi_rows=1_000).start(spark=spark, **options)
    assert run.status().recovery.path == "remote"
    assert CountingExecutors.files > sent
    run.process_all_available()
    run.trigger_checkpoint()
    run.stop()
    assert_exactly_once(tmp_path, card_rows=2_000, upi_rows=1_000)
