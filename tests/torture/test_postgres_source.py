"""The PostgreSQL source against a real server: rows that commit late are waited for, those that vanish are missed."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pyspark.sql.types import (
    DecimalType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from cutline.connectors.postgres.positions import moved
from cutline.connectors.postgres.spark_reader import PostgresReader, PostgresSource
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import ConfigError, LostInputError, NotDone
from cutline.spark_dir import source_check
from cutline.testing.servers.postgres import PostgresServer

GUARD = ReplayGuard()

Offset = dict[str, Any]
SCHEMA = StructType([StructField("id", LongType()), StructField("name", StringType())])


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    own = PostgresServer()
    try:
        own.start()
        execute(own.dsn(), "ALTER SYSTEM SET max_prepared_transactions = 5")
        own.stop()
        own.start()
        yield own
    finally:
        own.remove()


@pytest.fixture
def url(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Without the password, which is in the environment."""
    parts = conninfo_to_dict(server.fresh_database())
    monkeypatch.setenv("PGPASSWORD", str(parts.pop("password")))
    made = make_conninfo("", **{name: str(value) for name, value in parts.items() if value is not None})
    with psycopg.connect(made, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)")
    return made


def insert(url: str, *names: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for name in names:
            connection.execute("INSERT INTO orders (name) VALUES (%s)", [name])


def execute(url: str, query: Any) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(query)


def reader(url: str, **options: Any) -> PostgresReader:
    given = {"url": url, "table": "orders", "key": "id", **{name: str(one) for name, one in options.items()}}
    return PostgresReader(given, SCHEMA)


def rows(one: PostgresReader, start: Offset, end: Offset) -> list[tuple[int, str]]:
    found = []
    for partition in one.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end))):
        copy, part = pickle.loads(pickle.dumps((one, partition)))
        for batch in copy.read(part):
            found += [(row["id"], row["name"]) for row in batch.to_pylist()]
    return found


