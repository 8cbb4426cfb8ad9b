"""Payments from files; every change of a merchant's total is a message in a NATS JetStream stream, exactly once.

    NATS_URL=nats://127.0.0.1:4222 cutline run examples/to_nats.py     # or: python examples/to_nats.py

The sink creates the stream TOTALS if it does not exist. ``read_totals`` shows how a consumer reads whole epochs only.
INPUT_DIR and STAGING_DIR select other folders than ./cutline-data/examples/to_nats/….
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from cutline import Flow, sinks
from cutline.connectors.nats.reader import read_published

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(url: str, input_dir: Path, staging: Path) -> Flow:
    input_dir.mkdir(parents=True, exist_ok=True)
    flow = Flow("to_nats")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("merchant string, cents long").json(str(input_dir))

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("cents").alias("cents"))

    sink = sinks.JetStream(url, "TOTALS", "totals.changed", staging=staging)
    # A stream cannot be rewound: a restore to before a published epoch is refused, unless this says "keep".
    flow.sink(totals, sink, name="totals", output_mode="update", on_rollback="fail")
    return flow


def read_totals(url: str, after: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every change with the sequence to continue after; store it together with the results."""
    for epoch in read_published(url, "TOTALS", flow="to_nats", sink="totals", after=after):
        for message in epoch.rows:
            yield epoch.sequence, json.loads(message.data)


URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
INPUT = Path(os.environ.get("INPUT_DIR", "cutline-data/examples/to_nats/input"))
STAGING = Path(os.environ.get("STAGING_DIR", "cutline-data/examples/to_nats/staging"))
flow = build(URL, INPUT, STAGING)

if __name__ == "__main__":
    flow.start().await_termination()
