"""A Kafka topic as a source, without Spark's Kafka jar: the same offsets give the same rows, at every attempt.

``spark.readStream.format("cutline_kafka")`` with the options ``servers``, ``topic``, ``start``, ``max_per_batch``,
``tasks`` and ``headers``. See docs/sources.md. The driver asks how far the partitions go, as far as transactions are
finished; executors read ranges of partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cutline.connectors.kafka.start import STARTS, begin_offsets, is_start
from cutline.connectors.source_options import (
    flag,
    furthest_of,
    most_per_batch,
    needed,
    ranges_of,
    refuse_lost,
    start_of,
    whole_number,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from cutline.connectors.kafka.client import Bounds

FORMAT = "cutline_kafka"
SCHEMA = (
    "partition int, offset long, key binary, value binary, published_at timestamp, "
    "headers array<struct<key:string,value:binary>>"
)
#: Ranges that are shorter share a task: a task costs more than reading so many messages.
_SHORT = 10_000


class OffsetRanges(InputPartition):
    """What one task reads: (partition, first, end), in this order."""

    def __init__(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.ranges = ranges


class KafkaSource(DataSource):
    """Messages of one topic."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA if flag(self.options, "headers", default=True) else SCHEMA.rpartition(", headers")[0]

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return KafkaReader(self.options)


class KafkaReader(DataSourceStreamReader):
    """Reads offsets in [start, end) of every partition."""

    def __init__(self, options: Any) -> None:
        self._servers = needed(options, "servers", source=FORMAT)
        self._topic = needed(options, "topic", source=FORMAT)
        self._start = start_of(options, place=STARTS, is_place=is_start)
        self._tasks = whole_number(options, "tasks", 0)
        self._with_headers = flag(options, "headers", default=True)
        self._most = most_per_batch(options)
        self._client: Any = None
        self._administrator: Any = None
        #: The newest batch.
        self._planned: tuple[Any, Any] | None = None
        self._close = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for executors without its connection."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_close"}
        return kept | {"_client": None, "_administrator": None, "_planned": None}

    # ------------------------------------------------------------------ driver

    def initialOffset(self) -> dict[str, Any]:
        from cutline.connectors.kafka.client import topic_id
        from cutline.connectors.kafka.positions import KafkaPosition

        there = self._look()
        begin = begin_offsets(self._client, self._servers, self._topic, self._start, there)
        identity = topic_id(self._servers, self._topic)
        return KafkaPosition(
            servers=self._servers, topic=self._topic, topic_id=identity, begin=begin, offsets=begin
        ).as_json()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        at = self._position(start)
        there = self._look()
        self._refuse_lost(there, "", at, at)
        # A partition that was added later is read from its beginning.
        begin = {**{name: one.first for name, one in there.items()}, **at.begin}
        offsets = {name: at.offsets.get(name, begin[name]) for name in there}
        left = self._most
        for number, name in enumerate(sorted(there, key=int)):
            share = max(left // (len(there) - number), 1)
            taken = min(there[name].end - offsets[name], share)
            offsets[name] += taken
            left -= taken
        if offsets == at.offsets:
            return start
        # Checked only now: as long as there is nothing to read, the topic's identity does not matter.
        self._refuse_lost(there, self._identity(at), at, at)
        offset: dict[str, Any] = at.as_json() | {"servers": self._servers, "begin": begin, "offsets": offsets}
        self._planned = (at, self._position(offset))
        return offset

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        own = [one["offsets"] for one in positions if one.get("source") == FORMAT and one["topic"] == self._topic]
        offsets = {name: max(one.get(name, 0) for one in own) for name in {name for one in own for name in one}}
        found = furthest_of(
            positions,
            FORMAT,
            is_own=lambda position: bool(position["topic"] == self._topic),
            distance=lambda position: len(position["offsets"]),
        )
        return found | {"offsets": offsets} if found is not None and own else found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        import msgspec

        from cutline.connectors.kafka.positions import ranges

        first, last = self._position(start), self._position(end)
        found = ranges(first, last)
        if self._planned != (first, last):
            begin = msgspec.structs.replace(last, offsets={str(number): one.first for number, one in found.items()})
            there = {name: one for name, one in self._look().items() if name in begin.offsets}
            self._refuse_lost(there, self._identity(last), begin, last)
        spans = [(number, one.first, one.end) for number, one in sorted(found.items()) if one.end > one.first]
        return [OffsetRanges(one) for one in packed(spans, self._tasks)]

    def stop(self) -> None:
        self._close.close()
        self._client = self._administrator = None

    def _position(self, offset: dict[str, Any]) -> Any:
        from cutline.connectors.kafka.positions import position_of

        at = position_of(offset)
        if at.topic != self._topic:
            raise ValueError(
                f"a position in topic {at.topic} was given to the reader of topic {self._topic}: "
                "give the operator another name to read another topic"
            )
        return at

    def _look(self) -> dict[str, Bounds]:
        from cutline.connectors.kafka.client import bounds_of, consumer, partitions_of

        if self._client is None:
            self._client = self._close.enter_context(consumer(self._servers))
        numbers = partitions_of(self._client, self._servers, self._topic)
        if numbers is None:
            raise ValueError(f"there is no topic {self._topic} at {self._servers}: create it, then start again")
        return {str(one): bounds_of(self._client, self._servers, self._topic, one) for one in numbers}

    def _identity(self, at: Any) -> str:
        """The id of the topic that has this name now; empty: the broker has no ids, or had none when reading began."""
        from cutline.connectors.kafka.client import administrator, topic_id

        if not at.topic_id:
            return ""
        if self._administrator is None:
            self._administrator = administrator(self._servers)
        return topic_id(self._servers, self._topic, self._administrator)

    def _refuse_lost(self, there: dict[str, Bounds], identity: str, first: Any, last: Any) -> None:
        from cutline.connectors.kafka.positions import lost_between

        refuse_lost(lost_between(there, identity, first, last))

    # ------------------------------------------------------------------ executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from cutline.connectors.kafka.client import Bounds
        from cutline.connectors.kafka.fetching import read_columns

        if isinstance(partition, OffsetRanges):
            for number, first, end in partition.ranges:
                bounds = Bounds(first, end)
                yield from read_columns(self._servers, self._topic, number, bounds, with_headers=self._with_headers)


def packed(spans: Sequence[tuple[int, int, int]], tasks: int) -> list[list[tuple[int, int, int]]]:
    """What each task reads, of (partition, first, end). ``tasks``: about so many; 0: one per partition, if it is long.

    Long ranges are split only if there are to be more tasks than partitions; short ones share a task.
    """
    total = sum(end - first for _, first, end in spans)
    most = max(-(-total // tasks), 1) if tasks else max([_SHORT, *(end - first for _, first, end in spans)])
    found: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, first, end in spans:
        for low, high in ranges_of(first, end, -(-(end - first) // most)):
            if high - low > room:
                found.append([])
                room = most
            found[-1].append((number, low, high))
            room -= high - low
    return found
