"""Card and UPI payments from two folders of JSON files: a ledger of all payments, and totals per merchant.

    cutline run examples/union_totals.py --until-done     # or: python examples/union_totals.py

Put more files into cards/ and upi/ and run it again, or kill it midway: every payment counts once.
INPUT_DIR and OUTPUT_DIR select other folders than ./cutline-data/examples/union_totals/….
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks

PAYMENT = "payment_id string, merchant string, cents long, paid_at timestamp"


def build(input_dir: Path, output_dir: Path) -> Flow:
    """Build the flow over the given folders."""
    flow = Flow("union_totals")

    @flow.operator()
    def cards(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(PAYMENT).json(str(input_dir / "cards"))

    @flow.operator()
    def upi(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(PAYMENT).json(str(input_dir / "upi"))

    @flow.operator(inputs=[cards, upi])
    def payments(cards: DataFrame, upi: DataFrame) -> DataFrame:
        both = cards.withColumn("method", F.lit("card")).unionByName(upi.withColumn("method", F.lit("upi")))
        return both.withColumn("day", F.to_date("paid_at"))

    @flow.operator(inputs=[payments], subtasks=2)
    def totals(payments: DataFrame) -> DataFrame:
        return payments.groupBy("merchant").agg(F.count("*").alias("payments"), F.sum("cents").alias("cents"))

    flow.sink(payments, sinks.Parquet(output_dir / "ledger", partition_by=["day"]), name="ledger")
    # Update: each change of a total is a new row. A merchant's newest row is the one with the most payments.
    flow.sink(totals, sinks.Delta(output_dir / "totals"), output_mode="update", name="totals")
    return flow


def write_samples(input_dir: Path) -> None:
    """Write a few payments, unless there are files already."""
    for method in ("cards", "upi"):
        folder = input_dir / method
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            continue
        rows = [
            {
                "payment_id": f"{method}-{number}",
                "merchant": f"shop-{number % 4}",
                "cents": 100 + number,
                "paid_at": f"2026-03-0{1 + number % 3}T12:{number:02}:00Z",
            }
            for number in range(40)
        ]
        (folder / "samples.json").write_text("\n".join(map(json.dumps, rows)))


DATA = Path("cutline-data/examples/union_totals")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['totals'].published_epoch}: {OUTPUT}")
