"""A NATS JetStream stream as a source: the same sequences give the same rows, at every attempt and after every restore.

``spark.readStream.format("cutline_nats")`` with the options ``url``, ``stream``, ``subject`` (a filter; wildcards),
``start`` (``earliest``, ``latest`` or a sequence), ``max_per_batch`` and ``partitions`` (tasks per batch). See
docs/sources.md. The driver asks how far the stream goes; executors read their ranges of sequences themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cutline.connectors.source_options import (
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

    from cutline.connectors.nats.client import Connection, StreamState
    from cutline.connectors.nats.positions import NatsPosition

FORMAT = "cutline_nats"
SCHEMA = "sequence long, subject string, data binary, published_at timestamp, headers map<string,string>"


class SequenceRange(InputPartition):
    """What one task reads."""

    def __init__(self, first: int, end: int, created: str, messages: int) -> None:
        self.first = first
        self.end = end
        self.created = created
        #: How many there must be, of any subject.
        self.messages = messages


class NatsSource(DataSource):
    """Messages of one stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return NatsReader(self.options)


class NatsReader(DataSourceStreamReader):
    """Reads sequences in [start, end) of one stream."""

    def __init__(self, options: Any) -> None:
        from cutline.connectors.nats.client import check_url

        self._url = check_url(needed(options, "url", source=FORMAT))
        self._stream = needed(options, "stream", source=FORMAT)
        self._subject = options.get("subject", "")
        self._start = start_of(options, place="a sequence", is_place=str.isdigit)
        self._most = most_per_batch(options)
        self._partitions = whole_number(options, "partitions", 1, least=1)
        self._connection: Connection | None = None
        #: The newest planned batch, and the stream's state when it was planned.
        self._planned: tuple[NatsPosition, NatsPosition, StreamState] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for executors without its connection."""
        return self.__dict__ | {"_connection": None, "_planned": None}

    # ------------------------------------------------------------------ driver

    def initialOffset(self) -> dict[str, Any]:
        from cutline.connectors.nats.positions import NatsPosition

        state = self._look()
        first = {"earliest": state.first, "latest": state.end}.get(self._start)
        if first is None:
            first = int(self._start)
            if not state.first <= first <= state.end:
                raise ValueError(
                    f"stream {self._stream} holds sequences {state.first} to {state.end - 1}: "
                    f"reading cannot begin with {first}"
                )
        return NatsPosition(
            url=self._url, stream=self._stream, created=state.created, begin=first, sequence=first
        ).as_json()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        from cutline.connectors.nats.positions import position_of

        at = self._position(start)
        state = self._look()
        self._refuse_lost(state, at, at)
        end = min(state.end, at.sequence + self._most)
        if end <= at.sequence:
            return start
        if state.holes:
            state = self._look(with_deleted=True)
        read = state.messages_between(at.sequence, end)
        offset = at.as_json() | {"url": self._url, "sequence": end, "messages": at.messages + read}
        self._planned = (at, position_of(offset), state)
        return offset

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return furthest_of(
            positions,
            FORMAT,
            is_own=lambda position: bool(position["stream"] == self._stream),
            distance=lambda position: int(position["sequence"]),
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from cutline.connectors.nats.positions import where_batch_begins

        last = self._position(end)
        first = where_batch_begins(self._position(start), last)
        if self._planned is not None and self._planned[:2] == (first, last):
            state = self._planned[2]
        else:
            state = self._look(with_deleted=True)
            self._refuse_lost(state, first, last)
        return [
            SequenceRange(a, b, first.created, state.messages_between(a, b))
            for a, b in ranges_of(first.sequence, last.sequence, self._partitions)
        ]

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _position(self, offset: dict[str, Any]) -> NatsPosition:
        from cutline.connectors.nats.positions import position_of

        at = position_of(offset)
        if at.stream != self._stream:
            raise ValueError(
                f"a position in stream {at.stream} was given to the reader of stream {self._stream}: "
                "give the operator another name to read another stream"
            )
        return at

    def _look(self, *, with_deleted: bool = False) -> StreamState:
        from cutline.connectors.nats.client import Connection, stream_state

        if self._connection is None:
            self._connection = Connection(self._url)
        state = stream_state(self._connection, self._stream, with_deleted=with_deleted)
        if state is None:
            raise ValueError(f"there is no stream {self._stream} at {self._url}: create it, then start again")
        _check_replayable(state)
        return state

    def _refuse_lost(self, state: StreamState, first: NatsPosition, last: NatsPosition) -> None:
        from cutline.connectors.nats.positions import lost_between

        refuse_lost(lost_between(state, first, last))

    # ------------------------------------------------------------------ executors

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from cutline.connectors.nats.client import Connection, read_range, stream_state

        if not isinstance(partition, SequenceRange):
            return
        count = 0
        with Connection(self._url) as connection:
            subjects = (self._subject,) if self._subject else ()
            for page in read_range(connection, self._stream, partition.first, partition.end, subjects):
                count += len(page)
                yield _record_batch(page)
            # Only now: messages dropped or deleted meanwhile are missing from what was read.
            state = stream_state(connection, self._stream, with_deleted=bool(self._subject))
        what = f"stream {self._stream}: sequences {partition.first} to {partition.end - 1}"
        if state is None or state.created != partition.created:
            raise ValueError(f"{what} cannot be read: the stream was deleted or created again meanwhile")
        if self._subject:
            # Messages of other subjects were not read: the stream's state says how many there are.
            count = state.messages_between(partition.first, partition.end)
        if state.first > partition.first or count != partition.messages:
            raise ValueError(
                f"{what} cannot be read: {count} messages were found, {partition.messages} expected, "
                f"and the stream begins with {state.first} now"
            )


def _check_replayable(state: StreamState) -> None:
    """Refuse streams that remove messages while they are read: a second reading would differ from the first."""
    if state.config["retention"] != "limits":
        raise ValueError(
            f"stream {state.name} drops messages when they are acknowledged (retention {state.config['retention']}): "
            "a source needs retention limits; mirror or source the stream into one"
        )
    if state.config["max_msgs_per_subject"] > 0:
        raise ValueError(
            f"stream {state.name} keeps only {state.config['max_msgs_per_subject']} messages per subject: "
            "a source needs a stream that drops the oldest first; source the stream into one"
        )


def _record_batch(page: list[Any]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [
            pa.array([one.sequence for one in page], pa.int64()),
            pa.array([one.subject for one in page], pa.string()),
            pa.array([one.data for one in page], pa.binary()),
            pa.array([one.published_ns // 1_000 for one in page], pa.timestamp("us", tz="UTC")),
            pa.array([list(one.headers.items()) for one in page], pa.map_(pa.string(), pa.string())),
        ],
        names=["sequence", "subject", "data", "published_at", "headers"],
    )
