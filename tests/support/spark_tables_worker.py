"""Reads and maintains Delta and Iceberg tables with Spark's own readers: a program for a PySpark that has them.

Commands come as lines on stdin, each answered by one line of JSON. It imports nothing of Cutline.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

#: Table formats; see ``place`` in each command.
DELTA, ICEBERG = "delta", "iceberg"
#: A catalog in a database stores its own name with each table; this is the one that Cutline's have.
CATALOG = "default"
CONFLICTS = ("ValidationException", "CommitFailedException", "DELTA_CONCURRENT")


def session(class_path: str) -> SparkSession:
    builder: Any = SparkSession.builder
    settings = {
        "spark.driver.extraClassPath": class_path,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "1",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    found: SparkSession = builder.master("local[1]").getOrCreate()
    return found


class Tables:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def open_catalog(self, folder: str) -> None:
        """An Iceberg catalog in a database that other programs write too, from now on."""
        self._spark = self._spark.newSession()
        prefix = f"spark.sql.catalog.{CATALOG}"
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": f"jdbc:sqlite:{folder}/catalog.sqlite?busy_timeout=30000",
            ".warehouse": f"file://{folder}/warehouse",
            ".cache-enabled": "false",
        }
        for key, value in settings.items():
            self._spark.conf.set(prefix + key, value)

    def _frame(self, kind: str, place: str) -> DataFrame:
        return self._spark.read.format("delta").load(place) if kind == DELTA else self._spark.read.table(place)

    def read(self, kind: str, place: str) -> list[list[Any]]:
        return sorted([row.id, row.key, row.value] for row in self._frame(kind, place).collect())

    def maintain(self, kind: str, place: str, may_conflict: bool) -> list[str]:
        """What a nightly job does. ``may_conflict``: a commit of the flow meanwhile may win, as with any writers."""
        if kind == DELTA:
            statements = [f"OPTIMIZE delta.`{place}`", f"VACUUM delta.`{place}`"]
        else:
            catalog, _, table = place.partition(".")
            name = f"table => '{table}'"
            statements = [
                f"CALL {catalog}.system.rewrite_data_files({name}, options => map('rewrite-all', 'true'))",
                f"CALL {catalog}.system.rewrite_manifests({name})",
                f"CALL {catalog}.system.expire_snapshots({name}, older_than => now(), retain_last => 10)",
                f"CALL {catalog}.system.remove_orphan_files({name})",
            ]
        return [self._run(statement, may_conflict) for statement in statements]

    def _run(self, statement: str, may_conflict: bool) -> str:
        try:
            return f"{statement}: {self._spark.sql(statement).collect()[:1]}"
        except Exception as error:
            if may_conflict and any(one in str(error) for one in CONFLICTS):
                return f"{statement}: conflict"
            raise


def main() -> None:
    # What the JVM prints (VACUUM does) is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tables = Tables(session(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        try:
            answer = {"is": getattr(tables, name)(*given)}
        except Exception as error:  # noqa: BLE001 (the test shows it)
            answer = {"error": f"{type(error).__name__}: {error}"[:2_000]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
