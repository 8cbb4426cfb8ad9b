"""Reads ranges of a topic on executors, as columns. Kept apart from the rest: it is what the source's speed rests on.

Creating a consumer and finding its broker takes longer than reading a small range, so consumers are kept by the Python
worker that Spark keeps for many tasks. A consumer that stands where a range begins has fetched some of it already.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cutline.connectors.kafka.client import STANDSTILL_S, Bounds, client_config, failure_kind, import_kafka
from cutline.errors import LostInputError, NotDone

if TYPE_CHECKING:
    import pyarrow as pa

PAGE = 20_000
#: A worker keeps this many consumers; each holds what it has fetched ahead.
_MOST_KEPT = 4
_AHEAD_KB = 8_192


class _Place(NamedTuple):
    """Where a consumer stands."""

    topic: str
    partition: int
    offset: int


class _Kept(NamedTuple):
    settings: tuple[tuple[str, Any], ...]
    place: _Place
    client: Any


class Consumers:
    """The idle consumers of a process, the longest unused first. Each is used by one reader at a time."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def take(self, settings: tuple[tuple[str, Any], ...], place: _Place) -> tuple[Any, bool]:
        """A consumer, and whether it stands at this place already."""
        with self._lock:
            if self._pid != os.getpid():  # a fork has none of the threads that its parent's consumers need
                self._kept, self._pid = [], os.getpid()
            own = [one for one in self._kept if one.settings == settings]
            here = next((one for one in own if one.place == place), None)
            found = here or (own[0] if len(self._kept) >= _MOST_KEPT and own else None)
            if found is not None:
                self._kept.remove(found)
                return found.client, here is not None
        return import_kafka().Consumer(dict(settings)), False

    def give_back(self, settings: tuple[tuple[str, Any], ...], place: _Place, client: Any) -> None:
        with self._lock:
            self._kept.append(_Kept(settings, place, client))
            surplus = self._kept[:-_MOST_KEPT]
            del self._kept[:-_MOST_KEPT]
        for one in surplus:
            one.client.close()

    def close(self) -> None:
        with self._lock:
            kept, self._kept = self._kept, []
        for one in kept:
            one.client.close()


_CONSUMERS = Consumers()


def _settings(servers: str) -> tuple[tuple[str, Any], ...]:
    config = {
        # Less than librdkafka's own: what it fetches beyond a range may be for nothing.
        "queued.max.messages.kbytes": _AHEAD_KB,
        **client_config(servers),
        "group.id": "cutline",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        # The requested messages exist already: the broker need not wait for more.
        "fetch.wait.max.ms": 20,
        # A missing offset is an error: any other setting would skip rows silently.
        "auto.offset.reset": "error",
    }
    return tuple(sorted(config.items()))


def read_columns(
    servers: str, topic: str, partition: int, bounds: Bounds, *, with_headers: bool = True
) -> Iterator[pa.RecordBatch]:
    """The messages of finished transactions in [first, end), in their order."""
    if bounds.first >= bounds.end:
        return
    settings, place = _settings(servers), _Place(topic, partition, bounds.first)
    client, is_there = _CONSUMERS.take(settings, place)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(client.close)
        if not is_there:
            client.assign([import_kafka().TopicPartition(topic, partition, bounds.first)])
        at = bounds.first
        for messages, at in _pages(client, servers, place, bounds.end):  # noqa: B007
            if messages:
                yield _record_batch(partition, messages, with_headers=with_headers)
        on_failure.pop_all()
    # It has given away what follows its place, unless it stands exactly at the range's end.
    _CONSUMERS.give_back(settings, _Place(topic, partition, at if at == bounds.end else -1), client)


