"""Payments from a Kafka topic into a folder of Parquet files, without Spark's Kafka jar: exactly once.

    KAFKA_SERVERS=127.0.0.1:9092 cutline run examples/from_kafka.py     # or: python examples/from_kafka.py

The topic payments must exist; its messages are JSON: {"merchant": "shop-1", "cents": 250}.
OUTPUT_DIR selects another folder than ./cutline-data/examples/from_kafka/output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cutline import Flow, sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(servers: str, output_dir: Path) -> Flow:
    flow = Flow("from_kafka")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        topic = spark.readStream.format("cutline_kafka").options(servers=servers, topic="payments").load()
        message = F.from_json(topic["value"].cast("string"), "merchant string, cents long")
        return topic.select("partition", "offset", message.alias("payment")).select("partition", "offset", "payment.*")

    flow.sink(payments, sinks.Parquet(output_dir), name="payments")
    return flow


SERVERS = os.environ.get("KAFKA_SERVERS", "127.0.0.1:9092")
OUTPUT = Path(os.environ.get("OUTPUT_DIR", "cutline-data/examples/from_kafka/output"))
flow = build(SERVERS, OUTPUT)

if __name__ == "__main__":
    flow.start().await_termination()
