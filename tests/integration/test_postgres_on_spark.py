"""Two PostgreSQL tables of one flow on real Spark: they never disagree, also not when a person takes the flow back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from pyspark.sql import functions as F

from cutline.connectors.generator.spark_reader import payments as true_payments
from cutline.flow import Flow
from cutline.sinks import Postgres
from cutline.testing.servers.postgres import PostgresServer
from tests.support.payments import KEYS, SEED, true_totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.runtime.handle import RunningFlow

ROWS = 3_000
#: Everything that is in the one table is counted in the other.
AGREE = """
    SELECT (SELECT count(*) FROM ledger), (SELECT coalesce(sum(amount), 0) FROM ledger),
           (SELECT coalesce(sum(payments), 0) FROM totals), (SELECT coalesce(sum(amount), 0) FROM totals)
"""


def start(spark: SparkSession, tmp_path: Path, dsn: str, restore_to: int | None = None) -> RunningFlow:
    flow = Flow("payments")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        read = spark.readStream.format("cutline_generator")
        return read.options(rows=ROWS, keys=KEYS, seed=SEED, rows_per_batch=300, rows_per_second=3_000).load()

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("amount").alias("amount"))

    flow.sink(payments, Postgres(dsn, "ledger"), name="ledger")
    flow.sink(totals, Postgres(dsn, "totals", mode="upsert", key=["merchant"]), output_mode="update", name="totals")
    # Aligned: an epoch holds exactly what both have read.
    return flow.start(
        spark=spark,
        storage=str(tmp_path),
        checkpoint_interval="300ms",
        retain_checkpoints=50,
        mode="aligned",
        restore_to=restore_to,
    )


@contextmanager
def watching(dsn: str) -> Iterator[set[tuple[int, ...]]]:
    """All the while somebody reads both tables in one query."""
    seen: set[tuple[int, ...]] = set()
    is_over = threading.Event()

    def watch() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not is_over.wait(0.02):
                try:
                    seen.add(tuple(map(int, connection.execute(AGREE).fetchone() or ())))
                except psycopg.errors.UndefinedTable:
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


@pytest.mark.spark
def test_two_tables_agree_at_every_moment(spark: SparkSession, tmp_path: Path, postgres_server: PostgresServer) -> None:
    dsn = postgres_server.fresh_database()
    with watching(dsn) as seen:
        run = start(spark, tmp_path, dsn)
        first = run.trigger_checkpoint(timeout=120)
        run.trigger_checkpoint(timeout=120)
        run.stop()
        run = start(spark, tmp_path, dsn, restore_to=first)
        assert run.status().recovery.path == "local"
        run.process_all_available()
        run.stop()
    wrong = [counts for counts in seen if counts[:2] != counts[2:]]
    assert not wrong and len(seen) >= 3, (wrong, seen)
    truth = true_payments(0, ROWS, keys=KEYS, seed=SEED)
    with psycopg.connect(dsn) as connection:
        ids = connection.execute("SELECT payment_id, amount FROM ledger ORDER BY 1").fetchall()
        totals = connection.execute("SELECT merchant, payments, amount FROM totals").fetchall()
    assert ids == list(zip(range(ROWS), truth["amount"].tolist(), strict=True))
    assert {row[0]: (row[1], int(row[2])) for row in totals} == true_totals(ROWS)