def _pages(client: Any, servers: str, place: _Place, end: int) -> Iterator[tuple[Sequence[Any], int]]:
    """Messages before ``end``, and the offset up to which the consumer has given them away."""
    at, deadline = place.offset, time.monotonic() + STANDSTILL_S
    while at < end:
        # Asking for a whole page would wait for it: poll one message, then take what arrived with it. Never more than
        # fits into the range: what follows stays with the consumer.
        one = client.poll(1.0)
        found = [] if one is None else [one, *client.consume(min(PAGE, end - at) - 1, timeout=0)]
        if found and any(message.error() is not None for message in found):
            at = max(at, _reached(found, servers, place, at))
            found = [message for message in found if message.error() is None]
        if found:
            offsets = [message.offset() for message in found]
            _check_range(found[0], found[-1], servers, place, at)
            at = max(at, offsets[-1] + 1)
            if offsets[-1] >= end:
                found = found[: bisect.bisect_left(offsets, end)]
        if found or one is not None:
            deadline = time.monotonic() + STANDSTILL_S
            yield found, at
        elif time.monotonic() > deadline:
            raise NotDone(
                f"topic {place.topic}, partition {place.partition} returns nothing after offset {at}", servers=servers
            )


def _check_range(first: Any, last: Any, servers: str, place: _Place, at: int) -> None:
    """A kept consumer must never return what it had fetched for another range: these would be wrong rows."""
    own = (place.topic, place.partition)
    if first.offset() < at or any((one.topic(), one.partition()) != own for one in (first, last)):
        raise NotDone(
            f"topic {place.topic}, partition {place.partition}: offset {at} was requested, and topic {first.topic()}, "
            f"partition {first.partition()}, offset {first.offset()} was returned",
            servers=servers,
        )


def _reached(found: Sequence[Any], servers: str, place: _Place, at: int) -> int:
    """How far the ends of the partition among the messages lead. Raises the error of any other."""
    kafka = import_kafka()
    known, what = kafka.KafkaError, f"topic {place.topic}, partition {place.partition}"
    reached = at
    for message in found:
        problem = message.error()
        if problem is None:
            reached = max(reached, message.offset() + 1)
        elif problem.code() == known._PARTITION_EOF:
            # Transaction markers may follow the last message, and they count as offsets.
            reached = max(reached, message.offset())
        elif problem.code() == known._AUTO_OFFSET_RESET:
            raise LostInputError(f"{what}: offset {reached} is gone", servers=servers)
        elif not (problem.retriable() or problem.code() in _passing(known)):
            kind = failure_kind(kafka.KafkaException(problem))
            raise kind(f"{what} cannot be read: {problem.str()}", servers=servers)
    return reached


def _passing(known: Any) -> tuple[int, ...]:
    """Errors that end by themselves: a broker restarts, or another becomes the leader; then reading continues."""
    return (
        known._TRANSPORT,
        known._ALL_BROKERS_DOWN,
        known._RESOLVE,
        known.NOT_LEADER_FOR_PARTITION,
        known.LEADER_NOT_AVAILABLE,
        known.FENCED_LEADER_EPOCH,
        known.UNKNOWN_LEADER_EPOCH,
    )


def _record_batch(partition: int, messages: Sequence[Any], *, with_headers: bool) -> pa.RecordBatch:
    import pyarrow as pa

    times = pa.array([message.timestamp()[1] for message in messages], pa.timestamp("ms", tz="UTC"))
    columns = {
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), len(messages)),
        "offset": pa.array([message.offset() for message in messages], pa.int64()),
        "key": pa.array([message.key() for message in messages], pa.binary()),
        "value": pa.array([message.value() for message in messages], pa.binary()),
        "published_at": times.cast(pa.timestamp("us", tz="UTC")),
    }
    if with_headers:
        columns["headers"] = _headers([message.headers() for message in messages])
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _headers(found: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> pa.Array:
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    if not any(found):
        return pa.repeat(pa.scalar([], pa.list_(header)), len(found))
    rows = [[{"key": key, "value": value} for key, value in one] if one else [] for one in found]
    return pa.array(rows, pa.list_(header))
