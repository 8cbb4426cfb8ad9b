"""Rows as Kafka messages. Executors make the messages, so that what no broker would accept fails its batch, before the
epoch is complete, and the driver only has to send them.

Imported by every Spark worker that writes, so pyarrow is imported only when rows arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cutline.connectors.parquet_writer import ParquetStager, ParquetWriter, check_calendar, conform
from cutline.connectors.staging_folder import check_value_column
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.model.staging import Piece
    from cutline.ports.sinks import StageAttempt

KEY, VALUE, PARTITION, TIMESTAMP, HEADERS = (
    f"cutline_{name}" for name in ("key", "value", "partition", "timestamp_ms", "headers")
)
#: Lengths and names that a header adds to its message, at most.
_HEADER_BYTES = 10
#: What ``columns`` may name.
ROLES = ("headers", "partition", "timestamp")


class Columns(NamedTuple):
    """Which columns of the rows make up a message. None: none does."""

    #: None: the whole row as JSON, without the columns of headers and partitions.
    value: str | None = None
    key: str | None = None
    headers: str | None = None
    partition: str | None = None
    timestamp: str | None = None

    def in_json(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in (self.headers, self.partition)]


class Outgoing(NamedTuple):
    """One message."""

    key: bytes | None
    value: bytes | None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: list[tuple[str, bytes | None]] | None = None


def message_schema() -> pa.Schema:
    """How messages are staged."""
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            (KEY, pa.binary()),
            (VALUE, pa.binary()),
            (PARTITION, pa.int32()),
            (TIMESTAMP, pa.int64()),
            (HEADERS, pa.list_(pa.field("element", header))),
        ]
    )


# ------------------------------------------------------------------------------------------------- checks at the start


def check_columns(schema: pa.Schema, columns: Columns) -> None:
    """Refuse columns that do not exist, or whose values cannot be what they are named for."""
    import pyarrow as pa

    check_value_column(schema, columns.key, role="key")
    for role in ROLES:
        name = getattr(columns, role)
        if name is not None and name not in schema.names:
            raise SinkError(
                f"the rows have no such column to take the {role} from",
                next_step=f"use one of: {', '.join(schema.names)}",
                column=name,
            )
    for role, name, fits, wanted in (
        ("partition", columns.partition, pa.types.is_integer, "a whole number"),
        ("timestamp", columns.timestamp, _is_time, "a timestamp, or a long that counts milliseconds since 1970"),
        ("headers", columns.headers, _is_headers, "a map<string, string or binary>, or an array of structs of these"),
    ):
        if name is not None and not fits(schema.field(name).type):
            raise SinkError(
                f"the {role} must be {wanted}; the column has type {schema.field(name).type}",
                next_step="cast it in the flow",
                column=name,
            )
    if columns.value is None and not columns.in_json(schema.names):
        raise SinkError("no column is left for the message itself", next_step="add one, or name one as value")


def _is_time(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind) or pa.types.is_int64(kind))


def _is_headers(kind: pa.DataType) -> bool:
    import pyarrow as pa

    def is_bytes(one: pa.DataType) -> bool:
        return bool(pa.types.is_string(one) or pa.types.is_binary(one))

    if pa.types.is_map(kind):
        return bool(pa.types.is_string(kind.key_type)) and is_bytes(kind.item_type)
    if not (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type) and kind.value_type.num_fields == 2):
        return False
    key, value = kind.value_type.field(0).type, kind.value_type.field(1).type
    return bool(pa.types.is_string(key)) and is_bytes(value)


# ------------------------------------------------------------------------------------------------- rows to messages


def messages_of(rows: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """The rows as messages, in the schema in which they are staged."""
    import pyarrow as pa

    schema = message_schema()
    if columns.value is None:
        value = pa.array(_json_lines(rows.select(columns.in_json(rows.schema.names))), pa.binary())
    else:
        value = rows.column(columns.value).cast(pa.binary())
    arrays = [
        _nulls(rows, pa.binary()) if columns.key is None else rows.column(columns.key).cast(pa.binary()),
        value,
        _nulls(rows, pa.int32()) if columns.partition is None else _partitions(rows.column(columns.partition)),
        _nulls(rows, pa.int64()) if columns.timestamp is None else _milliseconds(rows.column(columns.timestamp)),
        _nulls(rows, schema.field(HEADERS).type) if columns.headers is None else _headers(rows.column(columns.headers)),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _json_lines(rows: pa.RecordBatch) -> list[bytes]:
    if not rows.num_rows:
        return []
    # JSON has no bare line break, so all rows are encoded in one call.
    lines = msgspec.json.Encoder().encode_lines(rows.to_pylist(maps_as_pydicts="strict"))
    return lines.removesuffix(b"\n").split(b"\n")


def _nulls(rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(rows.num_rows, kind)


def _partitions(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    try:
        return column.cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise SinkError(
            "a row names a partition that no topic has", next_step="correct the column in the flow"
        ) from error


def _milliseconds(column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_int64(column.type):
        return column
    return pc.floor_temporal(column, unit="millisecond").cast(pa.timestamp("ms", column.type.tz)).cast(pa.int64())


def _headers(column: pa.Array) -> pa.Array:
    """Maps and arrays of structs alike; a header without a name is refused by brokers."""
    import pyarrow as pa

    if pa.types.is_map(column.type):
        names, values = column.keys, column.items
    else:
        names, values = (column.values.field(index) for index in (0, 1))
    # The children of a slice are those of the whole array; offsets point into them.
    kind = message_schema().field(HEADERS).type
    pairs = pa.StructArray.from_arrays([names.cast(pa.string()), values.cast(pa.binary())], ["key", "value"])
    offsets = column.offsets
    if column.null_count:
        import pyarrow.compute as pc

        starts = pc.if_else(column.is_valid(), offsets[:-1], None)
        offsets = pa.concat_arrays([starts.cast(pa.int32()), offsets[-1:].cast(pa.int32())])
    return pa.ListArray.from_arrays(offsets, pairs).cast(kind)


def sizes_of(messages: pa.RecordBatch) -> pa.Array:
    """The bytes of each message."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    total = np.zeros(messages.num_rows, dtype=np.int64)
    for name in (KEY, VALUE):
        total += pc.fill_null(pc.binary_length(messages.column(name)), 0).to_numpy(zero_copy_only=False)
    headers = messages.column(HEADERS)
    if headers.null_count < len(headers):
        for row, pairs in enumerate(headers.to_pylist()):
            total[row] += sum(
                len((one["key"] or "").encode()) + len(one["value"] or b"") + _HEADER_BYTES for one in pairs or ()
            )
    return pa.array(total)


