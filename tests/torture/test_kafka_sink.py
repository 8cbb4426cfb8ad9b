"""The Kafka sink on a real broker: the suite that every sink passes, kills included."""

from __future__ import annotations

import pytest

from cutline.testing.conformance.sinks import SinkConformance
from cutline.testing.servers.kafka import KafkaCluster
from tests.support.kafka_target import SERVERS, KafkaTarget

pytestmark = [pytest.mark.kill]


@pytest.fixture(autouse=True)
def cluster(kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    monkeypatch.setenv(SERVERS, kafka_cluster.servers)
    return kafka_cluster


class TestKafka(KafkaTarget, SinkConformance):
    pass
