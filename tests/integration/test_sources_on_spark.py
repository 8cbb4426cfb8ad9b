"""Kafka, by both sources, and PostgreSQL on real Spark and real servers: read, stopped, read on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.flow import Flow
from cutline.sinks import Parquet
from cutline.testing.servers.jars import SPARK_KAFKA, why_not
from tests.support.kafka_topics import Topic
from tests.support.passfile import with_passfile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.testing.servers.kafka import KafkaCluster
    from cutline.testing.servers.postgres import PostgresServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def run_twice(
    spark: SparkSession,
    tmp_path: Path,
    format_: str,
    options: dict[str, Any],
    columns: list[str],
    *,
    feed: Callable[[], None],
) -> list[Any]:
    """All that is there, a checkpoint, a stop; then what comes after it."""

    def once() -> str:
        flow = Flow("reading")

        @flow.operator()
        def rows(spark: SparkSession) -> DataFrame:
            return spark.readStream.format(format_).options(**options).load().selectExpr(*columns)

        flow.sink(rows, Parquet(tmp_path / "table"))
        run = flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)
        run.process_all_available()
        run.trigger_checkpoint()
        run.stop()
        return str(run.status().recovery.path)

    feed()
    assert once() == "fresh"
    feed()
    assert once() == "resume"
    found = spark.read.parquet(str(tmp_path / "table")).drop("cutline_epoch").collect()
    return sorted(tuple(row) for row in found)


@pytest.mark.parametrize("source", ["cutline_kafka", "kafka"])
def test_kafka(spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path, source: str) -> None:
    if source == "kafka" and why_not(SPARK_KAFKA):
        pytest.skip(why_not(SPARK_KAFKA))
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic(partitions=4))
    numbers = iter(range(40))

    def feed() -> None:
        for partition in range(4):
            topic.publish((next(numbers) for _ in range(5)), partition=partition)

    options: dict[str, Any] = {"servers": topic.servers, "topic": topic.name, "max_per_batch": 7}
    if source == "kafka":
        options = {"kafka.bootstrap.servers": topic.servers, "subscribe": topic.name, "maxOffsetsPerTrigger": 7}
        options |= {"startingOffsets": "earliest"}
    found = run_twice(spark, tmp_path, source, options, ["cast(cast(value as string) as int) as n"], feed=feed)
    assert found == [(number,) for number in range(40)]


def test_postgres(spark: SparkSession, postgres_server: PostgresServer, tmp_path: Path) -> None:
    url = with_passfile(postgres_server.fresh_database(), tmp_path)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, price numeric(8,2))")

        def feed() -> None:
            connection.execute("INSERT INTO orders (price) SELECT n / 4.0 FROM generate_series(1, 20) AS n")

        options = {"url": url, "table": "orders", "key": "id", "max_per_batch": 7}
        found = run_twice(
            spark, tmp_path, "cutline_postgres", options, ["id", "cast(price * 100 as int) as p"], feed=feed
        )
    assert found == [(20 * part + n, 25 * n) for part in range(2) for n in range(1, 21)]
