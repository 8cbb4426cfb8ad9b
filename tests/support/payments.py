"""A small payments flow for tests on real Spark, and the truth about what it must publish."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyspark.sql import functions as F

from cutline.connectors.generator.spark_reader import payments
from cutline.flow import Flow
from cutline.sinks import Delta, Parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEYS = 50
SEED = 3


def payments_flow(
    folder: Path, *, card_rows: int, upi_rows: int, rows_per_second: float = 0, rows_per_batch: int = 1000
) -> Flow:
    """Two sources, totals of both with state, a ledger of one: a Delta and a Parquet sink."""
    flow = Flow("payments")

    def source(spark: SparkSession, first: int, rows: int) -> DataFrame:
        return (
            spark.readStream.format("cutline_generator")
            .options(first=first, rows=rows, keys=KEYS, seed=SEED, rows_per_batch=rows_per_batch)
            .option("rows_per_second", rows_per_second)
            .load()
        )

    @flow.operator()
    def cards(spark: SparkSession) -> DataFrame:
        return source(spark, 0, card_rows)

    @flow.operator()
    def upi(spark: SparkSession) -> DataFrame:
        return source(spark, card_rows, upi_rows)

    @flow.operator(inputs=[cards, upi], subtasks=2)
    def totals(cards: DataFrame, upi: DataFrame) -> DataFrame:
        return cards.union(upi).groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("amount").alias("amount"))

    flow.sink(cards, Parquet(str(folder / "ledger")), name="ledger")
    flow.sink(totals, Delta(str(folder / "totals")), output_mode="update", name="totals")
    return flow


def ledger_ids(folder: Path) -> list[int]:
    """The payments that readers of the ledger see."""
    if not any((folder / "ledger").glob("cutline_epoch=*")):
        return []
    table = ds.dataset(str(folder / "ledger"), format="parquet", partitioning="hive").to_table(columns=["payment_id"])
    return [int(value) for value in table.column("payment_id").to_pylist()]


def published_totals(folder: Path) -> dict[int, tuple[int, int]]:
    """Merchant → (payments, amount), by the newest update of each; fails if an update was published twice."""
    rows = DeltaTable(str(folder / "totals")).to_pyarrow_table().to_pylist()
    updates = Counter((row["merchant"], row["payments"]) for row in rows)
    assert not [update for update, times in updates.items() if times > 1], "an update was published twice"
    newest: dict[int, tuple[int, int]] = {}
    for row in rows:
        newest[row["merchant"]] = max(newest.get(row["merchant"], (0, 0)), (row["payments"], row["amount"]))
    return newest


def true_totals(rows: int) -> dict[int, tuple[int, int]]:
    """The same, computed from the numbers alone."""
    columns = payments(0, rows, keys=KEYS, seed=SEED)
    truth: dict[int, tuple[int, int]] = {}
    for merchant, amount in zip(columns["merchant"].tolist(), columns["amount"].tolist(), strict=True):
        count, total = truth.get(merchant, (0, 0))
        truth[merchant] = (count + 1, total + amount)
    return truth


def assert_exactly_once(folder: Path, *, card_rows: int, upi_rows: int) -> None:
    """Everything is published, nothing twice."""
    ids = ledger_ids(folder)
    assert len(ids) == len(set(ids)), "the ledger holds a payment twice"
    assert set(ids) == set(range(card_rows)), "the ledger lacks payments"
    assert published_totals(folder) == true_totals(card_rows + upi_rows)
