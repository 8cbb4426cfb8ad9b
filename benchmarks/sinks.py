"""Rows per second into each sink, compared with the fastest plain way to write the same rows to the same place.

The sink's figure includes everything it does for an epoch: the executors stage the rows as in a flow, then the epoch is
prepared and committed. The plain way gets its rows from the same Spark session, with as many tasks, and uses one
transaction per epoch (COPY by the executors: one per task). The benchmark counts the written rows afterwards.

The sink syncs Parquet files and Delta tables, the plain way does not; "synced" is the plain way with syncs. The plain
way sends pyarrow's CSV to PostgreSQL; "binary" is the plain way with the sink's own conversion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.base.durable import fsync_dir, fsync_file
from cutline.connectors.staging_folder import values_of
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.engine import StageJob
from cutline.ports.sinks import Sink, SinkContext
from cutline.protocol.publish.commit import CommitPermit
from cutline.sinks import Delta, JetStream, Parquet, Postgres, SQLite
from cutline.spark.batch import SparkBatch
from cutline.spark.query_plan import schema_message
from cutline.spark.session import open_session
from cutline.testing.servers.nats import NatsServer
from cutline.testing.servers.postgres import PostgresServer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FLOW, OPERATOR, SINK = FlowName("bench"), OperatorId("payments"), SinkId("payments")
COLUMNS = ("id", "merchant", "cents", "at", "note")
DDL = "id bigint {key}, merchant text, cents bigint, at timestamptz, note text"
#: The plain way syncs every message separately, so fewer are enough.
JETSTREAM_SHARE = 20
PARTS = ("stage_s", "prepare_s", "commit_s")

#: Writes the rows of one epoch.
Write = Callable[["DataFrame", int], None]
#: The number of rows in a place, and the sum of their cents.
Count = tuple[int, int]


def payments(spark: SparkSession, rows: int, epoch: int, *, is_upsert: bool) -> DataFrame:
    """Return an epoch's rows. With upserts one half replaces rows of the previous epoch, the other half is new."""
    from pyspark.sql import functions as F

    start = epoch * (rows // 2 if is_upsert else rows)
    number = F.col("id")
    return spark.range(start, start + rows, 1, spark.sparkContext.defaultParallelism).select(
        number,
        F.concat(F.lit("merchant-"), (number * 7_919 % 5_000).cast("string")).alias("merchant"),
        F.pmod(F.xxhash64(number, F.lit(epoch)), F.lit(1_000_000)).alias("cents"),
        F.timestamp_micros(F.lit(1_760_000_000_000_000) + number * 1_000).alias("at"),
        F.concat(F.lit("order "), F.hex(F.xxhash64(number)), F.lit(", thank you")).alias("note"),
    )


class Published:
    """Drives a sink as a flow does, without checkpoints in between."""

    def __init__(self, sink: Sink, frame: DataFrame) -> None:
        self._sink = sink
        self._schema_ipc = schema_message(frame)
        self._previous, self._through = NO_EPOCH, NO_BATCH
        self.spent = dict.fromkeys(PARTS, 0.0)
        sink.open(
            SinkContext(flow=FLOW, operator=OPERATOR, sink=SINK, output_mode="update", schema_ipc=self._schema_ipc)
        )

    def write(self, frame: DataFrame, number: int) -> None:
        batch, epoch, generation = BatchId(number), Epoch(number + 1), Generation(1)
        job = StageJob(
            flow=FLOW,
            operator=OPERATOR,
            generation=generation,
            batch=batch,
            schema_ipc=self._schema_ipc,
            segments=None,
            stagers={SINK: self._sink.stager()},
        )
        begun = time.monotonic()
        tasks = SparkBatch(frame, batch, Path(), None).stage(job)
        pieces = [piece for task in tasks for piece in task.pieces[SINK]]
        rows = sum(task.rows for task in tasks)
        staged = [StagedBatch(generation=generation, batch=batch, rows=rows, bytes=0, pieces=pieces)]
        permit = CommitPermit(
            flow=FLOW,
            operator=OPERATOR,
            sink=SINK,
            epoch=epoch,
            generation=generation,
            previous_epoch=self._previous,
            after_batch=self._through,
            through_batch=batch,
        )
        prepared = time.monotonic()
        token = self._sink.prepare(epoch, staged)
        committing = time.monotonic()
        self._sink.commit(permit, staged, token)
        for part, spent_s in zip(
            PARTS, (prepared - begun, committing - prepared, time.monotonic() - committing), strict=True
        ):
            self.spent[part] += spent_s
        self._previous, self._through = epoch, batch


# ------------------------------------------------------------------------------------------------- files


class ParquetCase:
    """A folder of Parquet files, written by Spark itself."""

    name, is_upsert, share = "parquet", False, 1
    ways = ("plain", "synced", "sink")

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.path = folder / "parquet"

    def sink(self) -> Sink:
        return Parquet(self.path)

    def plain(self, way: str) -> Write:
        def write(frame: DataFrame, epoch: int) -> None:
            target = self.path / f"epoch={epoch}"
            frame.write.parquet(str(target))
            if way == "synced":
                sync(target)

        return write

    def count(self) -> Count:
        return count_files([str(path) for path in self.path.glob("*epoch=*/*.parquet")])


class DeltaCase:
    """A Delta table, written by deltalake: the rows come to the driver as Arrow."""

    name, is_upsert, share = "delta", False, 1
    ways: tuple[str, ...] = ("plain", "synced", "sink")

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.path = folder / "delta"

    def sink(self) -> Sink:
        return Delta(self.path)

    def plain(self, way: str) -> Write:
        from deltalake import write_deltalake

        def write(frame: DataFrame, epoch: int) -> None:
            begun = time.time()
            write_deltalake(self.path, frame.toArrow(), mode="append")
            if way == "synced":
                sync(self.path, since=begun)

        return write

    def count(self) -> Count:
        from deltalake import DeltaTable

        return count_files(DeltaTable(self.path).file_uris())


class DeltaUpsertCase(DeltaCase):
    """A Delta table, merged into by deltalake."""

    name, is_upsert = "delta-upsert", True

    def sink(self) -> Sink:
        return Delta(self.path, mode="upsert", key=["id"])

    def plain(self, way: str) -> Write:
        from deltalake import DeltaTable, write_deltalake

        def write(frame: DataFrame, epoch: int) -> None:
            begun = time.time()
            rows = frame.toArrow()
            if epoch == 0:
                write_deltalake(self.path, rows)
            else:
                merge = DeltaTable(self.path).merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
                merge.when_matched_update_all().when_not_matched_insert_all().execute()
            if way == "synced":
                sync(self.path, since=begun)

        return write


def sync(folder: Path, since: float = 0.0) -> None:
    """Sync all files in it that were written since then, and the folders."""
    folders = {folder, folder.parent}
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime >= since - 1:
            fsync_file(path)
            folders.add(path.parent)
    for one in folders:
        fsync_dir(one)


def count_files(files: list[str]) -> Count:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    cents = [pq.read_table(file, columns=["cents"], partitioning=None)["cents"] for file in files]
    return sum(map(len, cents)), sum(pc.sum(one).as_py() or 0 for one in cents)


# ------------------------------------------------------------------------------------------------- databases


class PostgresCase:
    """A PostgreSQL table; the executors COPY directly into it."""

    name, is_upsert, share = "postgres", False, 1
    ways = ("plain", "binary", "sink")

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.dsn = servers.postgres().fresh_database()

    def sink(self) -> Sink:
        return Postgres(self.dsn, "payments")

    def plain(self, way: str) -> Write:
        import psycopg

        with psycopg.connect(self.dsn) as connection:
            connection.execute(self._create().encode())
        copy = copying(self.dsn, self._statements(), "csv" if way == "plain" else way)

        def write(frame: DataFrame, epoch: int) -> None:
            frame.mapInArrow(copy, "rows long").collect()

        return write

    def _create(self) -> str:
        return f"CREATE TABLE payments ({DDL.format(key='')})"

    def _statements(self) -> Sequence[str]:
        return (copy_into("payments"),)

    def count(self) -> Count:
        import psycopg

        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("SELECT count(*), sum(cents) FROM payments").fetchone()
        assert row is not None
        return int(row[0]), int(row[1])


class PostgresUpsertCase(PostgresCase):
    """A PostgreSQL table; the executors COPY into a temporary one and insert from it."""

    name, is_upsert = "postgres-upsert", True

    def sink(self) -> Sink:
        return Postgres(self.dsn, "payments", mode="upsert", key=["id"])

    def _create(self) -> str:
        return f"CREATE TABLE payments ({DDL.format(key='PRIMARY KEY')})"

    def _statements(self) -> Sequence[str]:
        sets = ", ".join(f"{name} = EXCLUDED.{name}" for name in COLUMNS[1:])
        return (
            f"CREATE TEMP TABLE fresh ({DDL.format(key='')})",
            copy_into("fresh"),
            f"INSERT INTO payments SELECT * FROM fresh ON CONFLICT (id) DO UPDATE SET {sets}",
        )


class PostgresForGoodCase(PostgresUpsertCase):
    """The same, with a sink that keeps nothing for a rewind, like the plain way."""

    name = "postgres-upsert-for-good"

    def sink(self) -> Sink:
        return Postgres(self.dsn, "payments", mode="upsert", key=["id"], rewindable=False)


def copy_into(table: str) -> str:
    return f"COPY {table} ({', '.join(COLUMNS)}) FROM STDIN"


def copying(
    dsn: str, statements: Sequence[str], form: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function for ``mapInArrow``: all statements in one transaction."""

    def lines(batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
        import pyarrow as pa
        import pyarrow.csv

        from cutline.connectors.postgres.copy_binary import HEADER, TRAILER, binary_rows

        if form == "binary":
            yield HEADER
        for batch in batches:
            if form == "binary":
                yield binary_rows(batch)
                continue
            buffer = pa.BufferOutputStream()
            pa.csv.write_csv(batch, buffer, pa.csv.WriteOptions(include_header=False, quoting_style="needed"))
            yield buffer.getvalue().to_pybytes()
        if form == "binary":
            yield TRAILER

    def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import psycopg
        import pyarrow as pa

        with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
            for statement in statements:
                if not statement.startswith("COPY"):
                    cursor.execute(statement.encode())
                    continue
                with cursor.copy(f"{statement} (FORMAT {form})".encode()) as transfer:
                    for data in lines(batches):
                        transfer.write(data)
        yield pa.RecordBatch.from_pydict({"rows": [0]})

    return copy


class SqliteCase:
    """A table in a SQLite database; the rows come to the driver as Arrow, and are inserted in one transaction."""

    name, is_upsert, share = "sqlite", False, 1
    ways = ("plain", "sink")
    insert = "INSERT INTO payments VALUES (?, ?, ?, ?, ?)"

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.path = folder / "payments.db"

    def sink(self) -> Sink:
        return SQLite(self.path, "payments")

    def plain(self, way: str) -> Write:
        import pyarrow as pa

        with closing(sqlite3.connect(self.path)) as db:
            key = "PRIMARY KEY" if self.is_upsert else ""
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(
                f"CREATE TABLE payments (id INTEGER NOT NULL {key}, merchant TEXT, cents INTEGER, at TEXT, note TEXT)"
            )

        def write(frame: DataFrame, epoch: int) -> None:
            rows = frame.toArrow()
            rows = rows.set_column(3, "at", rows["at"].cast(pa.string()))
            with closing(sqlite3.connect(self.path)) as db, db:
                db.execute("PRAGMA synchronous = FULL")
                for batch in rows.to_batches():
                    columns = [column.to_pylist() for column in batch.columns]
                    db.executemany(self.insert, zip(*columns, strict=True))

        return write

    def count(self) -> Count:
        with closing(sqlite3.connect(self.path)) as db:
            found: Count = db.execute("SELECT COUNT(*), SUM(cents) FROM payments").fetchone()
        return found


class SqliteUpsertCase(SqliteCase):
    """A table in a SQLite database with a primary key."""

    name, is_upsert = "sqlite-upsert", True
    insert = (
        SqliteCase.insert
        + " ON CONFLICT (id) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])
    )

    def sink(self) -> Sink:
        return SQLite(self.path, "payments", mode="upsert", key=["id"])


# ------------------------------------------------------------------------------------------------- logs


class JetStreamCase:
    """A stream; the rows come to the driver, and are published without waiting for each acknowledgement."""

    name, is_upsert, share = "jetstream", False, JETSTREAM_SHARE
    ways = ("plain", "sink")

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.server = servers.nats()
        self.staging = folder / "staging"
        self.stream = self.server.fresh_stream()
        self.subject = f"{self.stream}.payments"

    def sink(self) -> Sink:
        return JetStream(self.server.url, self.stream, self.subject, staging=self.staging)

    def plain(self, way: str) -> Write:
        import nats

        async def create() -> None:
            client = await nats.connect(self.server.url)
            await client.jetstream().add_stream(name=self.stream, subjects=[self.subject])
            await client.close()

        async def publish(batches: Sequence[pa.RecordBatch]) -> None:
            client = await nats.connect(self.server.url)
            stream = client.jetstream(timeout=60)
            for batch in batches:
                for value in values_of(batch, None):
                    await stream.publish_async(self.subject, value, wait_stall=60)
            await stream.publish_async_completed()
            await client.close()

        asyncio.run(create())
        return lambda frame, epoch: asyncio.run(publish(frame.toArrow().to_batches()))

    def count(self) -> Count:
        import nats

        async def look() -> int:
            client = await nats.connect(self.server.url)
            info = await client.jetstream().stream_info(self.stream, subjects_filter=self.subject)
            await client.close()
            return int((info.state.subjects or {}).get(self.subject, 0))

        return asyncio.run(look()), 0


class Servers:
    """The servers, each started on first use."""

    def __init__(self) -> None:
        self._postgres: PostgresServer | None = None
        self._nats: NatsServer | None = None

    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            import psycopg

            self._postgres = PostgresServer()
            self._postgres.start()
            # The tests' server does not sync. From here on it syncs, as PostgreSQL does by default.
            with psycopg.connect(self._postgres.dsn(), autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET fsync = on")
                connection.execute("ALTER SYSTEM SET shared_buffers = '128MB'")
            self._postgres.stop()
            self._postgres.start()
        return self._postgres

    def nats(self) -> NatsServer:
        if self._nats is None:
            self._nats = NatsServer()
            self._nats.start()
        return self._nats

    def remove(self) -> None:
        for server in (self._postgres, self._nats):
            if server is not None:
                server.remove()


CASES: dict[str, Any] = {
    case.name: case
    for case in (
        ParquetCase,
        DeltaCase,
        DeltaUpsertCase,
        PostgresCase,
        PostgresUpsertCase,
        PostgresForGoodCase,
        SqliteCase,
        SqliteUpsertCase,
        JetStreamCase,
    )
}


# ------------------------------------------------------------------------------------------------- measuring


def measure(case: Any, way: str, spark: SparkSession, rows: int, epochs: int) -> dict[str, Any]:
    """Return rows per second of one way into a new place. The first epoch, with new tables, is not counted."""
    folder = Path(tempfile.mkdtemp(prefix="cutline-sinks-"))
    try:
        place = case(folder, SERVERS)
        frames = [payments(spark, rows, epoch, is_upsert=case.is_upsert) for epoch in range(epochs + 1)]
        published = Published(place.sink(), frames[0]) if way == "sink" else None
        write: Write = published.write if published is not None else place.plain(way)
        write(frames[0], 0)
        before = dict(published.spent) if published is not None else {}
        os.sync()  # pending writes of others are not counted
        begun = time.monotonic()
        for epoch in range(1, epochs + 1):
            write(frames[epoch], epoch)
        took_s = time.monotonic() - begun
        spent = {part: round(value - before[part], 2) for part, value in published.spent.items()} if published else {}
        return {"rows_per_s": round(rows * epochs / took_s), **spent, "count": place.count()}
    finally:
        shutil.rmtree(folder)


def run(case: Any, spark: SparkSession, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all ways alternately, forward and in reverse."""
    rows = max(arguments.rows // case.share, 2)
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in case.ways}
    for number in range(arguments.repeat + 1):
        for way in case.ways if number % 2 else reversed(case.ways):
            # The first round only warms up.
            figures = measure(case, way, spark, rows, arguments.epochs if number else 1)
            if number:
                rounds[way].append(figures)
                print(f"{case.name} {way}: {figures}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    counts = {tuple(one.pop("count")) for all_rounds in rounds.values() for one in all_rounds}
    assert len(counts) == 1, f"not the same rows were written: {counts}"
    result: dict[str, Any] = {"name": case.name, "rows": rows, "epochs": arguments.epochs}
    for way in case.ways:
        result[way] = statistics.median(one["rows_per_s"] for one in rounds[way])
    for way in case.ways[:-1]:
        ratios = [
            round(one["rows_per_s"] / other["rows_per_s"], 2)
            for one, other in zip(rounds["sink"], rounds[way], strict=True)
        ]
        result["ratio" if way == "plain" else f"ratio_{way}"] = round(statistics.median(ratios), 2)
        result["ratios" if way == "plain" else f"ratios_{way}"] = ratios
    for part in PARTS:
        result[part] = statistics.median(one[part] for one in rounds["sink"])
    return result


def rows_alone(spark: SparkSession, rows: int) -> int:
    """Return rows per second without any writer: the part that all ways share."""
    frame = payments(spark, rows, 1, is_upsert=False)
    begun = time.monotonic()
    frame.write.format("noop").mode("overwrite").save()
    return round(rows / (time.monotonic() - begun))


SERVERS = Servers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=200_000, help=f"rows of an epoch (jetstream: 1/{JETSTREAM_SHARE} of them)"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sinks", default=",".join(CASES), help="comma-separated")
    arguments = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    try:
        spark = open_session("sinks", None)
        rows_alone(spark, arguments.rows)
        results = [run(CASES[name], spark, arguments) for name in arguments.sinks.split(",")]
        alone = rows_alone(spark, arguments.rows)
        print(json.dumps({"rows_alone": alone, "load": os.getloadavg()[0], "sinks": results}))
    finally:
        SERVERS.remove()


if __name__ == "__main__":
    main()
