"""A two-input operator with one slow and one fast input, on real Spark: aligned blocks, unaligned records."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.channels.log import ChannelLog
from cutline.connectors.replay_guard import ReplayGuard
from cutline.flow import Flow
from cutline.model.checkpoint import Manifest
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.model.layout import Layout
from cutline.runtime.handle import RunningFlow
from cutline.sinks import Delta
from cutline.storage.local import LocalStore
from tests.support.payments import KEYS, SEED, published_totals, true_totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FAST_ROWS, SLOW_ROWS = 30_000, 3_000


def uneven_flow(tmp_path: Path, hold: Path) -> Flow:
    """``slow`` stands still inside a batch for as long as the file ``hold`` exists; ``fast`` never waits."""
    flow = Flow("uneven")
    held = str(hold)

    def source(spark: SparkSession, first: int, rows: int, pace: int) -> DataFrame:
        generator = spark.readStream.format("cutline_generator")
        # Small batches: on a slow machine there is still something to read when the test looks.
        return generator.options(
            first=first, rows=rows, keys=KEYS, seed=SEED, rows_per_second=pace, rows_per_batch=pace // 3
        ).load()

    @flow.operator()
    def fast(spark: SparkSession) -> DataFrame:
        return source(spark, 0, FAST_ROWS, 3_000)

    @flow.operator()
    def trickle(spark: SparkSession) -> DataFrame:
        return source(spark, FAST_ROWS, SLOW_ROWS, 300)

    @flow.operator(inputs=[trickle])
    def slow(rows: DataFrame) -> DataFrame:
        def wait(batches: Any) -> Any:
            import os
            import time as clock

            for batch in batches:
                while batch.num_rows and os.path.exists(held):
                    clock.sleep(0.02)
                yield batch

        # One task: it must not hold every core while it waits.
        return rows.coalesce(1).mapInArrow(wait, rows.schema)

    @flow.operator(inputs=[fast, slow], subtasks=2)
    def totals(fast: DataFrame, slow: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        both = fast.union(slow)
        return both.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("amount").alias("amount"))

    flow.sink(totals, Delta(str(tmp_path / "totals")), output_mode="update")
    return flow


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def batches(run: RunningFlow, operator: str) -> int:
    return int(run.status().operators[operator].batches)


def request(run: RunningFlow, mode: str) -> Any:
    """Ask for a checkpoint without waiting for it."""
    return run._parts.coordinator.request_checkpoint(run._checkpoints.options_for(mode))


def channel_of(run: RunningFlow, operator: str) -> ChannelLog:
    return run._parts.workers.operators[OperatorId(operator)].channel


def barrier_of(run: RunningFlow, operator: str) -> Position:
    return channel_of(run, operator).barriers()[-1].seq


def position_in(run: RunningFlow, reader: str, channel: str) -> Position:
    return channel_of(run, reader).last_positions[OperatorId(channel)]


def load_manifest(tmp_path: Path, epoch: Epoch) -> Manifest:
    return LocalStore.open(Layout(tmp_path / "storage", "uneven"), ReplayGuard()).checkpoints.load_manifest(epoch)


def in_flight(manifest: Manifest, channel: str, consumer: str) -> int:
    rows = manifest.channels[OperatorId(channel)].in_flight[OperatorId(consumer)].rows
    assert rows is not None, "its barrier had appeared"
    return rows


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["aligned", "unaligned"])
def test_one_slow_and_one_fast_input(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    hold = tmp_path / "hold"
    flow = uneven_flow(tmp_path, hold)
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
    wait_until(lambda: batches(run, "totals") >= 2 and batches(run, "slow") >= 1)
    # The slow operator now stands still, with data it has not processed waiting in its channel.
    hold.touch()
    wait_until(lambda: run.status().operators["trickle"].backlog_rows["slow"] > 0)
    checkpoint = request(run, mode)
    if mode == "aligned":
        # Its barrier cannot pass the batch it is in. The fast input is read up to its own barrier and no further.
        wait_until(lambda: bool(run.status().operators["totals"].aligning))
        wait_until(lambda: run.status().operators["totals"].aligning == {1: ["slow"]})
        produced = batches(run, "fast")
        wait_until(lambda: batches(run, "fast") >= produced + 3)
        assert run.status().operators["fast"].backlog_rows["totals"] > 0
        barrier, position = barrier_of(run, "fast"), position_in(run, "totals", "fast")
        assert position <= barrier, "the fast input was read past its barrier"
        assert not checkpoint.done()
        hold.unlink()
        epoch = checkpoint.result(60)
        after = batches(run, "totals")
        wait_until(lambda: batches(run, "totals") > after)
        manifest = load_manifest(tmp_path, epoch)
        assert in_flight(manifest, "fast", "totals") == in_flight(manifest, "slow", "totals") == 0
        assert in_flight(manifest, "trickle", "slow") == 0
    else:
        # It cuts at its last finished batch and the rest is recorded as data in flight; nobody waits.
        epoch = checkpoint.result(60)
        assert hold.exists(), "the checkpoint completed while the slow operator stood still"
        assert in_flight(load_manifest(tmp_path, epoch), "trickle", "slow") > 0
        hold.unlink()
    run.stop()

    shutil.rmtree(tmp_path / "storage" / "uneven" / "spark")
    run = uneven_flow(tmp_path, hold).start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
    assert run.status().recovery.path == "local"
    assert run.status().recovery.epoch == epoch
    run.process_all_available()
    run.stop()
    assert published_totals(tmp_path) == true_totals(FAST_ROWS + SLOW_ROWS)


def test_an_alignment_that_takes_too_long_becomes_unaligned(spark: SparkSession, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    run = uneven_flow(tmp_path, hold).start(
        spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, mode="auto", alignment_timeout="200ms"
    )
    wait_until(lambda: batches(run, "totals") >= 2 and batches(run, "slow") >= 1)
    hold.touch()
    wait_until(lambda: run.status().operators["trickle"].backlog_rows["slow"] > 0)
    epoch = run.trigger_checkpoint(timeout="60s")
    assert hold.exists()
    manifest = load_manifest(tmp_path, epoch)
    slow = manifest.operators[OperatorId("slow")]
    assert slow.mode == "unaligned"
    assert slow.alignment_ms >= 200
    hold.unlink()
    run.stop()
