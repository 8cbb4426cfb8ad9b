"""Generated payments, the same in every run, into a folder of Parquet files: no input is needed.

    cutline run examples/generated.py --until-done     # or: python examples/generated.py

OUTPUT_DIR selects another folder than ./cutline-data/examples/generated/output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cutline import Flow, sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(output_dir: Path, *, rows: int = 5_000, rows_per_second: int = 0) -> Flow:
    """``rows_per_second``: the rate; 0: as fast as they are read. It may change between runs, and ``rows`` may grow."""
    flow = Flow("generated")

    @flow.operator()
    def payments(spark: SparkSession) -> DataFrame:
        made = spark.readStream.format("cutline_generator").options(seed=7, keys=50, rows=rows)
        return made.option("rows_per_second", rows_per_second).load()

    flow.sink(payments, sinks.Parquet(output_dir), name="payments")
    return flow


OUTPUT = Path(os.environ.get("OUTPUT_DIR", "cutline-data/examples/generated/output"))
flow = build(OUTPUT)

if __name__ == "__main__":
    run = flow.start()
    run.process_all_available()
    run.stop()
    print(f"published up to epoch {run.status().sinks['payments'].published_epoch}: {OUTPUT}")
