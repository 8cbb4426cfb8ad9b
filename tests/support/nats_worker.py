"""From a NATS stream through an aggregation into a NATS stream, in a process that may be killed.

    python -m tests.support.nats_worker <url> <folder>

Reads IN, writes every change of a sum into OUT, and ends when all that is there is published.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from cutline.flow import Flow
from cutline.sinks import JetStream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

IN, OUT = "IN", "OUT"


def build(url: str, folder: Path, **options: str) -> Flow:
    flow = Flow("relay")

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        source = spark.readStream.format("cutline_nats")
        stream = source.options(url=url, stream=IN, max_per_batch=40, partitions=2, **options).load()
        number = stream["data"].cast("string").cast("long")
        return stream.select((number % 5).alias("key"), number.alias("number"))

    @flow.operator(inputs=[numbers], subtasks=2)
    def sums(numbers: DataFrame) -> DataFrame:
        return numbers.groupBy("key").agg(F.count("*").alias("count"), F.sum("number").alias("sum"))

    sink = JetStream(url, OUT, "out.sums", staging=folder / "staging", batch_messages=3)
    flow.sink(sums, sink, name="out", output_mode="update", on_rollback="keep")
    return flow


def settings(folder: Path) -> dict[str, Any]:
    return {"storage": str(folder / "storage"), "checkpoint_interval": 0, "retain_checkpoints": 10}


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    run = build(url, folder).start(**settings(folder))
    run.process_all_available()
    run.trigger_checkpoint()
    run.stop()


if __name__ == "__main__":
    main()
