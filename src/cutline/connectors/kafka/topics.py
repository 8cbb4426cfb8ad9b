"""Topics as the broker describes them, and whether a sink can rely on them: settings that would lose its ledger or
refuse its messages are found before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cutline.base.backoff import Backoff
from cutline.base.retry import Retry
from cutline.connectors.kafka.client import (
    TIMEOUT_S,
    administrator,
    code_of,
    import_kafka,
    partitions_of,
    topic_id,
    unreachable,
)
from cutline.errors import Refused, SinkError

#: Kafka's own default for what a broker accepts as one batch.
MESSAGE_BYTES = 1_048_588
#: What a batch needs beside the bytes of its one message.
BATCH_OVERHEAD_BYTES = 256
#: The most that librdkafka can send.
_MOST_BYTES = 1_000_000_000
#: Not every broker knows at once of a topic that was just created.
_APPEARING = Retry(deadline_s=2.0, backoff=Backoff(first_s=0.2, factor=1.0))
_COMPACT = "one partition, cleanup.policy=compact, and as many copies as the target"


class Topic(NamedTuple):
    """A topic as it is now."""

    name: str
    #: Distinguishes it from a later topic with the same name; empty: the broker has no topic ids.
    id: str
    partitions: int
    settings: Mapping[str, str]

    @property
    def is_compacted(self) -> bool:
        return "compact" in self._policies

    @property
    def expires(self) -> bool:
        """Whether messages are deleted by age or by size."""
        limits = (self.settings.get("retention.ms", "-1"), self.settings.get("retention.bytes", "-1"))
        return "delete" in self._policies and limits != ("-1", "-1")

    @property
    def batch_bytes(self) -> int:
        """The largest batch that the broker accepts."""
        return min(int(self.settings.get("max.message.bytes", MESSAGE_BYTES)), _MOST_BYTES)

    @property
    def message_bytes(self) -> int:
        """The largest message that is certain to fit into a batch."""
        return max(self.batch_bytes - BATCH_OVERHEAD_BYTES, 1)

    @property
    def _policies(self) -> list[str]:
        return [one.strip() for one in self.settings.get("cleanup.policy", "").split(",")]


def load_topic(servers: str, name: str, admin: Any = None) -> Topic | None:
    """None: there is no such topic. Raises NotDone if no broker answers, Refused if the user may not ask."""
    client = admin or administrator(servers)
    partitions = None
    for _ in _APPEARING.attempts():
        partitions = partitions_of(client, servers, name)
        if partitions is not None:
            break
    if partitions is None:
        return None
    return Topic(name, topic_id(servers, name, client), len(partitions), settings_of(servers, name, client))


def settings_of(servers: str, name: str, admin: Any) -> dict[str, str]:
    """The topic's settings, with the broker's defaults."""
    kafka = import_kafka()
    from confluent_kafka.admin._config import ConfigResource
    from confluent_kafka.admin._resource import ResourceType

    asked = ConfigResource(ResourceType.TOPIC, name)
    try:
        (answer,) = admin.describe_configs([asked], request_timeout=TIMEOUT_S).values()
        return {key: str(entry.value) for key, entry in answer.result().items()}
    except kafka.KafkaException as error:
        if code_of(error) == kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise Refused(
                f"the settings of topic {name} may not be read, so it is unknown whether messages expire there",
                next_step=f"grant DescribeConfigs on topic {name} to the user of the flow",
                servers=servers,
            ) from error
        raise unreachable(servers, error) from error


def check_ledger_topic(topic: Topic | None, name: str, *, servers: str) -> Topic:
    """Refuse a topic that would lose the ledger: an epoch whose record expired would be published again."""
    if topic is None:
        raise SinkError(f"there is no topic {name}", next_step=f"create it: {_COMPACT}", servers=servers)
    # Without any settings nothing is known about it.
    if topic.settings and (not topic.is_compacted or topic.expires):
        found = ", ".join(f"{key}={topic.settings.get(key)}" for key in ("cleanup.policy", "retention.ms"))
        raise SinkError(
            f"the ledger topic would lose the sink's ledger: {found}, so messages are deleted by age or by size",
            next_step=f"kafka-configs.sh --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=compact",
            servers=servers,
            topic=name,
        )
    return topic


def check_target(topic: Topic | None, name: str, *, servers: str, has_key: bool, has_timestamp: bool) -> Topic:
    """Refuse a topic that does not exist, or whose broker would refuse or change the messages."""
    if topic is None:
        raise SinkError(f"there is no topic {name}", next_step="create it, then restart", servers=servers)
    problems = list(_target_problems(topic, has_key=has_key, has_timestamp=has_timestamp))
    if problems:
        what, steps = zip(*problems, strict=True)
        raise SinkError(
            f"the topic cannot take the sink's messages: {'; '.join(what)}",
            next_step="; ".join(steps),
            servers=servers,
            topic=name,
        )
    return topic


def _target_problems(topic: Topic, *, has_key: bool, has_timestamp: bool) -> Iterator[tuple[str, str]]:
    if topic.is_compacted and not has_key:
        yield "it is compacted, and messages without a key are refused there", "name the column that is the key (key=)"
    if has_timestamp and topic.settings.get("message.timestamp.type") == "LogAppendTime":
        yield (
            "its broker replaces the messages' timestamps (message.timestamp.type=LogAppendTime)",
            "set CreateTime, or leave the column of timestamps out",
        )
