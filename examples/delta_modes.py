"""Delta tables with replaced rows: the balance of each account, and the price list of each day.

    cutline run examples/delta_modes.py --until-done     # or: python examples/delta_modes.py

Put more files into bookings/ and prices/ and run it again: each account keeps one row, and a new list for a day
replaces the old one. INPUT_DIR and OUTPUT_DIR select other folders.
"""

import json
import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cutline import Flow, sinks


def build(input_dir: Path, output_dir: Path) -> Flow:
    flow = Flow("delta_modes")

    @flow.operator()
    def bookings(spark: SparkSession) -> DataFrame:
        return spark.readStream.schema("account string, cents long").json(str(input_dir / "bookings"))

    @flow.operator(inputs=[bookings], subtasks=2)
    def balances(bookings: DataFrame) -> DataFrame:
        return bookings.groupBy("account").agg(F.count("*").alias("bookings"), F.sum("cents").alias("cents"))

    # Every file is the complete list of one day. With one file per batch, a batch contains a complete day.
    @flow.operator()
    def prices(spark: SparkSession) -> DataFrame:
        read = spark.readStream.schema("day date, article string, cents long").option("maxFilesPerTrigger", 1)
        return read.json(str(input_dir / "prices"))

    # Update: each batch contains the changed accounts, and the sink replaces their rows.
    by_account = sinks.Delta(output_dir / "balances", mode="upsert", key=["account"])
    flow.sink(balances, by_account, output_mode="update", name="balances")
    by_day = sinks.Delta(output_dir / "prices", mode="overwrite_partitions", partition_by=["day"])
    flow.sink(prices, by_day, name="prices")
    return flow


def write_samples(input_dir: Path) -> None:
    """Write a few rows, unless there are files already."""
    bookings = [{"account": f"a{number % 5}", "cents": 100 - 7 * number} for number in range(40)]
    prices = [{"day": "2026-03-01", "article": article, "cents": 100} for article in ("bread", "milk")]
    for name, rows in (("bookings", bookings), ("prices", prices)):
        (input_dir / name).mkdir(parents=True, exist_ok=True)
        if not any((input_dir / name).iterdir()):
            (input_dir / name / "samples.json").write_text("\n".join(map(json.dumps, rows)))


DATA = Path("cutline-data/examples/delta_modes")
INPUT = Path(os.environ.get("INPUT_DIR", DATA / "input"))
OUTPUT = Path(os.environ.get("OUTPUT_DIR", DATA / "output"))
write_samples(INPUT)
flow = build(INPUT, OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['balances'].published_epoch}: {OUTPUT}")
