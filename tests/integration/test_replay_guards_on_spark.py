"""Input that is gone when a flow is taken back: refused with the exact range, or given up and written down.

Of files and of a purged stream: test_flow_on_spark.py, test_nats_on_spark.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.connectors.generator.spark_reader import payments
from cutline.connectors.kafka import positions as kafka_positions
from cutline.connectors.kafka.client import Bounds, bounds_of
from cutline.connectors.spark_sources import ADDRESS_OPTIONS, SETTINGS, SOURCES
from cutline.errors import ConfigError, LostInputError
from cutline.flow import Flow
from cutline.model.layout import Layout
from cutline.model.plan import PlannedSource
from cutline.model.status import SourceStatus
from cutline.runtime.handle import RunningFlow
from cutline.sinks import Parquet
from cutline.spark.source_discovery import KnownSources, planned_sources
from cutline.storage.local import LocalStore
from tests.support.kafka_mock import MockKafka
from tests.support.passfile import with_passfile
from tests.support.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.testing.servers.nats import NatsServer
    from cutline.testing.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


class Guarded:
    """A flow that publishes the numbers ``n`` of a source; ``feed`` has been called before each checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, read: Callable[[SparkSession], DataFrame]) -> None:
        self._spark = spark
        self._folder = folder
        self._read = read

    def start(self, **options: Any) -> RunningFlow:
        flow = Flow("guarded")

        @flow.operator()
        def rows(spark: SparkSession) -> DataFrame:
            return self._read(spark).selectExpr("cast(n as long) as n")

        flow.sink(rows, Parquet(self._folder / "table"), name="table")
        settings: dict[str, Any] = {
            "storage": str(self._folder / "storage"),
            "checkpoint_interval": 0,
            "retain_checkpoints": 5,
        }
        return flow.start(spark=self._spark, **(settings | options))

    def read_twice(self, feed: Callable[[], None]) -> int:
        """Returns the checkpoint between the two."""
        feed()
        run = self.start()
        run.process_all_available()
        epoch = run.trigger_checkpoint()
        feed()
        run.process_all_available()
        run.trigger_checkpoint()
        run.stop()
        return epoch

    def give_up(self, epoch: int, what: str, parts: int) -> list[int]:
        """Refused by the range; and without it, it stands everywhere. Returns what is published then."""
        with pytest.raises(LostInputError) as refused:
            self.start(restore_to=epoch)
        assert f"since epoch {epoch} is gone: {what}; a restore would silently lose" in str(refused.value)
        run = self.start(restore_to=epoch, missing_input="continue")
        (lost,) = run.status().recovery.lost_input
        assert (lost.operator, lost.what, lost.parts) == ("rows", what, parts)
        (recorded,) = LocalStore.reading(self.layout).generations.load_all()[-1].lost_input
        assert (recorded.what, recorded.parts) == (what, parts)
        counted = f'cutline_lost_input_total{{flow="guarded",operator="rows"}} {parts}.0'
        assert counted.encode() in generate_latest(run.metrics.registry)
        run.process_all_available()
        run.stop()
        return sorted(row["n"] for row in self._spark.read.parquet(str(self._folder / "table")).collect())

    @property
    def layout(self) -> Layout:
        return Layout(self._folder / "storage", "guarded")


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def numbers() -> Iterator[int]:
    return iter(range(1000))


def test_a_stream_that_was_made_again(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, numbers: Iterator[int]
) -> None:
    def read(spark: SparkSession) -> DataFrame:
        stream = spark.readStream.format("cutline_nats").options(url=nats_server.url, stream="AGAIN").load()
        return stream.selectExpr("cast(data as string) as n")

    flow = Guarded(spark, tmp_path, read)
    with Stream(nats_server.url, "AGAIN") as stream:
        epoch = flow.read_twice(lambda: stream.publish_many(b"%d" % next(numbers) for _ in range(20)))
        stream.remove()
        stream.make()
        stream.publish_many(b"%d" % number for number in range(100, 105))
        published = flow.give_up(epoch, "stream AGAIN: sequences 21 to 40", 20)
    assert published == [*range(20), *range(100, 105)]


