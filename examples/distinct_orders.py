"""Orders from a producer that retries: each order is published once.

    cutline run examples/distinct_orders.py --until-done     # or: python examples/distinct_orders.py

A retried order has the same id, within ten minutes. The ids seen so far are state: a restore restores them with the
checkpoint, so an order that was sent before a crash and again after it is removed too.
INPUT_DIR and OUTPUT_DIR select other folders than those below ./cutline-data/examples/distinct_orders.
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import cutline
from cutline import Flow, sinks


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("distinct_orders")

    @flow.operator(subtasks=2)
    def orders(spark: SparkSession) -> DataFrame:
        sent = spark.readStream.schema("order_id string, cents long, sent_at timestamp").json(str(input_dir))
        return cutline.distinct(sent, key="order_id", time="sent_at", within="10m")

    flow.sink(orders, sinks.Parquet(output_dir), name="orders")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        orders = [
            {"order_id": f"o{n % 40}", "cents": n % 40, "sent_at": f"2026-03-01T12:0{n // 40}:00Z"} for n in range(60)
        ]
        (folder / "samples.json").write_text("\n".join(map(json.dumps, orders)))


DATA = Path("cutline-data/examples/distinct_orders")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['orders'].published_epoch}: {OUTPUT}")
