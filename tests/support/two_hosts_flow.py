"""A flow on real Spark that two hosts run in turn: the file that ``cutline run`` gets.

Rows come from JSON files, so every host can read them again. The environment says where the files and the tables are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

import cutline
from cutline.model.graph import PublishPolicy
from cutline.ports.sinks import Sink

_FOLDER, _SINK = Path(os.environ["TWO_HOSTS_FOLDER"]), os.environ["TWO_HOSTS_SINK"]
_PUBLISH: PublishPolicy = "at_once" if os.environ.get("TWO_HOSTS_PUBLISH") == "at_once" else "checkpoint"

flow = cutline.Flow("counting")


def table(name: str, *key: str) -> Sink:
    if _SINK == "parquet":
        return cutline.sinks.Parquet(_FOLDER / name)
    if _SINK == "sqlite":
        return cutline.sinks.SQLite(_FOLDER / "tables.sqlite", name)
    if _SINK == "upsert" and key:
        return cutline.sinks.Delta(_FOLDER / name, mode="upsert", key=key)
    return cutline.sinks.Delta(_FOLDER / name)


@flow.operator()
def rows(spark: Any) -> Any:
    source = spark.readStream.schema("id long, key string").option("maxFilesPerTrigger", 1)
    return source.json(str(_FOLDER / "in"))


@flow.operator(inputs=[rows], subtasks=2)
def totals(rows: Any) -> Any:
    return rows.groupBy("key").agg(F.count("*").alias("seen"), F.sum("id").alias("total"))


flow.sink(rows, table("rows"), name="rows-out", publish=_PUBLISH)
flow.sink(totals, table("totals", "key"), name="totals-out", output_mode="update", publish=_PUBLISH)
