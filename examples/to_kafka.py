"""Payments from files; each becomes a message in a Kafka topic, with its merchant as the key, exactly once.

    KAFKA_SERVERS=127.0.0.1:9092 cutline run examples/to_kafka.py     # or: python examples/to_kafka.py

The topics payments and cutline-ledger (cleanup.policy=compact) must exist. Each epoch is one transaction: read with
isolation.level=read_committed, or whole epochs with cutline.read. INPUT_DIR and STAGING_DIR select other folders than
./cutline-data/examples/to_kafka/….
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cutline import Flow, sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(servers: str, input_dir: Path, staging: Path) -> Flow:
    input_dir.mkdir(parents=True, exist_ok=True)
    flow = Flow("to_kafka")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("payment_id string, merchant string, cents long").json(str(input_dir))

    sink = sinks.Kafka(servers, "payments", key="merchant", staging=staging)
    # A topic cannot be rewound: a restore to before a published epoch is refused, unless this says "keep".
    flow.sink(payments, sink, name="payments", on_rollback="fail")
    return flow


SERVERS = os.environ.get("KAFKA_SERVERS", "127.0.0.1:9092")
INPUT = Path(os.environ.get("INPUT_DIR", "cutline-data/examples/to_kafka/input"))
STAGING = Path(os.environ.get("STAGING_DIR", "cutline-data/examples/to_kafka/staging"))
flow = build(SERVERS, INPUT, STAGING)

if __name__ == "__main__":
    flow.start().await_termination()
