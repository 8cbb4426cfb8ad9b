"""Orders into two Iceberg tables, without a jar: all orders by day, and one row per customer with the total.

    cutline run examples/to_iceberg.py --until-done     # or: python examples/to_iceberg.py

The catalog is a SQLite database beside the tables. CATALOG selects another one: postgresql://user@host/database, or the
https:// address of a REST catalog. INPUT_DIR and OUTPUT_DIR select other folders. Any program that speaks Iceberg reads
the tables; so does `cutline.read`, also as of an earlier checkpoint.
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks


def build(input_dir: Path, output_dir: Path, catalog: str = "") -> Flow:
    flow = Flow("to_iceberg")
    output_dir.mkdir(parents=True, exist_ok=True)
    catalog = catalog or f"sqlite:///{output_dir.absolute()}/catalog.sqlite"

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        read = spark.readStream.schema("order_id string, customer string, day date, cents long")
        return read.json(str(input_dir))

    @flow.operator(inputs=[orders], subtasks=2)
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))

    warehouse = output_dir / "warehouse"
    by_day = sinks.Iceberg(catalog, "shop.orders", partition_by=["day"], warehouse=warehouse)
    flow.sink(orders, by_day, name="orders")
    # Update: each batch contains the changed customers, and the sink replaces their rows.
    by_customer = sinks.Iceberg(catalog, "shop.totals", mode="upsert", key=["customer"], warehouse=warehouse)
    flow.sink(totals, by_customer, output_mode="update", name="totals")
    return flow


def write_samples(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        orders = [
            {"order_id": f"o{n}", "customer": f"c{n % 5}", "day": f"2026-03-0{1 + n % 3}", "cents": n * 733 % 10_000}
            for n in range(60)
        ]
        (folder / "samples.json").write_text("\n".join(map(json.dumps, orders)))


DATA = Path("cutline-data/examples/to_iceberg")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT, os.environ.get("CATALOG", ""))

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['orders'].published_epoch}: {OUTPUT}")