def test_rows_that_were_deleted_from_a_table(
    spark: SparkSession, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    url = with_passfile(postgres_server.fresh_database(), tmp_path)

    def read(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("cutline_postgres").options(url=url, table="numbers", key="n").load()

    flow = Guarded(spark, tmp_path, read)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (n int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text text)")

        def feed() -> None:
            connection.execute("INSERT INTO numbers (text) SELECT 'x' FROM generate_series(1, 20)")

        epoch = flow.read_twice(feed)
        connection.execute("DELETE FROM numbers WHERE n BETWEEN 25 AND 30")
        published = flow.give_up(epoch, "table numbers: 6 of the rows with n 21 to 40", 6)
    assert published == [*range(1, 25), *range(31, 41)]


def test_offsets_that_a_topic_has_dropped(
    spark: SparkSession, tmp_path: Path, numbers: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock cluster never drops anything, so the guard is told that it has; the readers go on with the rest."""
    kafka = MockKafka()

    def read(spark: SparkSession) -> DataFrame:
        topic = spark.readStream.format("cutline_kafka").options(servers=kafka.servers, topic="numbers").load()
        return topic.selectExpr("cast(value as string) as n")

    def dropped(client: Any, servers: str, topic: str, partition: int) -> Bounds:
        there = bounds_of(client, servers, topic, partition)
        return Bounds(15, there.end) if partition == 2 else there

    flow = Guarded(spark, tmp_path, read)
    epoch = flow.read_twice(lambda: kafka.publish("numbers", *(next(numbers) for _ in range(10)), partition=2))
    monkeypatch.setattr(kafka_positions, "bounds_of", dropped)
    published = flow.give_up(epoch, "topic numbers, partition 2: offsets 10 to 14", 5)
    assert published == [*range(10), *range(15, 20)]


def test_a_generator_with_other_options(spark: SparkSession, tmp_path: Path) -> None:
    options = {"rows": 0, "keys": 10, "seed": 7}

    def read(spark: SparkSession) -> DataFrame:
        made = spark.readStream.format("cutline_generator").options(**options).load()
        return made.selectExpr("payment_id * 100000 + amount as n")

    def truth(rows: int, seed: int) -> list[int]:
        made = payments(0, rows, keys=10, seed=seed)
        return [int(n) for n in made["payment_id"] * 100_000 + made["amount"]]

    flow = Guarded(spark, tmp_path, read)
    options["rows"] = 300
    run = flow.start()
    run.process_all_available()
    epoch = run.trigger_checkpoint()
    run.stop()
    options["rows"] = 500
    run = flow.start()
    assert run.status().operators["rows"].sources == [SourceStatus(source="cutline_generator", guarded=True)]
    run.process_all_available()
    run.stop()
    options["seed"] = 8
    with pytest.raises(
        LostInputError, match=r"everything from row 500 on \(its options have changed \(seed was 7, is 8"
    ):
        flow.start()
    assert flow.give_up(epoch, "generator with seed 7: rows 300 to 499", 200) == sorted(
        truth(300, seed=7) + truth(500, seed=8)
    )
    options["keys"] = "many"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cutline_generator: keys is 'many'"):
        flow.start()


def test_a_source_that_nobody_can_ask_is_reported_as_not_guarded(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load().selectExpr("value as n")

    flow = Guarded(spark, tmp_path, read)
    with caplog.at_level(logging.WARNING, "cutline"):
        run = flow.start()
    (source,) = run.status().operators["rows"].sources
    assert (source.source, source.guarded) == ("rate-micro-batch", False) and "keep the input" in source.note
    (line,) = [record.getMessage() for record in caplog.records if "source_not_guarded" in record.getMessage()]
    assert "operator=rows source=rate-micro-batch" in line
    wait_until(lambda: run.status().operators["rows"].batch > 0)
    epoch = run.trigger_checkpoint()
    run.stop()
    storage = {"CUTLINE_STORAGE": str(tmp_path / "storage")}
    told = CliRunner().invoke(app, ["verify", "--flow", "guarded", "--json"], env=storage)
    (checked,) = json.loads(told.stdout)["epochs"]
    assert "rows: source 0 is not guarded" in checked["notes"][0] and checked["problems"] == []
    run = flow.start(restore_to=epoch)
    assert run.status().recovery.path == "local", "it works like any other"
    run.stop()


def test_the_servers_that_the_code_names_are_found_in_the_plan(spark: SparkSession) -> None:
    from pyspark.errors import AnalysisException

    for source in SOURCES:
        with contextlib.suppress(AnalysisException):  # another flow of this session has registered it
            spark.dataSource.register(source)
    known = KnownSources(classes=SOURCES, settings=SETTINGS, address_options=ADDRESS_OPTIONS)
    options = {"cutline_nats": {"URL": "nats://a:1", "stream": "S"}, "cutline_kafka": {"servers": "b:2", "topic": "t"}}
    found = [
        planned_sources(spark.readStream.format(name).options(**given).load(), known) for name, given in options.items()
    ]
    assert found == [
        (PlannedSource(format="cutline_nats", address="nats://a:1"),),
        (PlannedSource(format="cutline_kafka", address="b:2"),),
    ]
