"""The examples and what the guide says, on real Spark.

Each example loses its live state half way, comes back, and publishes what plain Python computes. Of its input, the
first part is in the checkpoint, the second was processed after it and is lost with Spark's live directories, the third
comes after recovery.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pandas as pd
import psycopg
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import functions as F

from cutline.connectors.generator.spark_reader import payments as true_payments
from cutline.connectors.reading import read
from cutline.errors import FlowDefinitionError
from cutline.flow import Flow
from cutline.runtime.handle import RunningFlow
from cutline.sinks import Kafka, Parquet
from cutline.spark.query_plan import schema_message
from tests.support.kafka_target import delete_topic, make_topic
from tests.support.kafka_topics import Topic
from tests.support.passfile import with_passfile
from tests.support.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.testing.servers.kafka import KafkaCluster
    from cutline.testing.servers.nats import NatsServer
    from cutline.testing.servers.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

MIDNIGHT = datetime(2026, 3, 1, tzinfo=UTC)
#: Later than everything else, so that the watermark passes all of it.
MARKER = MIDNIGHT + timedelta(days=3)
#: Where the second and the third part of the input begin, by arrival.
PARTS_BEGIN = (timedelta(hours=4), timedelta(hours=8))
#: Events arrive out of order, but by less than the 10 minutes that the examples' watermarks allow.
LATEST_MINUTES = 8

Rows = list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------- helpers


def example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The function that builds an example's flow; the file is loaded the way ``cutline run`` loads it."""
    monkeypatch.setenv("INPUT_DIR", str(tmp_path / "samples"))
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "unused"))
    monkeypatch.setenv("STAGING_DIR", str(tmp_path / "unused"))
    build: Callable[..., Any] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["build"]
    return build


def put_file(folder: Path, name: str, lines: Iterable[str]) -> None:
    """A file that appears whole, as Spark's file source needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    temp = folder / f".{name}"
    temp.write_text("\n".join(lines))
    temp.rename(folder / name)


def put_json(folder: Path, part: int, rows: Rows) -> None:
    put_file(folder, f"{part}.json", [json.dumps(row, default=datetime.isoformat) for row in rows])


def by_arrival(rows: Rows, at: str, rng: random.Random) -> list[Rows]:
    """The rows in the three parts in which they arrive: somewhat out of order, so that the parts overlap in time."""
    parts: list[Rows] = [[], [], []]
    for row in rows:
        arrival = row[at] - MIDNIGHT + timedelta(minutes=rng.uniform(0, LATEST_MINUTES))
        parts[sum(arrival >= begin for begin in PARTS_BEGIN)].append(row)
    for part in parts:
        rng.shuffle(part)
    return parts


def run_with_lost_live_state(
    spark: SparkSession, tmp_path: Path, build: Callable[[Path, Path], Any], feed: Callable[[int], None]
) -> None:
    """Part 0, checkpoint, part 1, stop; Spark's directories are deleted; recovery from the checkpoint, part 2."""

    def start() -> RunningFlow:
        flow = build(tmp_path / "input", tmp_path / "output")
        run: RunningFlow = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
        return run

    feed(0)
    run = start()
    assert run.status().recovery.path == "fresh"
    run.process_all_available()
    epoch = run.trigger_checkpoint()
    at_checkpoint = batches(run)
    feed(1)
    wait_until(lambda: all(batch > at_checkpoint[name] for name, batch in batches(run).items()))
    run.stop()
    live = list((tmp_path / "storage" / run.name / "spark").glob("*/*"))
    assert len(live) == len(at_checkpoint)
    for folder in live:
        shutil.rmtree(folder)

    run = start()
    recovery = run.status().recovery
    assert (recovery.path, recovery.epoch) == ("local", epoch)
    feed(2)
    run.process_all_available()
    run.stop()


