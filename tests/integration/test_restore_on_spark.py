"""Rollback and clone on real Spark, with real tables that readers see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from cutline.flow import Flow
from cutline.model.ids import FlowName
from cutline.model.layout import Layout
from cutline.runtime.stores import store_at
from cutline.savepoints.store import Savepoints
from cutline.sinks import Delta, Parquet
from tests.support.orders import ledger, start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROWS = 3_000


def orders_flow(name: str, tables: Path, *, source: str = "orders") -> Flow:
    flow = Flow(name)

    @flow.operator(source)
    def orders(spark: SparkSession) -> DataFrame:
        options = {"rows": ROWS, "keys": 10, "rows_per_batch": 100, "rows_per_second": 400}
        return spark.readStream.format("cutline_generator").options(**options).load()

    @flow.operator(inputs=[orders], subtasks=2)
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("merchant").agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))

    flow.sink(orders, Parquet(str(tables / "ledger")), name="ledger")
    flow.sink(totals, Delta(str(tables / "totals")), output_mode="update", name="totals")
    return flow


def totals(tables: Path) -> dict[int, tuple[int, int]]:
    """Per merchant: its newest orders and amount."""
    newest: dict[int, tuple[int, int]] = {}
    if not (tables / "totals" / "_delta_log").exists():
        return newest
    for row in DeltaTable(str(tables / "totals")).to_pyarrow_table().to_pylist():
        newest[row["merchant"]] = max(newest.get(row["merchant"], (0, 0)), (row["orders"], row["amount"]))
    return newest


def wait_for_rows(run: Any) -> None:
    """Until something has been counted since now."""
    rows = run.status().operators["totals"].rows
    while run.status().operators["totals"].rows == rows:
        assert not run.await_termination("20ms")


@pytest.mark.soak  # by commands: test_two_in_the_morning
def test_taken_back_to_the_fourth_of_ten_epochs_the_tables_end_as_if_it_had_never_gone_further(
    spark: SparkSession, tmp_path: Path
) -> None:
    run = start(spark, orders_flow("orders", tmp_path / "truth"), tmp_path / "truth")
    run.process_all_available()
    run.stop()
    run = start(spark, orders_flow("orders", tmp_path), tmp_path)
    epochs, seen = [], []
    for _ in range(10):
        wait_for_rows(run)
        epochs.append(run.trigger_checkpoint())
        seen.append((ledger(tmp_path), totals(tmp_path)))
    run.stop()
    assert len(ledger(tmp_path)) > len(seen[3][0]) > 0

    run = start(spark, orders_flow("orders", tmp_path), tmp_path, restore_to=epochs[3])
    assert (run.status().recovery.path, run.status().recovery.epoch) == ("local", epochs[3])
    assert (ledger(tmp_path), totals(tmp_path)) == seen[3], "readers see what they saw then"
    run.process_all_available()
    run.stop()
    assert ledger(tmp_path) == ledger(tmp_path / "truth") == list(range(ROWS))
    assert totals(tmp_path) == totals(tmp_path / "truth")


@pytest.mark.soak  # without Spark it runs with the other tests
def test_a_clone_and_its_origin_differ_only_by_what_each_has_done_since(spark: SparkSession, tmp_path: Path) -> None:
    run = start(spark, orders_flow("first", tmp_path / "first"), tmp_path)
    wait_for_rows(run)
    card = run.savepoint("branch")
    at_savepoint = ledger(tmp_path / "first")
    savepoints = Savepoints(Layout(tmp_path / "storage", "first"), store_at)
    target = Layout(tmp_path / "storage", "second")
    savepoints.clone("branch", target, FlowName("second"), rename={"orders": "purchases"})
    run.stop()
    second = start(spark, orders_flow("second", tmp_path / "second", source="purchases"), tmp_path)
    assert (second.status().recovery.path, second.status().recovery.epoch) == ("local", card.epoch)
    second.process_all_available()
    second.stop()
    run = start(spark, orders_flow("first", tmp_path / "first"), tmp_path)
    assert run.status().recovery.path == "resume"
    run.process_all_available()
    run.stop()
    assert ledger(tmp_path / "first") == list(range(ROWS))
    assert sorted([*at_savepoint, *ledger(tmp_path / "second")]) == list(range(ROWS)), "it goes on where it lies"
    assert totals(tmp_path / "first") == totals(tmp_path / "second"), "and with the state it holds"
