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
from typing import TYPE_CHECKING

import psycopg
import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.connectors.generator.spark_reader import payments
from cutline.connectors.replay_guard import ReplayGuard
from cutline.connectors.spark_sources import ADDRESS_OPTIONS, SETTINGS, SOURCES
from cutline.errors import ConfigError, LostInputError
from cutline.model.plan import PlannedSource
from cutline.model.status import SourceStatus
from cutline.spark.source_discovery import KnownSources, planned_sources
from cutline.testing.servers.jars import SPARK_KAFKA, why_not
from tests.support.guarded import Guarded
from tests.support.kafka_topics import Topic
from tests.support.passfile import with_passfile
from tests.support.streams import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.testing.servers.kafka import KafkaCluster
    from cutline.testing.servers.nats import NatsServer
    from cutline.testing.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


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


@pytest.mark.parametrize("source", ["cutline_kafka", "kafka"])
def test_offsets_that_a_topic_has_dropped(
    spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path, numbers: Iterator[int], source: str
) -> None:
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic(partitions=2))
    flow = Guarded(spark, tmp_path, kafka_source(source, topic))
    epoch = flow.read_twice(lambda: topic.publish((next(numbers) for _ in range(10)), partition=1))
    topic.drop(15, partition=1)
    published = flow.give_up(epoch, f"topic {topic.name}, partition 1: offsets 10 to 14", 5)
    assert published == [*range(10), *range(15, 20)]


@pytest.mark.parametrize("source", ["cutline_kafka", "kafka"])
def test_a_topic_that_was_created_again(
    spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path, numbers: Iterator[int], source: str
) -> None:
    """It is longer than the former one by the time the flow starts, so only its id shows that it is another."""
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic())
    flow = Guarded(spark, tmp_path, kafka_source(source, topic))
    epoch = flow.read_twice(lambda: topic.publish(next(numbers) for _ in range(10)))
    topic.create_again(partitions=2)
    topic.publish(range(100, 130))
    topic.publish(range(130, 135), partition=1)
    with pytest.raises(LostInputError, match="another topic has this name now"):
        flow.start()
    told = CliRunner().invoke(
        app, ["verify", "--flow", "guarded", "--json"], env={"CUTLINE_STORAGE": str(tmp_path / "storage")}
    )
    assert "another topic has this name now" in told.stdout, "also without the flow's code"
    published = flow.give_up(epoch, f"topic {topic.name}, partition 0: offsets 10 to 19", 10)
    assert published == [*range(10), *range(100, 135)]
    run = flow.start()
    assert run.status().recovery.path == "resume", "from now on it is this topic"
    run.stop()


def test_sparks_own_source_as_the_status_and_the_log_describe_it(
    spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic())
    flow = Guarded(spark, tmp_path, kafka_source("kafka", topic, failOnDataLoss="false"))
    with caplog.at_level(logging.WARNING, "cutline"):
        run = flow.start()
    (source,) = run.status().operators["rows"].sources
    run.stop()
    assert source.guarded and "failOnDataLoss is false" in source.note
    assert any("source_may_lose_input" in record.getMessage() for record in caplog.records)
    secured = kafka_source(
        "kafka", topic, **{"kafka.security.protocol": "SASL_SSL", "kafka.sasl.jaas.config": "s3cr3t"}
    )
    known = KnownSources(classes=SOURCES, settings=SETTINGS, address_options=ADDRESS_OPTIONS)
    (planned,) = planned_sources(secured(spark), known)
    assert "CUTLINE_KAFKA_CONFIG" in (ReplayGuard().why_not_guarded(planned) or "") and "s3cr3t" not in repr(planned)


def kafka_source(source: str, topic: Topic, **options: str) -> Callable[[SparkSession], DataFrame]:
    if source == "kafka" and why_not(SPARK_KAFKA):
        pytest.skip(why_not(SPARK_KAFKA))
    ours = {"servers": topic.servers, "topic": topic.name}
    sparks = {"kafka.bootstrap.servers": topic.servers, "subscribe": topic.name, "startingOffsets": "earliest"}

    def read(spark: SparkSession) -> DataFrame:
        stream = spark.readStream.format(source).options(**(sparks if source == "kafka" else ours), **options)
        return stream.load().selectExpr("cast(value as string) as n")

    return read


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
