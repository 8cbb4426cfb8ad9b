"""The sinks that need no server, each with a target in a folder, for the suites of ``cutline.testing``."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from cutline.base.durable import make_dir, replace
from cutline.sinks import Delta, Foreach, Iceberg, Parquet, SQLite
from cutline.testing.conformance.sinks import Row, SinkSuite


class DeltaTarget(SinkSuite):
    rewind_crash_points = ("sink-rewind-half",)
    can_be_shared = True

    def make_sink(self, tmp_path: Path) -> Delta:
        return Delta(tmp_path / "table")

    def read_rows(self, tmp_path: Path) -> list[Row]:
        # Not to_pyarrow_table: it fails for a negative decimal as a partition value.
        query = QueryBuilder().register("t", DeltaTable(tmp_path / "table"))
        found: list[Row] = pa.table(query.execute("SELECT * FROM t").read_all()).to_pylist()
        return found


class DeltaUpsertTarget(DeltaTarget):
    def make_sink(self, tmp_path: Path) -> Delta:
        return Delta(tmp_path / "table", mode="upsert", key=["id"])


class DeltaPartitionsTarget(DeltaTarget):
    def make_sink(self, tmp_path: Path) -> Delta:
        return Delta(tmp_path / "table", mode="overwrite_partitions", partition_by=["id"])


class IcebergTarget(SinkSuite):
    rewind_crash_points = ("sink-rewind-half",)
    can_be_shared = True

    def make_sink(self, tmp_path: Path) -> Iceberg:
        return iceberg(tmp_path)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        """As any program with pyiceberg reads it."""
        found: list[Row] = iceberg_table(tmp_path).scan().to_arrow().to_pylist()
        return found


class IcebergUpsertTarget(IcebergTarget):
    def make_sink(self, tmp_path: Path) -> Iceberg:
        return iceberg(tmp_path, mode="upsert", key=["id"])


class IcebergPartitionsTarget(IcebergTarget):
    def make_sink(self, tmp_path: Path) -> Iceberg:
        return iceberg(tmp_path, mode="overwrite_partitions", partition_by=["id"])


def iceberg(folder: Path, table: str = "shop.totals", **options: Any) -> Iceberg:
    """A sink with a catalog of its own in the folder."""
    return Iceberg(f"sqlite:///{folder}/catalog.sqlite", table, warehouse=folder / "warehouse", **options)


def iceberg_table(folder: Path, table: str = "shop.totals") -> Table:
    """The same table, as another program opens it: without anything of Cutline's."""
    catalog = SqlCatalog("default", uri=f"sqlite:///{folder}/catalog.sqlite", warehouse=str(folder / "warehouse"))
    return catalog.load_table(table)


class ParquetTarget(SinkSuite):
    rewind_crash_points = ("sink-rewind-half",)

    def make_sink(self, tmp_path: Path) -> Parquet:
        return Parquet(tmp_path / "out")

    def read_rows(self, tmp_path: Path) -> list[Row]:
        table = ds.dataset(tmp_path / "out", format="parquet", partitioning="hive").to_table()
        return [{k: v for k, v in row.items() if k != "cutline_epoch"} for row in table.to_pylist()]


class ForeachTarget(SinkSuite):
    """With a function that is idempotent by its key."""

    def make_sink(self, tmp_path: Path) -> Foreach:
        target = tmp_path / "target"
        make_dir(target)

        def keep(batches: Iterator[pa.RecordBatch], epoch: int, key: str) -> None:
            content = [row for batch in batches for row in batch.to_pylist()]
            replace(target / key.replace("/", "~"), pickle.dumps(content))

        return Foreach(keep, staging=tmp_path / "staging")

    def read_rows(self, tmp_path: Path) -> list[Row]:
        # .tmp- files are what a kill left of a write.
        files = [path for path in sorted((tmp_path / "target").iterdir()) if not path.name.startswith(".")]
        return [row for path in files for row in pickle.loads(path.read_bytes())]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


def _point(text: str) -> Row:
    point: Row = json.loads(text)
    return {"x": point["x"], "at": _time(point["at"])}


_FROM_SQLITE: dict[str, Callable[[Any], Any]] = {
    "flag": bool,
    "day": date.fromisoformat,
    "at": _time,
    "price": Decimal,
    "point": _point,
    "tags": json.loads,
    "counts": lambda text: list(json.loads(text).items()),
}


def read_sqlite(path: Path, table: str = "totals") -> list[Row]:
    """The table's rows, with values of the types that were written."""
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        found = [dict(row) for row in db.execute(f'SELECT * FROM "{table}"')]
    return [
        {
            name: _FROM_SQLITE[name](value) if value is not None and name in _FROM_SQLITE else value
            for name, value in row.items()
        }
        for row in ({name: value for name, value in row.items() if name != "cutline_epoch"} for row in found)
    ]


class SQLiteTarget(SinkSuite):
    rewind_crash_points = ("sink-rewind-half",)

    def make_sink(self, tmp_path: Path) -> SQLite:
        return SQLite(tmp_path / "data.sqlite", "totals")

    def read_rows(self, tmp_path: Path) -> list[Row]:
        return read_sqlite(tmp_path / "data.sqlite")


class SQLiteUpsertTarget(SQLiteTarget):
    def make_sink(self, tmp_path: Path) -> SQLite:
        return SQLite(tmp_path / "data.sqlite", "totals", mode="upsert", key=["id"])


class SQLiteWithoutRewindTarget(SQLiteTarget):
    def make_sink(self, tmp_path: Path) -> SQLite:
        return SQLite(tmp_path / "data.sqlite", "totals", rewindable=False)


class SQLiteUpsertWithoutRewindTarget(SQLiteTarget):
    def make_sink(self, tmp_path: Path) -> SQLite:
        return SQLite(tmp_path / "data.sqlite", "totals", mode="upsert", key=["id"], rewindable=False)
