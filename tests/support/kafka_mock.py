"""confluent-kafka's mock cluster: it speaks Kafka's protocol, and its transactions and fences are fake."""

from __future__ import annotations

import time

from confluent_kafka import Producer

from cutline.connectors.kafka.client import Record, bounds_of, consumer, partitions_of, read_range


class MockKafka:
    """Lives as long as this object; every topic that is written to has four partitions."""

    def __init__(self) -> None:
        self._host = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
        broker = next(iter(self._host.list_topics(timeout=10).brokers.values()))
        self.servers = f"{broker.host}:{broker.port}"

    def make(self, topic: str) -> None:
        """As brokers do that make topics by themselves."""
        deadline = time.monotonic() + 10
        while topic not in self._host.list_topics(topic, timeout=10).topics or not self._partitions(topic):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _partitions(self, topic: str) -> list[int]:
        with consumer(self.servers) as client:
            return partitions_of(client, self.servers, topic) or []

    def publish(self, topic: str, *values: object, partition: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        for value in values:
            producer.produce(topic, key=b"k", value=str(value).encode(), partition=partition)
        producer.flush(10)

    def publish_record(self, topic: str, record: Record, *, partition: int) -> None:
        """A copy of a message, in another partition."""
        producer = Producer({"bootstrap.servers": self.servers, "log_level": 0})
        producer.produce(topic, key=record.key, value=record.value, partition=partition)
        producer.flush(10)

    def partition_of(self, topic: str, record: Record) -> int:
        with consumer(self.servers) as client:
            for one in partitions_of(client, self.servers, topic) or ():
                bounds = bounds_of(client, self.servers, topic, one)
                for page in read_range(client, self.servers, topic, one, bounds):
                    if any(found.key == record.key for found in page):
                        return one
        raise LookupError(topic)

    def records(self, topic: str) -> list[Record]:
        with consumer(self.servers) as client:
            found = []
            for one in partitions_of(client, self.servers, topic) or ():
                bounds = bounds_of(client, self.servers, topic, one)
                found += [record for page in read_range(client, self.servers, topic, one, bounds) for record in page]
            return found
