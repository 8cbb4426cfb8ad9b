"""The demo's flow, written as a user would: ingest, enrich, aggregate, publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cutline.demo.settings import FLOW_NAME, DemoSettings
from cutline.flow import Flow
from cutline.sinks import Delta, Parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def payments_flow(settings: DemoSettings) -> Flow:
    """Two payment sources, one stream of payments, a ledger of all of them, totals per merchant."""
    flow = Flow(FLOW_NAME)

    def source(spark: SparkSession, *, first: int, rows: int) -> DataFrame:
        pace = rows / settings.seconds
        return (
            spark.readStream.format("cutline_generator")
            .option("first", first)
            .option("rows", rows)
            .option("keys", settings.keys)
            .option("seed", settings.seed)
            .option("rows_per_second", pace)
            .option("rows_per_batch", int(pace * 2) + 1)
            .load()
        )

    @flow.operator()
    def cards(spark: SparkSession) -> DataFrame:
        return source(spark, first=0, rows=settings.card_rows)

    @flow.operator()
    def upi(spark: SparkSession) -> DataFrame:
        return source(spark, first=settings.card_rows, rows=settings.upi_rows)

    @flow.operator(inputs=[cards, upi])
    def payments(cards: DataFrame, upi: DataFrame) -> DataFrame:
        by_card = cards.withColumn("channel", F.lit("card"))
        by_upi = upi.withColumn("channel", F.lit("upi"))
        return by_card.union(by_upi).withColumn("is_large", F.col("amount") > 9_000)

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(
            F.count("*").alias("payments"), F.sum("amount").alias("amount"), F.max("payment_id").alias("last_payment")
        )

    flow.sink(payments, Parquet(str(settings.ledger)), name="ledger")
    flow.sink(totals, Delta(str(settings.totals_table)), output_mode="update", name="totals")
    return flow
