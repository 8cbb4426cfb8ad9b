"""A deploy that renames, drops and adds operators, restored in place on real Spark."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from cutline.connectors.generator.spark_reader import payments
from cutline.flow import Flow
from cutline.sinks import Delta, Parquet
from tests.support.orders import ledger, start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROWS, KEYS = 2_000, 10


def shop(tables: Path, *, is_new: bool) -> Flow:
    """The deploy: ``totals`` becomes ``sums``, ``audit`` goes, ``counts`` comes."""
    flow = Flow("shop")

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        options = {"rows": ROWS, "keys": KEYS, "rows_per_batch": 100, "rows_per_second": 400}
        return spark.readStream.format("cutline_generator").options(**options).load()

    @flow.operator("sums" if is_new else "totals", inputs=[orders], subtasks=2)
    def sums(orders: DataFrame) -> DataFrame:
        return orders.groupBy("merchant").agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))

    flow.sink(orders, Parquet(str(tables / "ledger")), name="ledger")
    flow.sink(sums, Delta(str(tables / "totals")), output_mode="update", name="totals")
    if is_new:

        @flow.operator(inputs=[sums], subtasks=1)
        def changes(sums: DataFrame) -> DataFrame:
            return sums.select("merchant", "orders")

        @flow.operator(inputs=[orders], subtasks=1)
        def counts(orders: DataFrame) -> DataFrame:
            return orders.groupBy("merchant").agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))

        flow.sink(changes, Parquet(str(tables / "changes")), name="changes")
        flow.sink(counts, Delta(str(tables / "counts")), output_mode="update", name="counts")
    else:

        @flow.operator(inputs=[orders])
        def audit(orders: DataFrame) -> DataFrame:
            return orders.where("amount > 5000")

        flow.sink(audit, Parquet(str(tables / "audit")), name="audit")
    return flow


def newest(table: Path) -> dict[int, tuple[int, int]]:
    """Per merchant: its newest orders and amount."""
    found: dict[int, tuple[int, int]] = {}
    for row in DeltaTable(str(table)).to_pyarrow_table().to_pylist():
        found[row["merchant"]] = max(found.get(row["merchant"], (0, 0)), (row["orders"], row["amount"]))
    return found


def truth(first: int) -> dict[int, tuple[int, int]]:
    """The same of the orders from ``first`` on, without Spark."""
    columns = payments(first, ROWS, keys=KEYS, seed=0)
    found: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for merchant, amount in zip(columns["merchant"].tolist(), columns["amount"].tolist(), strict=True):
        orders, total = found[merchant]
        found[merchant] = (orders + 1, total + amount)
    return dict(found)


@pytest.mark.soak
def test_renamed_dropped_and_added_in_place_the_tables_are_as_if_it_had_always_been_so(
    spark: SparkSession, tmp_path: Path
) -> None:
    run = start(spark, shop(tmp_path, is_new=False), tmp_path)
    while not run.status().operators["totals"].rows:
        assert not run.await_termination("20ms")
    run.savepoint("before-deploy")
    at_savepoint = len(ledger(tmp_path))
    while len(ledger(tmp_path)) == at_savepoint:
        run.trigger_checkpoint()
    run.stop()

    changes = {"rename": {"totals": "sums"}, "allow_dropped": True}
    run = start(spark, shop(tmp_path, is_new=True), tmp_path, restore_to="before-deploy", **changes)
    fates = {row.now or row.was: row.fate for row in run.status().recovery.operators}
    assert fates == {"orders": "kept", "sums": "renamed", "audit": "dropped", "changes": "added", "counts": "added"}
    assert len(ledger(tmp_path)) == at_savepoint
    run.trigger_checkpoint()
    run.stop()
    run = start(spark, shop(tmp_path, is_new=True), tmp_path)
    assert run.status().recovery.path == "resume"
    run.process_all_available()
    run.stop()
    assert ledger(tmp_path) == list(range(ROWS))
    assert newest(tmp_path / "totals") == truth(0), "the renamed operator has kept its state"
    assert newest(tmp_path / "counts") == truth(at_savepoint), "the new one has seen what came after the savepoint"
