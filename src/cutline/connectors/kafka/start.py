"""Where reading a topic begins, by the option ``start``: an end of the topic, a time, or offsets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cutline.connectors.kafka.client import Bounds

#: For messages to people.
STARTS = 'a time (2026-01-31T12:00:00Z) or offsets ({"0": 120, "1": 80})'


def is_start(text: str) -> bool:
    """Whether the text is a time or offsets."""
    return time_ms(text) is not None or offsets_of(text) is not None


def time_ms(text: str) -> int | None:
    """A moment with its time zone: without one, driver and brokers would not agree on it."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else int(moment.timestamp() * 1_000)


def offsets_of(text: str) -> dict[str, int] | None:
    try:
        found = msgspec.json.decode(text, type=dict[str, int])
    except msgspec.MsgspecError:
        return None
    return found if found and all(name.isdigit() and at >= 0 for name, at in found.items()) else None


def begin_offsets(client: Any, servers: str, topic: str, start: str, there: Mapping[str, Bounds]) -> dict[str, int]:
    """The first offset to read in every partition. Raises ValueError if an offset is not there."""
    offsets, moment_ms = offsets_of(start), time_ms(start)
    if offsets is not None:
        return _given(offsets, topic, there)
    if moment_ms is not None:
        return _since(client, servers, topic, moment_ms, there)
    return {name: one.first if start == "earliest" else one.end for name, one in there.items()}


def _given(offsets: Mapping[str, int], topic: str, there: Mapping[str, Bounds]) -> dict[str, int]:
    for name, at in offsets.items():
        if name not in there:
            raise ValueError(f"start names partition {name}, but topic {topic} has {len(there)} partitions")
        if not there[name].first <= at <= there[name].end:
            raise ValueError(
                f"start names offset {at} of partition {name}, but topic {topic} has {there[name].first} "
                f"to {there[name].end}"
            )
    return {name: offsets.get(name, one.first) for name, one in there.items()}


def _since(client: Any, servers: str, topic: str, moment_ms: int, there: Mapping[str, Bounds]) -> dict[str, int]:
    """The first message that is not older; the end, if there is none yet."""
    from cutline.connectors.kafka.client import TIMEOUT_S, import_kafka, unreachable

    kafka = import_kafka()
    asked = [kafka.TopicPartition(topic, int(name), moment_ms) for name in there]
    try:
        found = {str(one.partition): one for one in client.offsets_for_times(asked, timeout=TIMEOUT_S)}
    except kafka.KafkaException as error:
        raise unreachable(servers, error) from error
    for one in found.values():
        if one.error is not None:
            raise unreachable(servers, kafka.KafkaException(one.error))
    return {
        name: found[name].offset if bounds.first <= found[name].offset <= bounds.end else bounds.end
        for name, bounds in there.items()
    }
