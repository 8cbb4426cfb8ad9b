"""Payments from a NATS JetStream stream, totalled per merchant into a Delta table: exactly once from log to table.

    NATS_URL=nats://127.0.0.1:4222 cutline run examples/from_nats.py     # or: python examples/from_nats.py

The stream PAYMENTS (subjects payments.>) must exist; its messages are JSON: {"merchant": "shop-1", "cents": 250}.
OUTPUT_DIR selects another folder than ./cutline-data/examples/from_nats/output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cutline import Flow, sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(url: str, output_dir: Path) -> Flow:
    flow = Flow("from_nats")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        stream = (
            spark.readStream.format("cutline_nats")
            .options(url=url, stream="PAYMENTS", subject="payments.>", start="earliest", max_per_batch=10_000)
            .load()
        )
        message = F.from_json(stream["data"].cast("string"), "merchant string, cents long")
        return stream.select("sequence", message.alias("payment")).select("sequence", "payment.*")

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("cents").alias("cents"))

    flow.sink(totals, sinks.Delta(output_dir / "totals"), output_mode="update")
    return flow


URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
OUTPUT = Path(os.environ.get("OUTPUT_DIR", "cutline-data/examples/from_nats/output"))
flow = build(URL, OUTPUT)

if __name__ == "__main__":
    flow.start().await_termination()
