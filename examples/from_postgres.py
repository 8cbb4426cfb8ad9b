"""Orders from a PostgreSQL table that only grows, totalled per customer into a Delta table: exactly once.

    export POSTGRES_DSN="host=… dbname=… user=…" PGPASSWORD=…      # never put the password into the DSN
    cutline run examples/from_postgres.py                          # or: python examples/from_postgres.py

The table: CREATE TABLE orders (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text, cents int8).
OUTPUT_DIR selects another folder than ./cutline-data/examples/from_postgres/output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from cutline import Flow, sinks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def build(dsn: str, output_dir: Path) -> Flow:
    flow = Flow("from_postgres")

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        table = spark.readStream.format("cutline_postgres").options(url=dsn, table="orders", key="id")
        # With a schema, loading the flow does not need to ask the server for the columns.
        return table.schema("id long, customer string, cents long").load()

    @flow.operator(inputs=[orders], subtasks=2)
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("customer").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))

    flow.sink(totals, sinks.Delta(output_dir, mode="upsert", key=["customer"]), output_mode="update", name="totals")
    return flow


OUTPUT = Path(os.environ.get("OUTPUT_DIR", "cutline-data/examples/from_postgres/output"))
flow = build(os.environ.get("POSTGRES_DSN", ""), OUTPUT)

if __name__ == "__main__":
    flow.start().await_termination()
