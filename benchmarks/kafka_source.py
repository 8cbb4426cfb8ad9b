"""Rows per second and processor time per row of the two Kafka sources: Spark's own connector (a jar) and ours (none).

Both read the same topic of a real broker on this machine into Spark's noop sink, with the same number of rows in each
batch. They alternate; the first batch of each query, which warms up, is not counted. Processor time is that of the JVM
and of the Python processes that it starts, without the broker's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Producer

from cutline.config.spark_settings import SparkStart
from cutline.connectors.spark_sources import SOURCES
from cutline.spark.session import jvm_pid, open_session
from cutline.testing.servers.jars import SPARK_KAFKA, classpath, why_not
from cutline.testing.servers.kafka import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TICKS = os.sysconf("SC_CLK_TCK")


class Measured(NamedTuple):
    rows_per_s: float
    cpu_us_per_row: float
    batches: int


def fill(servers: str, topic: str, *, partitions: int, rows: int, size: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
        }
    )
    value = os.urandom(size // 2).hex().encode()[:size]
    for number in range(rows):
        while True:
            try:
                producer.produce(topic, key=b"%d" % (number % 1000), value=value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush()


def options_of(contender: str, servers: str, topic: str, per_batch: int) -> tuple[str, dict[str, str]]:
    if contender == "spark":
        return "kafka", {
            "kafka.bootstrap.servers": servers,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(per_batch),
            "kafka.isolation.level": "read_committed",
        }
    return "cutline_kafka", {"servers": servers, "topic": topic, "max_per_batch": str(per_batch)}


def measure(spark: SparkSession, contender: str, servers: str, topic: str, per_batch: int) -> Measured:
    name, options = options_of(contender, servers, topic, per_batch)
    folder = tempfile.mkdtemp(prefix="cutline-bench-")
    frame = spark.readStream.format(name).options(**options).load()
    frame = frame.selectExpr("partition", "offset", "key", "value")
    query = frame.writeStream.format("noop").option("checkpointLocation", f"{folder}/c").start()
    try:
        while not any(one.numInputRows for one in query.recentProgress):
            time.sleep(0.02)
        cpu_s, begun = tree_cpu_s(jvm_pid(spark)), time.monotonic()
        counted = sum(one.numInputRows for one in query.recentProgress)
        query.processAllAvailable()
        cpu_s, took_s = tree_cpu_s(jvm_pid(spark)) - cpu_s, time.monotonic() - begun
        done = query.recentProgress
        rows = sum(one.numInputRows for one in done) - counted
    finally:
        query.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return Measured(rows / took_s, cpu_s / rows * 1e6, len(done) - 1)


def tree_cpu_s(root: int) -> float:
    """Of a process and all that it has started, also if they have ended."""
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        words = text.rpartition(")")[2].split()
        parents[int(path.parent.name)] = (int(words[1]), sum(map(int, words[11:15])) / TICKS)
    total, inside = 0.0, {root}
    while inside:
        total += sum(parents[pid][1] for pid in inside if pid in parents)
        inside = {pid for pid, (parent, _) in parents.items() if parent in inside}
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--size", type=int, default=100, help="bytes of a value")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--per-batch", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--contenders", default="spark,cutline")
    given = parser.parse_args()
    for problem in (KafkaCluster.why_not(), why_not(SPARK_KAFKA)):
        if problem:
            sys.exit(problem)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    cluster = KafkaCluster()
    try:
        cluster.start()
        topic = cluster.fresh_topic(partitions=given.partitions)
        fill(cluster.servers, topic, partitions=given.partitions, rows=given.rows, size=given.size)
        settings = {"spark.driver.extraClassPath": classpath(SPARK_KAFKA)}
        spark = open_session("kafka-source", None, SparkStart(settings=settings))
        for source in SOURCES:
            spark.dataSource.register(source)
        found: dict[str, list[Measured]] = {name: [] for name in given.contenders.split(",")}
        for turn in range(given.repeat + 1):
            for name, results in found.items():
                one = measure(spark, name, cluster.servers, topic, given.per_batch)
                print(f"{'warm-up' if turn == 0 else turn} {name} {one}", file=sys.stderr)
                if turn:
                    results.append(one)
        spark.stop()
    finally:
        cluster.remove()
    print(json.dumps(summary(found, given)))


def summary(found: dict[str, list[Measured]], given: argparse.Namespace) -> dict[str, Any]:
    shown: dict[str, Any] = {"rows": given.rows, "partitions": given.partitions, "per_batch": given.per_batch}
    for name, results in found.items():
        shown[name] = {
            "rows_per_s": round(statistics.median(one.rows_per_s for one in results)),
            "cpu_us_per_row": round(statistics.median(one.cpu_us_per_row for one in results), 2),
        }
    return shown


if __name__ == "__main__":
    main()
