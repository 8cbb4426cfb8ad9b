"""How far behind sources are and how long their servers keep input, asked of real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.base.clock import now_ms
from cutline.connectors.kafka.spark_connector import encoded_subscription
from cutline.connectors.nats.spark_reader import NatsReader
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import NotDone
from cutline.model.plan import PlannedSource
from cutline.ports.inspection import SourceProgress
from cutline.ports.source_guard import Today
from tests.support.kafka_topics import Topic
from tests.support.streams import Stream

if TYPE_CHECKING:
    from cutline.testing.servers.kafka import KafkaCluster
    from cutline.testing.servers.nats import NatsServer

GUARD = ReplayGuard()
HOUR_MS = 3_600_000


def asked(newest: bytes, *stored: bytes, planned: PlannedSource | None = None) -> SourceProgress:
    kind = GUARD.kind_of(newest, Path())
    assert kind is not None and kind.progress is not None
    found = kind.progress(newest, stored, Today(newest, [planned] if planned is not None else []))
    assert found is not None
    return found


def position(source: str, topic: Topic, *offsets: int) -> bytes:
    numbered = {str(number): offset for number, offset in enumerate(offsets)}
    if source == "kafka":
        return json.dumps({topic.name: numbered}).encode()
    own = {"source": source, "servers": topic.servers, "topic": topic.name, "topic_id": "", "begin": numbered}
    return json.dumps(own | {"offsets": numbered}).encode()


@pytest.mark.parametrize("source", ["cutline_kafka", "kafka"])
def test_kafka(kafka_cluster: KafkaCluster, source: str) -> None:
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic(partitions=2, retention_ms=str(HOUR_MS)))
    settings = encoded_subscription({"subscribe": topic.name})
    planned = PlannedSource(format="kafka", address=topic.servers, settings=settings) if source == "kafka" else None
    begun = now_ms()
    for partition in (0, 1):
        topic.publish(("x" * 100 for _ in range(10)), partition=partition)
    written = now_ms()
    old, end = position(source, topic, 4, 10), position(source, topic, 10, 10)
    found = asked(position(source, topic, 8, 10), old, end, planned=planned)
    assert found.what == f"topic {topic.name}"
    assert [(one.position, one.end) for one in found.partitions] == [(8, 10), (10, 10)]
    first, last = found.expiries
    assert first.at_ms is not None and begun + HOUR_MS <= first.at_ms <= written + HOUR_MS
    assert first.limit == f"retention.ms of topic {topic.name}"
    assert last.at_ms is None, "nothing that it needs is written yet"
    # Six messages of 100 bytes follow the position, and only 300 bytes are kept: it may be dropped at any moment.
    topic.configure("retention.bytes", "300")
    (soon,) = asked(end, old, planned=planned).expiries
    assert soon.limit == f"retention.bytes of topic {topic.name}" and soon.at_ms is not None and soon.at_ms < now_ms()
    topic.configure("cleanup.policy", "compact")
    assert asked(end, old, planned=planned).expiries[0].at_ms is None, "nothing is dropped for its age or size"


def test_brokers_that_do_not_answer(kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.kafka.client.TIMEOUT_S", 0.3)
    gone = Topic(kafka_cluster.servers, "any")
    gone.servers = "127.0.0.1:1"
    with pytest.raises(NotDone, match="no Kafka broker can be reached"):
        asked(position("cutline_kafka", gone, 1))


def test_nats(nats_server: NatsServer) -> None:
    with Stream(nats_server.url, nats_server.fresh_stream()) as stream:
        stream.publish(*range(1, 11))
        reader = NatsReader({"url": stream.url, "stream": stream.name, "max_per_batch": "4"})
        first = reader.latestOffset(reader.initialOffset(), None)
        second = reader.latestOffset(first, None)
        reader.stop()
        found = asked(json.dumps(second).encode(), json.dumps(first).encode())
        assert found.what == f"stream {stream.name}"
        assert [(one.position, one.end) for one in found.partitions] == [(9, 11)]
        assert [one.at_ms for one in found.expiries] == [None], "the stream keeps everything"
