"""The Kafka sink on a mock cluster, for the suites of ``cutline.testing``: each folder has a topic of its own."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from cutline.sinks import Kafka
from cutline.testing.conformance.sinks import Row, SinkSuite
from tests.support.kafka_mock import MockKafka

#: Where the cluster is: a process that the suite starts to kill it has no fixtures.
SERVERS = "CUTLINE_TEST_KAFKA_SERVERS"
#: The clusters of this process, by their servers.
CLUSTERS: dict[str, MockKafka] = {}


def topic_of(tmp_path: Path) -> str:
    return f"out-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"


def make_kafka(tmp_path: Path, **options: Any) -> Kafka:
    servers, topic = os.environ[SERVERS], topic_of(tmp_path)
    if servers in CLUSTERS:
        for one in (topic, f"{topic}-ledger"):
            CLUSTERS[servers].make(one)
    return Kafka(servers, topic, staging=tmp_path / "staging", ledger_topic=f"{topic}-ledger", timeout_s=10, **options)


class KafkaTarget(SinkSuite):
    can_be_shared = True
    # Without the middle: there the mock cluster shows what no reader of a real one sees.
    commit_crash_points = ("sink-commit-begun", "sink-commit-done")
    rich_schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("tags", pa.list_(pa.string()))])
    rich_rows: ClassVar[list[Row]] = [
        {"id": 1, "text": "naïve — ☃", "tags": ["a", None]},
        {"id": 2, "text": None, "tags": None},
    ]

    def make_sink(self, tmp_path: Path) -> Kafka:
        return make_kafka(tmp_path)

    def read_rows(self, tmp_path: Path) -> list[Row]:
        return [json.loads(one.value or b"") for one in CLUSTERS[os.environ[SERVERS]].records(topic_of(tmp_path))]
