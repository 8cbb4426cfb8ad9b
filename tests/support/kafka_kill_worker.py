"""A process that runs a flow of three operators from a Kafka topic into two others, to be killed.

``python -m tests.support.kafka_kill_worker FOLDER MODE``; the brokers are those of ``kafka_target.SERVERS``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cutline.flow import Flow
from cutline.sinks import Kafka
from tests.support.kafka_target import SERVERS, ledger_of, topic_of
from tests.support.kill_worker import is_to_be_killed, run_until_killed, session_to_kill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FLOW, OPERATORS, SINKS = "topics", ("payments", "checked", "totals"), ("rows", "totals")
#: As in ``kill_worker``: small steps until the last process.
ROWS_PER_BATCH_BEFORE_A_KILL, ROWS_PER_BATCH = 40, 2_000


def topics_of(folder: Path) -> tuple[str, str, str]:
    """The input, each row of it, and the totals."""
    name = topic_of(folder)
    return f"{name}-in", f"{name}-rows", f"{name}-totals"


def topics_flow(folder: Path, servers: str, *, rows_per_batch: int) -> Flow:
    source, rows_topic, totals_topic = topics_of(folder)
    flow = Flow(FLOW)

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        options = {"servers": servers, "topic": source, "max_per_batch": str(rows_per_batch)}
        read = spark.readStream.format("cutline_kafka").options(**options).load()
        return read.select(F.from_json(F.col("value").cast("string"), "id long, merchant string").alias("row"))

    @flow.operator(inputs=[payments])
    def checked(payments: DataFrame) -> DataFrame:
        return payments.select("row.id", "row.merchant")

    @flow.operator(inputs=[checked], subtasks=2)
    def totals(checked: DataFrame) -> DataFrame:
        return checked.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("id").alias("ids"))

    for operator, topic, name in ((checked, rows_topic, "rows"), (totals, totals_topic, "totals")):
        sink = Kafka(
            servers,
            topic,
            key="merchant",
            staging=folder / "staging",
            ledger_topic=ledger_of(folder),
            timeout_s=20.0,
        )
        flow.sink(operator, sink, name=name, output_mode="append" if name == "rows" else "update", on_rollback="fail")
    return flow


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    rows_per_batch = ROWS_PER_BATCH_BEFORE_A_KILL if is_to_be_killed() else ROWS_PER_BATCH
    flow = topics_flow(folder, os.environ[SERVERS], rows_per_batch=rows_per_batch)
    run = flow.start(
        spark=session_to_kill(),
        storage=str(folder / "storage"),
        checkpoint_interval="400ms",
        mode=mode,
        retain_checkpoints=2,
        checkpoint_timeout="20s",
    )
    run_until_killed(run)


if __name__ == "__main__":
    main()
