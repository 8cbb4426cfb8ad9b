"""The Kafka sink on a real broker, for the suites of ``cutline.testing``: each folder has a topic of its own."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from cutline.connectors.kafka.client import (
    HiddenEndError,
    Record,
    administrator,
    bounds_of,
    consumer,
    finished_bounds,
    partitions_of,
    read_range,
)
from cutline.connectors.reading import read
from cutline.sinks import Kafka
from cutline.testing.conformance.sinks import SIMPLE, Case, Row, SinkSuite

#: Where the cluster is: a process that the suite starts to kill it has no fixtures.
SERVERS = "CUTLINE_TEST_KAFKA_SERVERS"
TIMEOUT_S = 10.0
_MARKERS_SECONDS = 2.0
COPIES = "CUTLINE_TEST_KAFKA_COPIES"


def topic_of(tmp_path: Path) -> str:
    return f"out-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"


def ledger_of(tmp_path: Path) -> str:
    return f"{topic_of(tmp_path)}-ledger"


def make_topic(servers: str, topic: str, *, partitions: int = 1, **config: Any) -> None:
    """Unless there is one already. ``config``: its settings, with ``_`` for ``.``."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.cimpl import NewTopic

    settings = {key.replace("_", "."): value for key, value in config.items()}
    copies = int(os.environ.get(COPIES, "1"))
    made = NewTopic(topic, num_partitions=partitions, replication_factor=copies, config=settings)
    admin = administrator(servers)  # it must outlive the answer
    try:
        admin.create_topics([made], operation_timeout=30.0)[topic].result(60.0)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def delete_topic(servers: str, topic: str) -> None:
    """Returns when the broker has forgotten it."""
    admin = administrator(servers)
    admin.delete_topics([topic], operation_timeout=10)[topic].result(10)
    deadline = time.monotonic() + 10
    while topic in admin.list_topics(timeout=10).topics:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def make_topics(tmp_path: Path, *, partitions: int = 2, **config: str) -> None:
    """The target and the ledger of a folder. ``config``: settings of the target."""
    servers = os.environ[SERVERS]
    make_topic(servers, topic_of(tmp_path), partitions=partitions, **config)
    make_topic(servers, ledger_of(tmp_path), cleanup_policy="compact")


def make_kafka(tmp_path: Path, **options: Any) -> Kafka:
    chosen: dict[str, Any] = {"timeout_s": TIMEOUT_S, "ledger_topic": ledger_of(tmp_path)} | options
    return Kafka(os.environ[SERVERS], topic_of(tmp_path), staging=tmp_path / "staging", **chosen)


def records_of(servers: str, topic: str, *, isolation: str = "read_committed") -> list[Record]:
    """What a reader sees, partition after partition.

    A commit returns when its outcome is certain; readers see it when its marker is in their partition, which is soon.
    """
    with consumer(servers, isolation=isolation) as client:
        found = []
        for one in partitions_of(client, servers, topic) or ():
            try:
                bounds = finished_bounds(client, servers, topic, one, timeout_s=_MARKERS_SECONDS)
            except HiddenEndError:  # a transaction is open
                bounds = bounds_of(client, servers, topic, one)
            found += [record for page in read_range(client, servers, topic, one, bounds) for record in page]
        return found


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, **options: Any) -> Case:
    """A sink that is opened and claimed, as a start of a flow does it."""
    sink = make_kafka(tmp_path, **options)
    case = Case(sink=sink, context=KafkaTarget().context(schema))
    take_over(case, sink)
    return case


def take_over(case: Case, sink: Kafka) -> None:
    """As the next start does it."""
    case.open(sink)
    sink.claim("", expected=sink.claimed())


def ids_in(tmp_path: Path) -> list[int]:
    return KafkaTarget().ids(tmp_path)


class KafkaTarget(SinkSuite):
    can_be_shared = True
    rich_schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("real", pa.float64()),
            pa.field("flag", pa.bool_()),
            pa.field("text", pa.string()),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("counts", pa.map_(pa.string(), pa.int64())),
            pa.field("point", pa.struct([pa.field("x", pa.int32())])),
        ]
    )
    rich_rows: ClassVar[list[Row]] = [
        {
            "id": 1,
            "real": 0.25,
            "flag": True,
            "text": "naïve — ☃ 'quoted' \\ %20\n",
            "tags": ["a", None, ""],
            "counts": {"k": 1, "n": None},
            "point": {"x": None},
        },
        {"id": 2, "real": None, "flag": None, "text": None, "tags": None, "counts": None, "point": None},
    ]

    def make_sink(self, tmp_path: Path) -> Kafka:
        make_topics(tmp_path)
        return make_kafka(tmp_path)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        return [json.loads(one.value or b"") for one in records_of(os.environ[SERVERS], topic_of(tmp_path))]

    def seen(self, tmp_path: Path, *, after: int | None = None, as_of: int | None = None) -> tuple[int, list[int]]:
        found = read(self.make_sink(tmp_path), after=after, as_of=as_of)
        return found.epoch, sorted(json.loads(value)["id"] for value in found.to_arrow()["value"].to_pylist())
