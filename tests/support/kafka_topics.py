"""What tests do to topics of a real broker: write, drop, create again, add partitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

_SECONDS = 60.0


class Topic:
    """One topic of a cluster."""

    def __init__(self, servers: str, name: str) -> None:
        self.servers = servers
        self.name = name
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 2})

    def publish(self, values: Iterable[object], *, partition: int = 0, key: bytes | None = None) -> None:
        producer = Producer({"bootstrap.servers": self.servers, "log_level": 2, "linger.ms": 0})
        for value in values:
            producer.produce(self.name, key=key, value=str(value).encode(), partition=partition)
        assert producer.flush(_SECONDS) == 0

    def transaction(self, values: Iterable[object], *, partition: int = 0, end: str = "commit") -> Producer:
        """``end``: commit, abort or nothing; returns the producer, whose transaction is open then."""
        producer = Producer(
            {
                "bootstrap.servers": self.servers,
                "transactional.id": f"{self.name}-{time.monotonic_ns()}",
                "transaction.timeout.ms": 60_000,
                "log_level": 2,
            }
        )
        producer.init_transactions(_SECONDS)
        producer.begin_transaction()
        for value in values:
            producer.produce(self.name, value=str(value).encode(), partition=partition)
        assert producer.flush(_SECONDS) == 0
        if end == "commit":
            producer.commit_transaction(_SECONDS)
        elif end == "abort":
            producer.abort_transaction(_SECONDS)
        return producer

    def drop(self, before: int, *, partition: int = 0) -> None:
        """The messages before an offset, as an administrator does."""
        at = TopicPartition(self.name, partition, before)
        self._admin.delete_records([at])[at].result(_SECONDS)

    def expire(self, *, partition: int = 0, first: int) -> None:
        """By retention: the broker drops finished segments that are too old, until ``first`` is the first offset."""
        self.configure("retention.ms", "1")
        wait_until(lambda: self.first(partition) == first)
        self.configure("retention.ms", "-1")

    def configure(self, setting: str, value: str) -> None:
        entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.name, incremental_configs=[entry])
        for answer in self._admin.incremental_alter_configs([resource]).values():
            answer.result(_SECONDS)

    def first(self, partition: int = 0) -> int:
        return self.bounds(partition)[0]

    def bounds(self, partition: int = 0) -> tuple[int, int]:
        client = Consumer({"bootstrap.servers": self.servers, "group.id": "tests", "log_level": 2})
        try:
            found: tuple[int, int] = client.get_watermark_offsets(TopicPartition(self.name, partition), timeout=10.0)
            return found
        finally:
            client.close()

    def remove(self) -> None:
        self._admin.delete_topics([self.name], operation_timeout=30.0)[self.name].result(_SECONDS)
        wait_until(lambda: self.name not in self._admin.list_topics(timeout=10.0).topics)

    def create(self, *, partitions: int = 1, copies: int = 1, **config: str) -> None:
        made = NewTopic(
            self.name,
            num_partitions=partitions,
            replication_factor=copies,
            config={name.replace("_", "."): value for name, value in config.items()},
        )
        self._admin.create_topics([made], operation_timeout=30.0)[self.name].result(_SECONDS)
        wait_until(lambda: self._partitions() == partitions)

    def create_again(self, *, partitions: int = 1) -> None:
        self.remove()
        self.create(partitions=partitions)

    def add_partitions(self, total: int) -> None:
        self._admin.create_partitions([NewPartitions(self.name, total)])[self.name].result(_SECONDS)
        wait_until(lambda: self._partitions() == total)

    def _partitions(self) -> int:
        found = self._admin.list_topics(self.name, timeout=10.0).topics.get(self.name)
        return 0 if found is None or found.error is not None else len(found.partitions)


def wait_until(condition: Callable[[], bool], seconds: float = _SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
