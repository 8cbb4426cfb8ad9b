"""Spark's directories on a real HDFS, and through S3A on a real S3 server, that are killed and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.runtime.handle import RunningFlow
from tests.support.hadoop import Place, configured, place_on
from tests.support.payments import assert_exactly_once, payments_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.kill]
KINDS = ("hdfs", "s3a")
WAIT_SECONDS = 60.0


@pytest.fixture(params=KINDS)
def place(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[Place]:
    found = place_on(request.param, request)
    for _ in configured(spark, found.settings):
        yield found
    found.start()


def start(spark: SparkSession, tmp_path: Path, place: Place, *, upi: int, **options: Any) -> RunningFlow:
    flow = payments_flow(tmp_path, card_rows=2_000, upi_rows=upi, **options.pop("flow", {}))
    settings = {"checkpoint_interval": 0, "storage": str(tmp_path / "storage"), "spark_dirs": place.url, **options}
    return flow.start(spark=spark, **settings)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.timeout(200)
def test_a_flow_waits_for_its_file_system_and_continues(spark: SparkSession, tmp_path: Path, place: Place) -> None:
    t = time.monotonic()
    run = start(spark, tmp_path, place, upi=2_000, flow={"rows_per_second": 400})
    print("started", time.monotonic() - t)
    wait(lambda: run.status().operators["totals"].batches >= 2, "no batches")
    print("batches", time.monotonic() - t)
    run.trigger_checkpoint()
    print("checkpoint", time.monotonic() - t)
    place.server.kill()
    wait(lambda: run.status().state == "waiting", f"{run.status()}")
    print("waiting", time.monotonic() - t, run.status().waiting, run.status().health)
    time.sleep(5)
    print("waiting", time.monotonic() - t, run.status().waiting, run.status().health)
    place.start()
    print("server back", time.monotonic() - t)
    run.process_all_available()
    print("processed", time.monotonic() - t)
    assert run.status().state == "running"
    run.stop()
    print("stopped", time.monotonic() - t)
    assert_exactly_once(tmp_path, card_rows=2_000, upi_rows=2_000)
    for f in (tmp_path / "storage/payments/traces").glob("*"):
        print(f, f.read_text()[:6000])