def outgoing(messages: pa.RecordBatch) -> Iterator[Outgoing]:
    """Messages with everything that they carry."""
    for key, value, partition, timestamp_ms, headers in zip(
        *(messages.column(name).to_pylist() for name in (KEY, VALUE, PARTITION, TIMESTAMP, HEADERS)), strict=True
    ):
        pairs = None if headers is None else [(one["key"], one["value"]) for one in headers]
        yield Outgoing(key, value, partition, timestamp_ms, pairs)


def is_plain(messages: pa.RecordBatch) -> bool:
    """Whether the messages have keys and values only."""
    return all(messages.column(name).null_count == messages.num_rows for name in (PARTITION, TIMESTAMP, HEADERS))


# ------------------------------------------------------------------------------------------------- staging


class Limits(NamedTuple):
    """What the target topic accepts."""

    topic: str
    message_bytes: int
    partitions: int
    needs_key: bool

    def check(self, messages: pa.RecordBatch) -> None:
        """Refuse what the broker would refuse."""
        import pyarrow.compute as pc

        largest = pc.max(sizes_of(messages)).as_py() or 0
        if largest > self.message_bytes:
            raise too_large(self.topic, largest, self.message_bytes)
        if self.needs_key and messages.column(KEY).null_count:
            raise SinkError(
                "a row has no key, and the topic is compacted: its broker accepts no message without a key",
                next_step="filter such rows out in the flow, or give them a key (coalesce)",
                topic=self.topic,
            )
        named = messages.column(PARTITION)
        bounds = pc.min_max(named).as_py()
        if bounds["min"] is not None and not 0 <= bounds["min"] <= bounds["max"] < self.partitions:
            raise SinkError(
                f"a row names a partition that the topic does not have: it has {self.partitions}, from 0 on",
                next_step="correct the column in the flow; after adding partitions to the topic, restart the flow",
                topic=self.topic,
            )
        if pc.any(pc.less(messages.column(TIMESTAMP), 0)).as_py():
            raise SinkError(
                "a row's timestamp lies before 1970, and messages cannot have such a one",
                next_step="correct the column in the flow",
                topic=self.topic,
            )
        _check_headers(messages.column(HEADERS), self.topic)


def _check_headers(headers: pa.Array, topic: str) -> None:
    if headers.null_count < len(headers) and headers.flatten().field("key").null_count:
        raise SinkError("a header has no name", next_step="correct the column of headers in the flow", topic=topic)


def too_large(topic: str, size_bytes: int, limit_bytes: int) -> SinkError:
    return SinkError(
        f"a message of {size_bytes} bytes is larger than the topic accepts, which is {limit_bytes}",
        next_step=f"raise max.message.bytes of topic {topic} (and replica.fetch.max.bytes) and restart the flow, "
        "or make the row smaller",
        topic=topic,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStager:
    """Opens a writer per task. Picklable; holds only what the writer needs."""

    files: ParquetStager
    #: Serialized Arrow schema of the rows.
    schema_ipc: bytes
    columns: Columns
    limits: Limits

    def open(self, attempt: StageAttempt) -> MessageWriter:
        return MessageWriter(self, self.files.open(attempt))


class MessageWriter:
    """Makes messages of one task's rows, and stages them."""

    def __init__(self, stager: MessageStager, files: ParquetWriter) -> None:
        import pyarrow as pa

        from cutline.connectors.rows import has_times

        self._stager = stager
        self._files = files
        self._schema: Any = pa.ipc.read_schema(pa.BufferReader(stager.schema_ipc))
        self._times = [field.name for field in self._schema if has_times(field.type)]

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        root = self._stager.files.root
        rows = conform(batch, self._schema, root)
        for name in self._times:
            check_calendar(rows, name, root)
        messages = messages_of(rows, self._stager.columns)
        self._stager.limits.check(messages)
        self._files.write(messages)

    def close(self) -> list[Piece]:
        return self._files.close()
