"""Orders into a SQLite database: all orders, totals per customer, and large orders with immediate publishing.

    cutline run examples/sqlite_shop.py --until-done     # or: python examples/sqlite_shop.py
    sqlite3 cutline-data/examples/sqlite_shop/output/shop.sqlite 'SELECT * FROM totals'

INPUT_DIR and OUTPUT_DIR select other folders.
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks

LARGE_CENTS = 9_000


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("sqlite_shop")
    database = output_dir / "shop.sqlite"

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("order_id string, customer string, cents long").json(str(input_dir))

    @flow.operator(inputs=[orders], subtasks=2)
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))

    @flow.operator(inputs=[orders])
    def alerts(orders: DataFrame) -> DataFrame:
        return orders.where(F.col("cents") >= LARGE_CENTS)

    flow.sink(orders, sinks.SQLite(database, "orders"), name="orders")
    flow.sink(
        totals, sinks.SQLite(database, "totals", mode="upsert", key=["customer"]), output_mode="update", name="totals"
    )
    # Alerts must not wait for the next checkpoint.
    flow.sink(alerts, sinks.SQLite(database, "alerts"), publish="at_once", name="alerts")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        orders = [{"order_id": f"o{n}", "customer": f"c{n % 5}", "cents": n * 733 % 10_000} for n in range(60)]
        (folder / "samples.json").write_text("\n".join(map(json.dumps, orders)))


DATA = Path("cutline-data/examples/sqlite_shop")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['orders'].published_epoch}: {OUTPUT}")
