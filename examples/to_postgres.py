"""Payments from a folder of JSON files into two PostgreSQL tables that never disagree.

    export PGHOST=… PGDATABASE=… PGUSER=… PGPASSWORD=…      # or POSTGRES_DSN="host=… dbname=… user=…"
    cutline run examples/to_postgres.py --until-done        # or: python examples/to_postgres.py

``payments`` gets every payment once, ``merchant_totals`` has one row for each merchant. Both change in the same
transaction, so this holds at any moment: SELECT (SELECT sum(cents) FROM payments) = (SELECT sum(cents) FROM
merchant_totals). Put more files into the folder and run it again, or kill it midway.
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks

PAYMENT = "payment_id string, merchant string, cents long, paid_at timestamp"


def build(input_dir: Path, dsn: str) -> Flow:
    """Build the flow over the given folder and database."""
    flow = Flow("to_postgres")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(PAYMENT).json(str(input_dir))

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("cents").alias("cents"))

    flow.sink(payments, sinks.Postgres(dsn, "payments"), name="payments")
    flow.sink(
        totals,
        sinks.Postgres(dsn, "merchant_totals", mode="upsert", key=["merchant"]),
        output_mode="update",
        name="totals",
    )
    return flow


def write_samples(input_dir: Path) -> None:
    """Write a few payments, unless there are files already."""
    input_dir.mkdir(parents=True, exist_ok=True)
    if any(input_dir.iterdir()):
        return
    rows = [
        {
            "payment_id": f"payment-{number}",
            "merchant": f"shop-{number % 4}",
            "cents": 100 + number,
            "paid_at": f"2026-03-0{1 + number % 3}T12:{number:02}:00Z",
        }
        for number in range(40)
    ]
    (input_dir / "samples.json").write_text("\n".join(map(json.dumps, rows)))


INPUT = Path(os.environ.get("INPUT_DIR", "cutline-data/examples/to_postgres/input"))
write_samples(INPUT)
flow = build(INPUT, os.environ.get("POSTGRES_DSN", ""))

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['totals'].published_epoch}")