def test_moments_are_read_with_and_without_a_time_zone(url: str) -> None:
    execute(url, "CREATE TABLE seen (id bigint PRIMARY KEY, at timestamptz, local timestamp)")
    execute(url, "INSERT INTO seen VALUES (1, '2026-01-02 03:04:05+02', '2026-01-02 03:04:05')")
    kinds = [
        StructField("id", LongType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
    ]
    one = PostgresReader({"url": url, "table": "seen", "key": "id"}, StructType(kinds))
    start = one.initialOffset()
    (partition,) = one.partitions(start, one.latestOffset(start, None))
    (batch,) = one.read(partition)
    (row,) = batch.to_pylist()
    assert row["at"] == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert row["local"] == datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001 (it has none)


def test_ranges_follow_one_another_and_hold_every_row_once(url: str) -> None:
    insert(url, *"abcdefg")
    one = reader(url, max_per_batch=3)
    offset, seen = one.initialOffset(), []
    while (end := one.latestOffset(offset, None)) != offset:
        assert rows(one, offset, end) == rows(one, offset, end), "a second reading is like the first"
        seen += rows(one, offset, end)
        offset = end
    assert seen == list(enumerate("abcdefg", 1)) and offset["rows"] == 7
    again = reader(url, start="latest")
    begin = again.initialOffset()
    insert(url, "h")
    end = again.latestOffset(begin, None)
    assert rows(again, begin, end) == [(8, "h")]
    insert(url, "i")
    other = reader(url, start="latest")
    assert rows(other, other.initialOffset(), end) == [(8, "h")], "the first batch begins where it began"


def test_a_row_with_a_lower_key_that_commits_late_is_waited_for(url: str) -> None:
    one = reader(url)
    offset = one.initialOffset()
    with psycopg.connect(url) as late:
        late.execute("INSERT INTO orders (name) VALUES ('late')")
        insert(url, "early")
        for _ in range(3):
            assert one.latestOffset(offset, None) == offset, "key 1 may still appear"
        late.commit()
    end = one.latestOffset(offset, None)
    assert rows(one, offset, end) == [(1, "late"), (2, "early")]


def test_a_steady_stream_of_writers_does_not_hold_it_up(url: str) -> None:
    one = reader(url)
    offset = one.initialOffset()
    with psycopg.connect(url) as first, psycopg.connect(url) as second:
        insert(url, "a")
        first.execute("INSERT INTO orders (name) VALUES ('b')")
        assert one.latestOffset(offset, None) == offset
        second.execute("INSERT INTO orders (name) VALUES ('c')")
        first.commit()
        end = one.latestOffset(offset, None)
        assert rows(one, offset, end) == [(1, "a")], "whoever was writing then has ended, others write now"


def test_a_prepared_transaction_is_still_waited_for_after_the_server_was_restarted(
    url: str, server: PostgresServer
) -> None:
    """Its locks then have another owner than when they were first seen."""
    one = reader(url)
    offset = one.initialOffset()
    with psycopg.connect(url, autocommit=True) as late:
        late.execute("BEGIN")
        late.execute("INSERT INTO orders (name) VALUES ('late')")
        insert(url, "early")
        assert one.latestOffset(offset, None) == offset
        late.execute("PREPARE TRANSACTION 'late'")
    server.stop()
    server.start()
    for _ in range(3):
        assert one.latestOffset(offset, None) == offset, "key 1 may still appear"
    execute(url, "COMMIT PREPARED 'late'")
    assert rows(one, offset, one.latestOffset(offset, None)) == [(1, "late"), (2, "early")]


def test_prepared_transactions_of_others_do_not_hold_it_up(url: str) -> None:
    one = reader(url)
    offset = one.initialOffset()
    with psycopg.connect(url) as first:
        insert(url, "a")
        first.execute("INSERT INTO orders (name) VALUES ('b')")
        assert one.latestOffset(offset, None) == offset
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("BEGIN")
            other.execute("INSERT INTO orders (name) VALUES ('other')")
            other.execute("PREPARE TRANSACTION 'other'")
        assert one.latestOffset(offset, None) == offset
        first.commit()
    assert rows(one, offset, one.latestOffset(offset, None)) == [(1, "a")], "the other one has begun later"
    execute(url, "COMMIT PREPARED 'other'")


def test_an_insert_through_the_parent_of_a_partition_is_waited_for(url: str) -> None:
    """It takes its key first and touches the partition later."""
    execute(url, "CREATE TABLE parts (id bigserial, name text) PARTITION BY LIST (name)")
    execute(url, "CREATE TABLE part PARTITION OF parts DEFAULT")
    one = reader(url, table="part")
    offset = one.initialOffset()
    with psycopg.connect(url) as gate, psycopg.connect(url) as late:
        gate.execute("SELECT pg_advisory_lock(1)")

        def insert_late() -> None:
            late.execute("INSERT INTO parts VALUES (DEFAULT, 'late' || pg_advisory_xact_lock(1))")
            late.commit()

        thread = threading.Thread(target=insert_late)
        thread.start()
        wait_until(url, "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        execute(url, "INSERT INTO parts (name) VALUES ('early')")
        early = one.latestOffset(offset, None)
        gate.execute("SELECT pg_advisory_unlock(1)")
        thread.join()
    seen = rows(one, offset, early) if early != offset else []
    end = one.latestOffset(early, None)
    assert sorted(seen + rows(one, early, end)) == [(1, "late"), (2, "early")]


def wait_until(url: str, query: Any) -> None:
    deadline = time.monotonic() + 10
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(query).fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_tables_whose_keys_do_not_come_in_order_are_refused(url: str) -> None:
    execute(url, "CREATE TABLE cached (id bigint GENERATED ALWAYS AS IDENTITY (CACHE 20), name text)")
    execute(url, "CREATE SEQUENCE numbers CACHE 5")
    execute(url, "CREATE TABLE by_default (id bigint DEFAULT nextval('numbers'), name text)")
    execute(url, "CREATE TABLE falling (id bigint GENERATED ALWAYS AS IDENTITY (INCREMENT BY -1), name text)")
    execute(url, "CREATE TABLE parts (id bigint GENERATED ALWAYS AS IDENTITY (CACHE 2), n int) PARTITION BY LIST (n)")
    execute(url, "CREATE TABLE part PARTITION OF parts DEFAULT")
    for table in ("cached", "by_default", "falling", "part"):
        with pytest.raises(ConfigError, match="keys are not in order"):
            reader(url, table=table).initialOffset()
    execute(url, "CREATE TABLE child () INHERITS (orders)")
    with pytest.raises(ConfigError, match="inherit"):
        reader(url).initialOffset()


def test_names_are_taken_as_they_are_written(url: str) -> None:
    execute(url, 'CREATE TABLE "Orders" (LIKE orders INCLUDING ALL)')
    one = reader(url, table="Orders")
    offset = one.initialOffset()
    with psycopg.connect(url) as late:
        late.execute("""INSERT INTO "Orders" (name) VALUES ('late')""")
        execute(url, """INSERT INTO "Orders" (name) VALUES ('early')""")
        assert one.latestOffset(offset, None) == offset, "key 1 may still appear"
        late.commit()
    assert rows(one, offset, one.latestOffset(offset, None)) == [(1, "late"), (2, "early")]


def test_deleted_rows_and_another_table_are_missed(url: str, tmp_path: Path) -> None:
    insert(url, *"abcdef")
    one = reader(url, max_per_batch=2)
    offset = one.initialOffset()
    offsets = []
    for _ in range(3):
        offset = one.latestOffset(offset, None)
        offsets.append(json.dumps(offset).encode())
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets/2").write_bytes(b"v1\n{}\n" + offsets[2])
    assert source_check.check_sources(GUARD, {"0": offsets[0]}, tmp_path).problems == []
    execute(url, "DELETE FROM orders WHERE id = 5")
    (problem,) = source_check.check_sources(GUARD, {"0": offsets[0]}, tmp_path).problems
    assert (problem.path, problem.parts) == ("table orders: 1 of the rows with id 3 to 6", 1)
    with pytest.raises(LostInputError, match="1 of the rows with id 5 to 6"):
        one.partitions(json.loads(offsets[1]), json.loads(offsets[2]))
    (here, planned) = moved(offsets[1:], None)
    assert rows(reader(url), json.loads(here), json.loads(planned)) == [(6, "f")]
    execute(url, "DROP TABLE orders")
    execute(url, "CREATE TABLE orders (id bigint, name text)")
    (problem,) = source_check.check_sources(GUARD, {"0": offsets[2]}, tmp_path).problems
    assert "another table" in problem.problem
    with pytest.raises(LostInputError, match="another table"):
        one.latestOffset(offset, None)


def test_what_cannot_be_read_is_refused(url: str, server: PostgresServer) -> None:
    with pytest.raises(ConfigError, match="password"):
        reader(server.dsn()).initialOffset()
    with pytest.raises(NotDone, match="cannot be reached"):
        reader("host=127.0.0.1 port=1 dbname=x").initialOffset()
    execute(url, "CREATE VIEW orders_view AS SELECT * FROM orders")
    with pytest.raises(ConfigError, match="not an ordinary table"):
        reader(url, table="orders_view").initialOffset()
    with pytest.raises(ValueError, match="no table"):
        reader(url, table="nobody").initialOffset()


def test_types_come_from_the_table(url: str) -> None:
    execute(url, "CREATE TABLE rich (id int8, price numeric(10,2), day date, at timestamptz, tag uuid, ok bool)")
    execute(url, "INSERT INTO rich VALUES (1, 1.5, '2024-02-29', now(), gen_random_uuid(), true)")
    schema = PostgresSource({"url": url, "table": "rich"}).schema()
    assert schema == "`id` long, `price` decimal(10,2), `day` date, `at` timestamp, `tag` string, `ok` boolean"
    wanted = StructType(
        [StructField("id", LongType()), StructField("price", DecimalType(10, 2)), StructField("tag", StringType())]
    )
    one = PostgresReader({"url": url, "table": "rich", "key": "id"}, wanted)
    start = one.initialOffset()
    (part,) = one.partitions(start, one.latestOffset(start, None))
    (row,) = next(iter(one.read(part))).to_pylist()
    assert row["id"] == 1 and str(row["price"]) == "1.50" and len(row["tag"]) == 36
