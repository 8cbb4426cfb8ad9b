"""Orders joined with their payments, then revenue per hour: two streams, two kinds of state, event time.

    cutline run examples/orders_join.py --until-done     # or: python examples/orders_join.py

An hour is published when the watermark has passed it: the newest hours wait for later orders and payments.
INPUT_DIR and OUTPUT_DIR select other folders than ./cutline-data/examples/orders_join/….
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks

ORDER = "order_id string, customer string, ordered_at timestamp"
PAYMENT = "order_id string, cents long, paid_at timestamp"


def build(input_dir: Path, output_dir: Path) -> Flow:
    """Build the flow over the given folders."""
    flow = Flow("orders_join")

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(ORDER).json(str(input_dir / "orders"))

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(PAYMENT).json(str(input_dir / "payments"))

    @flow.operator(inputs=[orders, payments], subtasks=2)
    def paid_orders(orders: DataFrame, payments: DataFrame) -> DataFrame:
        left = orders.withWatermark("ordered_at", "10 minutes").alias("o")
        right = payments.withWatermark("paid_at", "10 minutes").alias("p")
        in_time = "o.order_id = p.order_id and p.paid_at between o.ordered_at and o.ordered_at + interval 1 hour"
        return left.join(right, F.expr(in_time)).select("o.order_id", "customer", "ordered_at", "paid_at", "cents")

    @flow.operator(inputs=[paid_orders], subtasks=2)
    def revenue(paid_orders: DataFrame) -> DataFrame:
        # A watermark ends with its operator. The join emits pairs up to 1 hour + 10 minutes out of order.
        hours = paid_orders.withWatermark("paid_at", "70 minutes").groupBy(F.window("paid_at", "1 hour"))
        sums = hours.agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
        return sums.select(F.col("window.start").alias("hour"), "orders", "cents")

    flow.sink(revenue, sinks.Delta(output_dir / "revenue"), name="revenue")
    return flow


def write_samples(input_dir: Path) -> None:
    """Write two days of orders, each paid 20 minutes later, unless there are files already."""
    days = [(day, hour, minute) for day in (1, 2) for hour in range(24) for minute in (0, 30)]
    orders = [{"order_id": f"{d}-{h}-{m}", "customer": f"c{h % 5}", "ordered_at": at(d, h, m)} for d, h, m in days]
    payments = [{"order_id": f"{d}-{h}-{m}", "cents": 100 + h, "paid_at": at(d, h, m + 20)} for d, h, m in days]
    for name, rows in (("orders", orders), ("payments", payments)):
        (input_dir / name).mkdir(parents=True, exist_ok=True)
        if not any((input_dir / name).iterdir()):
            (input_dir / name / "samples.json").write_text("\n".join(map(json.dumps, rows)))


def at(day: int, hour: int, minute: int) -> str:
    return f"2026-03-{day:02}T{hour:02}:{minute:02}:00Z"


DATA = Path("cutline-data/examples/orders_join")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['revenue'].published_epoch}: {OUTPUT}")