def batches(run: RunningFlow) -> dict[str, int]:
    return {name: operator.batch for name, operator in run.status().operators.items()}


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def published_parquet(folder: Path, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    table = ds.dataset(str(folder), format="parquet", partitioning="hive").to_table(columns=list(columns))
    return sorted(zip(*table.to_pydict().values(), strict=True))


def published_delta(folder: Path) -> Rows:
    rows: Rows = DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    return rows


def newest_totals(folder: Path) -> dict[str, tuple[int, int]]:
    """Merchant → (payments, cents), by the newest update of each; fails if an update was published twice."""
    rows = published_delta(folder)
    updates = Counter((row["merchant"], row["payments"]) for row in rows)
    assert max(updates.values()) == 1, "an update was published twice"
    return {row["merchant"]: (row["payments"], row["cents"]) for row in sorted(rows, key=lambda row: row["payments"])}


# ------------------------------------------------------------------------------------------------- the examples


@pytest.mark.spark
def test_union_totals(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    folders = {"cards": "card", "upi": "upi"}
    payments: dict[tuple[str, int], Rows] = {
        (folder, part): [
            {
                "payment_id": f"{folder}-{part}-{number}",
                "merchant": f"shop-{rng.randrange(7)}",
                "cents": rng.randrange(1, 10_000),
                "paid_at": MIDNIGHT + timedelta(minutes=rng.randrange(3 * 24 * 60)),
            }
            for number in range(120)
        ]
        for folder in folders
        for part in range(3)
    }

    def feed(part: int) -> None:
        for folder in folders:
            put_json(tmp_path / "input" / folder, part, payments[folder, part])

    run_with_lost_live_state(spark, tmp_path, example("union_totals", tmp_path, monkeypatch), feed)

    zone = ZoneInfo(spark.conf.get("spark.sql.session.timeZone") or "UTC")
    ledger = [
        (row["payment_id"], row["merchant"], row["cents"], folders[folder], str(row["paid_at"].astimezone(zone).date()))
        for (folder, _), rows in payments.items()
        for row in rows
    ]
    columns = ["payment_id", "merchant", "cents", "method", "day"]
    assert published_parquet(tmp_path / "output" / "ledger", columns) == sorted(ledger)
    frame = pd.DataFrame(ledger, columns=columns).groupby("merchant")["cents"].agg(["count", "sum"])
    assert newest_totals(tmp_path / "output" / "totals") == {
        merchant: (int(count), int(cents)) for merchant, count, cents in frame.itertuples()
    }


@pytest.mark.spark
def test_orders_join(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    orders: Rows = [
        {"order_id": f"o{number}", "customer": f"c{number % 9}", "ordered_at": MIDNIGHT + timedelta(minutes=2 * number)}
        for number in range(360)
    ]
    payments: Rows = [
        # Some are too late for their order, some orders are never paid.
        {
            "order_id": order["order_id"],
            "cents": rng.randrange(1, 10_000),
            "paid_at": order["ordered_at"] + timedelta(seconds=rng.randrange(80 * 60)),
        }
        for order in orders
        if rng.random() < 0.9
    ]
    order_parts, payment_parts = by_arrival(orders, "ordered_at", rng), by_arrival(payments, "paid_at", rng)
    order_parts[2].append({"order_id": "marker", "customer": "marker", "ordered_at": MARKER})
    payment_parts[2].append({"order_id": "marker", "cents": 0, "paid_at": MARKER})

    def feed(part: int) -> None:
        put_json(tmp_path / "input" / "orders", part, order_parts[part])
        put_json(tmp_path / "input" / "payments", part, payment_parts[part])

    run_with_lost_live_state(spark, tmp_path, example("orders_join", tmp_path, monkeypatch), feed)

    pairs = pd.DataFrame(orders).merge(pd.DataFrame(payments), on="order_id")
    paid = pairs[pairs["paid_at"] - pairs["ordered_at"] <= timedelta(hours=1)]
    assert 0 < len(paid) < len(pairs)
    hours = paid.groupby(paid["paid_at"].dt.floor("1h"))["cents"].agg(["count", "sum"])
    truth = [(hour.to_pydatetime(), int(count), int(cents)) for hour, count, cents in hours.itertuples()]
    revenue = published_delta(tmp_path / "output" / "revenue")
    assert sorted((row["hour"], row["orders"], row["cents"]) for row in revenue) == truth


@pytest.mark.spark
def test_sessions(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    clicks: Rows = []
    for user in range(8):
        at = MIDNIGHT + timedelta(seconds=rng.randrange(3600))
        while at < MIDNIGHT + timedelta(hours=12):
            clicks.append({"user": f"u{user}", "at": at})
            # Mostly soon; sometimes so late that a new session begins; now and then exactly on the edge.
            minutes = rng.choice([rng.uniform(0.1, 15), rng.uniform(15, 60), 30])
            at += timedelta(milliseconds=round(minutes * 60_000))
    parts = by_arrival(clicks, "at", rng)
    parts[2].append({"user": "marker", "at": MARKER})

    def feed(part: int) -> None:
        lines = [f"{row['user']},/page,{row['at'].isoformat()}" for row in parts[part]]
        put_file(tmp_path / "input", f"{part}.csv", lines)

    run_with_lost_live_state(spark, tmp_path, example("sessions", tmp_path, monkeypatch), feed)

    frame = pd.DataFrame(clicks).sort_values(["user", "at"])
    begins = frame.groupby("user")["at"].diff().fillna(timedelta(days=1)) >= timedelta(minutes=30)
    sessions = frame.groupby(["user", begins.cumsum().rename("session")])["at"].agg(["min", "max", "count"])
    truth = [
        (user, round(first.timestamp() * 1000), round(last.timestamp() * 1000), int(count))
        for (user, _), first, last, count in sessions.itertuples()
    ]
    columns = ["user", "first_ms", "last_ms", "clicks"]
    assert published_parquet(tmp_path / "output", columns) == sorted(truth)


@pytest.mark.spark
def test_delta_modes(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    bookings = [
        [{"account": f"a{rng.randrange(9)}", "cents": rng.randrange(-500, 500)} for _ in range(100)] for _ in range(3)
    ]
    # The second day gets a shorter list later, and the third only then.
    days = {0: ["2026-03-01", "2026-03-02"], 1: ["2026-03-01"], 2: ["2026-03-02", "2026-03-03"]}

    def price_list(part: int, day: str) -> Rows:
        return [{"day": day, "article": f"x{number}", "cents": 10 * part + number} for number in range(5 - part)]

    def feed(part: int) -> None:
        put_json(tmp_path / "input" / "bookings", part, bookings[part])
        for day in days[part]:
            rows = price_list(part, day)
            put_file(tmp_path / "input" / "prices", f"{part}-{day}.json", [json.dumps(row) for row in rows])

    run_with_lost_live_state(spark, tmp_path, example("delta_modes", tmp_path, monkeypatch), feed)

    frame = pd.DataFrame([row for part in bookings for row in part]).groupby("account")["cents"].agg(["count", "sum"])
    found = published_delta(tmp_path / "output" / "balances")
    assert sorted((row["account"], row["bookings"], row["cents"]) for row in found) == [
        (account, int(count), int(cents)) for account, count, cents in frame.itertuples()
    ]
    newest = {day: price_list(part, day) for part in range(3) for day in days[part]}
    prices = published_delta(tmp_path / "output" / "prices")
    assert sorted((str(row["day"]), row["article"], row["cents"]) for row in prices) == sorted(
        (row["day"], row["article"], row["cents"]) for rows in newest.values() for row in rows
    )


@pytest.mark.spark
def test_to_iceberg(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    orders: list[Rows] = [
        [
            {
                "order_id": f"{part}-{number}",
                "customer": f"c{rng.randrange(7)}",
                "day": f"2026-03-0{rng.randrange(1, 4)}",
                "cents": rng.randrange(10_000),
            }
            for number in range(100)
        ]
        for part in range(3)
    ]
    feed = partial(_feed, tmp_path, orders)
    run_with_lost_live_state(spark, tmp_path, example("to_iceberg", tmp_path, monkeypatch), feed)

    uri = f"sqlite:///{tmp_path}/output/catalog.sqlite"
    with SqlCatalog("default", uri=uri) as catalog:
        found = {
            name: catalog.load_table(f"shop.{name}").scan().to_arrow().to_pylist() for name in ("orders", "totals")
        }
        by_day = catalog.load_table("shop.orders").scan("day = '2026-03-02'").plan_files()
        assert {str(task.file.partition[0]) for task in by_day} == {"20514"}
    truth = [row for part in orders for row in part]
    assert sorted(({**row, "day": str(row["day"])} for row in found["orders"]), key=itemgetter("order_id")) == sorted(
        truth, key=itemgetter("order_id")
    )
    frame = pd.DataFrame(truth).groupby("customer")["cents"].agg(["count", "sum"])
    assert sorted((row["customer"], row["orders"], row["cents"]) for row in found["totals"]) == [
        (customer, int(count), int(cents)) for customer, count, cents in frame.itertuples()
    ]


@pytest.mark.spark
def test_sqlite_shop(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts are published at once: those after the checkpoint are taken back with the lost state, and come again."""
    rng = random.Random(5)
    orders: list[Rows] = [
        [
            {"order_id": f"{part}-{number}", "customer": f"c{rng.randrange(7)}", "cents": rng.randrange(10_000)}
            for number in range(100)
        ]
        for part in range(3)
    ]
    feed = partial(_feed, tmp_path, orders)
    run_with_lost_live_state(spark, tmp_path, example("sqlite_shop", tmp_path, monkeypatch), feed)

    with closing(sqlite3.connect(tmp_path / "output" / "shop.sqlite")) as db:
        found = {
            table: sorted(db.execute(f"SELECT {columns} FROM {table}"))
            for table, columns in (
                ("orders", "order_id, customer, cents"),
                ("alerts", "order_id, customer, cents"),
                ("totals", "customer, orders, cents"),
            )
        }
    truth = sorted(tuple(row.values()) for part in orders for row in part)
    assert found["orders"] == truth
    assert found["alerts"] == [row for row in truth if row[2] >= 9_000]
    frame = pd.DataFrame(truth, columns=["order_id", "customer", "cents"]).groupby("customer")["cents"]
    assert found["totals"] == [
        (name, int(count), int(cents)) for name, count, cents in frame.agg(["count", "sum"]).itertuples()
    ]


@pytest.mark.spark
def test_distinct_orders(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order is sent two or three times: at once, later, after the checkpoint, after the crash."""
    rng = random.Random(6)
    orders = [{"order_id": f"o{number}", "cents": rng.randrange(10_000)} for number in range(90)]
    parts: list[Rows] = [[], [], []]
    for number, order in enumerate(orders):
        first = number // 30
        # The state of these comes from the checkpoint, is computed again, or is made after recovery.
        for part in (first, *rng.choices(range(first, 3), k=rng.randint(1, 2))):
            parts[part].append({**order, "sent_at": MIDNIGHT + timedelta(minutes=3 * part, seconds=number % 60)})
    for rows in parts:
        rng.shuffle(rows)
    build = example("distinct_orders", tmp_path, monkeypatch)
    run_with_lost_live_state(spark, tmp_path, build, partial(_feed, tmp_path, parts))
    truth = sorted((order["order_id"], order["cents"]) for order in orders)
    assert published_parquet(tmp_path / "output", ["order_id", "cents"]) == truth


@pytest.mark.spark
def test_foreach_outbox(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[Rows] = [[{"to": f"u{n}", "text": f"{part}-{n}"} for n in range(30)] for part in range(3)]
    feed = partial(_feed, tmp_path, messages)
    run_with_lost_live_state(spark, tmp_path, example("foreach_outbox", tmp_path, monkeypatch), feed)
    sent = [json.loads(path.read_text()) for path in (tmp_path / "output" / "sent").glob("*.json")]
    texts = [row["text"] for one in sent for row in one["messages"]]
    assert sorted(texts) == sorted(row["text"] for part in messages for row in part)


@pytest.mark.spark
def test_own_sink(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[Rows] = [[{"word": f"{part}-{n}", "length": 3} for n in range(30)] for part in range(3)]
    feed = partial(_feed, tmp_path, words)
    run_with_lost_live_state(spark, tmp_path, example("own_sink", tmp_path, monkeypatch), feed)
    lines = [line for path in (tmp_path / "output").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(json.loads(line)["word"] for line in lines) == sorted(row["word"] for part in words for row in part)


def _feed(tmp_path: Path, parts: list[Rows], part: int) -> None:
    put_json(tmp_path / "input", part, parts[part])


@pytest.mark.spark
def test_to_postgres(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: PostgresServer
) -> None:
    rng, dsn = random.Random(4), postgres_server.fresh_database()
    payments: list[Rows] = [
        [
            {
                "payment_id": f"{part}-{number}",
                "merchant": f"shop-{rng.randrange(7)}",
                "cents": rng.randrange(1, 10_000),
                "paid_at": MIDNIGHT + timedelta(minutes=number),
            }
            for number in range(120)
        ]
        for part in range(3)
    ]
    build: Callable[[Path, Any], Any] = example("to_postgres", tmp_path, monkeypatch)
    run_with_lost_live_state(
        spark,
        tmp_path,
        lambda input_dir, _: build(input_dir, dsn),
        lambda part: put_json(tmp_path / "input", part, payments[part]),
    )

    truth = [tuple(row.values()) for part in payments for row in part]
    frame = pd.DataFrame(truth, columns=["payment_id", "merchant", "cents", "paid_at"])
    totals = frame.groupby("merchant")["cents"].agg(["count", "sum"]).itertuples()
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT payment_id, merchant, cents, paid_at FROM payments").fetchall()
        assert sorted(found) == sorted(truth)
        found = connection.execute("SELECT merchant, payments, cents FROM merchant_totals").fetchall()
        assert sorted(found) == sorted((merchant, int(count), int(cents)) for merchant, count, cents in totals)


@pytest.mark.spark
def test_from_nats(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer
) -> None:
    rng = random.Random(4)
    payments: list[Rows] = [
        [{"merchant": f"shop-{rng.randrange(5)}", "cents": rng.randrange(1, 10_000)} for _ in range(60)]
        for _ in range(3)
    ]
    with Stream(nats_server.url, "PAYMENTS", subjects=["payments.>"]) as stream:

        def feed(part: int) -> None:
            stream.publish_many((json.dumps(row).encode() for row in payments[part]), subject=f"payments.{part}")

        build = example("from_nats", tmp_path, monkeypatch)
        run_with_lost_live_state(spark, tmp_path, lambda _, output: build(nats_server.url, output), feed)

    frame = pd.DataFrame([row for part in payments for row in part]).groupby("merchant")["cents"].agg(["count", "sum"])
    assert newest_totals(tmp_path / "output" / "totals") == {
        merchant: (int(count), int(cents)) for merchant, count, cents in frame.itertuples()
    }


@pytest.mark.spark
def test_to_nats(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer) -> None:
    rng = random.Random(5)
    payments: list[Rows] = [
        [{"merchant": f"shop-{rng.randrange(5)}", "cents": rng.randrange(1, 10_000)} for _ in range(60)]
        for _ in range(3)
    ]
    build = example("to_nats", tmp_path, monkeypatch)
    run_with_lost_live_state(
        spark,
        tmp_path,
        lambda input_dir, _: build(nats_server.url, input_dir, tmp_path / "staging"),
        lambda part: put_json(tmp_path / "input", part, payments[part]),
    )

    read_totals = runpy.run_path(str(EXAMPLES / "to_nats.py"))["read_totals"]
    changes = [row for _, row in read_totals(nats_server.url)]
    assert max(Counter((row["merchant"], row["payments"]) for row in changes).values()) == 1
    frame = pd.DataFrame([row for part in payments for row in part]).groupby("merchant")["cents"].agg(["count", "sum"])
    newest = {row["merchant"]: (row["payments"], row["cents"]) for row in changes}
    assert newest == {merchant: (int(count), int(cents)) for merchant, count, cents in frame.itertuples()}


@pytest.mark.spark
def test_from_postgres(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_server: PostgresServer
) -> None:
    rng, dsn = random.Random(7), with_passfile(postgres_server.fresh_database(), tmp_path)
    orders = [[(f"c{rng.randrange(6)}", rng.randrange(10_000)) for _ in range(50)] for _ in range(3)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE orders (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text, cents int8)"
        )

        def feed(part: int) -> None:
            connection.cursor().executemany("INSERT INTO orders (customer, cents) VALUES (%s, %s)", orders[part])

        build = example("from_postgres", tmp_path, monkeypatch)
        run_with_lost_live_state(spark, tmp_path, lambda _, output: build(dsn, output), feed)

    truth = pd.DataFrame([row for part in orders for row in part], columns=["customer", "cents"]).groupby("customer")
    found = [tuple(row.values()) for row in published_delta(tmp_path / "output")]
    assert sorted(found) == [
        (name, int(n), int(cents)) for name, n, cents in truth["cents"].agg(["count", "sum"]).itertuples()
    ]


@pytest.mark.spark
def test_from_kafka(
    spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, rng = Topic(kafka_cluster.servers, "payments"), random.Random(8)
    topic.create(partitions=4)
    payments = [[(f"shop-{rng.randrange(5)}", rng.randrange(10_000)) for _ in range(40)] for _ in range(3)]

    def feed(part: int) -> None:
        for partition in range(4):
            rows = [{"merchant": name, "cents": cents} for name, cents in payments[part][partition::4]]
            topic.publish(map(json.dumps, rows), partition=partition)

    build = example("from_kafka", tmp_path, monkeypatch)
    run_with_lost_live_state(spark, tmp_path, lambda _, output: build(topic.servers, output), feed)
    topic.remove()
    truth = sorted(row for part in payments for row in part)
    assert published_parquet(tmp_path / "output", ["merchant", "cents"]) == truth


@pytest.mark.spark
def test_to_kafka(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka_cluster: KafkaCluster
) -> None:
    servers, rng = kafka_cluster.servers, random.Random(9)
    make_topic(servers, "payments", partitions=3)
    make_topic(servers, "cutline-ledger", cleanup_policy="compact")
    payments: list[Rows] = [
        [{"payment_id": f"{part}-{n}", "merchant": f"shop-{rng.randrange(5)}", "cents": n} for n in range(40)]
        for part in range(3)
    ]
    build = example("to_kafka", tmp_path, monkeypatch)
    run_with_lost_live_state(
        spark,
        tmp_path,
        lambda input_dir, _: build(servers, input_dir, tmp_path / "staging"),
        partial(_feed, tmp_path, payments),
    )
    found = read(Kafka(servers, "payments", staging=tmp_path)).to_arrow()
    for topic in ("payments", "cutline-ledger"):  # other tests may use these names
        delete_topic(servers, topic)
    messages = [(row["key"].decode(), json.loads(row["value"])) for row in found.to_pylist()]
    assert all(key == row["merchant"] for key, row in messages)
    published = sorted((row for _, row in messages), key=itemgetter("payment_id"))
    assert published == sorted((row for part in payments for row in part), key=itemgetter("payment_id"))


@pytest.mark.spark
def test_generated(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = example("generated", tmp_path, monkeypatch)

    def start(**pace: int) -> RunningFlow:
        flow = build(tmp_path / "output", rows=5_000, **pace)
        run: RunningFlow = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
        return run

    run = start(rows_per_second=500)
    wait_until(lambda: batches(run)["payments"] >= 1)
    epoch = run.trigger_checkpoint()
    before = batches(run)["payments"]
    wait_until(lambda: batches(run)["payments"] > before)
    run.stop()
    shutil.rmtree(tmp_path / "storage" / run.name / "spark")
    run = start()
    assert run.status().recovery.epoch == epoch
    run.process_all_available()
    run.stop()
    truth = true_payments(0, 5_000, keys=50, seed=7)
    columns = ["payment_id", "merchant", "amount"]
    assert published_parquet(tmp_path / "output", columns) == list(
        zip(*(truth[name].tolist() for name in columns), strict=True)
    )


@pytest.mark.spark
@pytest.mark.soak
def test_an_example_runs_from_the_command_line(tmp_path: Path) -> None:
    """With nothing set up at all: it makes its samples and publishes them."""
    command = [str(Path(sys.executable).parent / "cutline"), "run", str(EXAMPLES / "union_totals.py"), "--until-done"]
    environment = {name: value for name, value in os.environ.items() if name not in ("INPUT_DIR", "OUTPUT_DIR")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cutline-data" / "examples" / "union_totals"
    lines = [line for file in folder.glob("input/*/*.json") for line in file.read_text().splitlines()]
    ids = [(json.loads(line)["payment_id"],) for line in lines]
    assert published_parquet(folder / "output" / "ledger", ["payment_id"]) == sorted(ids)
    assert sum(payments for payments, _ in newest_totals(folder / "output" / "totals").values()) == len(ids)


# ------------------------------------------------------------------------------------------------- the guide


@pytest.mark.spark
def test_a_watermark_ends_with_its_operator(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    flow = Flow("windows")

    @flow.operator()
    def clicks(spark: SparkSession) -> DataFrame:
        read = spark.readStream.schema("user string, clicked_at timestamp").json(str(tmp_path / "input"))
        return read.withWatermark("clicked_at", "10 minutes")

    @flow.operator(inputs=[clicks])
    def per_hour(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy(F.window("clicked_at", "1 hour")).count()

    flow.sink(per_hour, Parquet(tmp_path / "output"))
    with pytest.raises(FlowDefinitionError, match="without watermark"):
        flow.start(spark=spark, storage=str(tmp_path / "storage"))


@pytest.mark.spark
def test_the_delay_of_a_watermark_may_change_between_runs(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.readStream.schema("user string, clicked_at timestamp").json(str(tmp_path))
    stored = [schema_message(rows.withWatermark("clicked_at", f"{minutes} minutes")) for minutes in (10, 20)]
    assert stored[0] == stored[1] == schema_message(rows)


@pytest.mark.spark
def test_waiting_for_all_input_goes_past_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    fuse = tmp_path / "fuse"
    fuse.write_text("burns once")
    flow = Flow("fused")

    @flow.operator()
    def numbers(spark: SparkSession) -> DataFrame:
        source = spark.readStream.format("cutline_generator").options(rows=100).load()

        def blow(batches: Any) -> Any:
            if fuse.exists():
                fuse.unlink()
                raise ValueError("the fuse has blown")
            yield from batches

        return source.mapInArrow(blow, source.schema)

    flow.sink(numbers, Parquet(tmp_path / "output"))
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0, restart_backoff="10ms")
    run.process_all_available()
    run.stop()
    assert run.status().operators["numbers"].restarts == 1
    assert published_parquet(tmp_path / "output", ["payment_id"]) == [(number,) for number in range(100)]


def test_the_guide_names_every_example_and_each_has_a_test() -> None:
    guide, tests = (ROOT / "docs" / "guide.md").read_text(), Path(__file__).read_text()
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert [name for name in names if f"(../examples/{name}.py)" not in guide] == []
    assert [name for name in names if f'example("{name}", ' not in tests] == []
