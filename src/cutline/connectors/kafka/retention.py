"""How far behind a reader of topics is, and until when the brokers keep what a position needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cutline.base.clock import now_ms
from cutline.connectors.kafka.client import (
    TIMEOUT_S,
    Bounds,
    administrator,
    bounds_of,
    consumer,
    import_kafka,
)
from cutline.ports.inspection import Expiry, PartitionProgress, SourceProgress
from cutline.protocol.recovery.restorable import kept_until

#: By topic, by partition: an offset.
Offsets = Mapping[str, Mapping[str, int]]
Place = tuple[str, str]
#: Messages that are read at a position, to learn how large they are.
_SAMPLE = 200


class Retention(NamedTuple):
    """What ends the life of a topic's messages; None: it does not."""

    age_ms: int | None = None
    #: Per partition.
    most_bytes: int | None = None


class _Head(NamedTuple):
    """The first message at a position."""

    written_ms: int
    #: Of it and those that follow it, on average.
    size_bytes: float


def progress_of(servers: str, newest: Offsets, stored: Sequence[Offsets]) -> SourceProgress:
    """Raises NotDone if no broker answers."""
    at_ms = now_ms()
    with consumer(servers, isolation="read_uncommitted") as client:
        places = sorted({(topic, name) for one in (newest, *stored) for topic in one for name in one[topic]})
        there = {place: bounds_of(client, servers, place[0], int(place[1])) for place in places}
        limits = retention_of(servers, sorted({topic for topic, _ in places}))
        expiries = [_expiry(client, one, there, limits, at_ms) for one in stored]
    partitions = [
        PartitionProgress(f"{topic}/{name}", offset, max(there[topic, name].end, offset))
        for topic, offsets in newest.items()
        for name, offset in sorted(offsets.items(), key=lambda item: int(item[0]))
    ]
    names = sorted(newest)
    return SourceProgress(f"{'topic' if len(names) == 1 else 'topics'} {', '.join(names)}", partitions, expiries)


def retention_of(servers: str, topics: Sequence[str]) -> dict[str, Retention]:
    """Topics whose settings the broker does not tell are left out."""
    from confluent_kafka.admin._config import ConfigResource
    from confluent_kafka.admin._resource import ResourceType

    kafka, admin = import_kafka(), administrator(servers)
    asked = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    found = {}
    for resource, answer in admin.describe_configs(asked, request_timeout=TIMEOUT_S).items() if asked else ():
        try:
            settings = {name: one.value for name, one in answer.result().items()}
        except kafka.KafkaException:
            continue  # the user may read the topic, and not its settings
        is_dropped = "delete" in settings.get("cleanup.policy", "delete")
        found[resource.name] = Retention(
            _limit(settings.get("retention.ms")) if is_dropped else None,
            _limit(settings.get("retention.bytes")) if is_dropped else None,
        )
    return found


def _limit(text: str | None) -> int | None:
    return None if text is None or int(text) < 0 else int(text)


def _expiry(
    client: Any, stored: Offsets, there: Mapping[Place, Bounds], limits: Mapping[str, Retention], at_ms: int
) -> Expiry:
    """Of the partition whose message is dropped first."""
    if not stored or any(topic not in limits for topic in stored):
        return Expiry(None)
    wanted = {
        (topic, name): offset
        for topic, offsets in stored.items()
        for name, offset in offsets.items()
        if limits[topic] != Retention() and there[topic, name].first <= offset < there[topic, name].end
    }
    first = Expiry(None)
    for place, head in _heads(client, wanted).items():
        limit = limits[place[0]]
        ahead = int((there[place].end - wanted[place]) * head.size_bytes)
        ends = {
            "retention.ms": kept_until(head.written_ms, at_ms, age_ms=limit.age_ms),
            "retention.bytes": kept_until(head.written_ms, at_ms, most_bytes=limit.most_bytes, ahead_bytes=ahead),
        }
        for setting, until_ms in ends.items():
            if until_ms is not None and (first.at_ms is None or until_ms < first.at_ms):
                first = Expiry(until_ms, f"{setting} of topic {place[0]}")
    return first


def _heads(client: Any, wanted: Mapping[Place, int]) -> dict[Place, _Head]:
    """The first message at each position, as far as they arrive in time."""
    kafka = import_kafka()
    if not wanted:
        return {}
    client.assign([kafka.TopicPartition(topic, int(name), offset) for (topic, name), offset in wanted.items()])
    times: dict[Place, int] = {}
    sizes: dict[Place, list[int]] = {}
    ended: set[Place] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while times.keys() | ended != wanted.keys() and time.monotonic() < deadline:
        one = client.poll(0.2)
        for message in [] if one is None else [one, *client.consume(_SAMPLE, timeout=0)]:
            place = (message.topic(), str(message.partition()))
            problem = message.error()
            if problem is not None:
                if problem.code() == kafka.KafkaError._PARTITION_EOF or not problem.retriable():
                    ended.add(place)
                continue
            times.setdefault(place, message.timestamp()[1])
            sizes.setdefault(place, []).append(len(message.value() or b"") + len(message.key() or b""))
    client.unassign()
    return {place: _Head(at, sum(sizes[place]) / len(sizes[place])) for place, at in times.items() if at >= 0}
