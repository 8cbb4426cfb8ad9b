"""Rows as Kafka messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from cutline.connectors.kafka.messages import (
    HEADERS,
    KEY,
    PARTITION,
    TIMESTAMP,
    VALUE,
    Columns,
    Limits,
    check_columns,
    is_plain,
    message_schema,
    messages_of,
    outgoing,
    sizes_of,
)
from cutline.errors import SinkError

ROWS = pa.RecordBatch.from_pylist(
    [{"id": 1, "name": "a\nb", "raw": b"\xff"}, {"id": 2, "name": None, "raw": None}],
    schema=pa.schema([("id", pa.int64()), ("name", pa.string()), ("raw", pa.binary())]),
)
ANY = Limits("t", message_bytes=100, partitions=3, needs_key=False)


def column(messages: pa.RecordBatch, name: str) -> list[Any]:
    found: list[Any] = messages.column(name).to_pylist()
    return found


def test_the_whole_row_is_one_line_of_json() -> None:
    found = messages_of(ROWS, Columns(key="name"))
    assert column(found, VALUE) == [b'{"id":1,"name":"a\\nb","raw":"/w=="}', b'{"id":2,"name":null,"raw":null}']
    assert column(found, KEY) == [b"a\nb", None]
    assert is_plain(found) and found.schema == message_schema()
    assert messages_of(ROWS.slice(0, 0), Columns()).num_rows == 0


def test_a_column_is_the_message_byte_by_byte() -> None:
    assert column(messages_of(ROWS, Columns(value="raw")), VALUE) == [b"\xff", None]
    assert column(messages_of(ROWS, Columns(value="name")), VALUE) == [b"a\nb", None]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.map_(pa.string(), pa.string()), [("a", "1"), ("b", None)]),
        (pa.map_(pa.string(), pa.binary()), [("a", b"1"), ("b", None)]),
        (pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
         [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]),
        (pa.list_(pa.struct([("name", pa.string()), ("text", pa.string())])),
         [{"name": "a", "text": "1"}, {"name": "b", "text": None}]),
    ],
)  # fmt: skip
def test_headers_are_a_map_or_an_array_of_pairs(kind: pa.DataType, value: Any) -> None:
    schema = pa.schema([("id", pa.int64()), ("h", kind)])
    columns = Columns(headers="h")
    check_columns(schema, columns)
    rows = pa.RecordBatch.from_pylist(
        [{"id": number, "h": one} for number, one in enumerate((value, None, value, [], value))], schema=schema
    )
    pairs = [("a", b"1"), ("b", None)]
    for first, expected in ((0, [pairs, None, pairs, [], pairs]), (1, [None, pairs, [], pairs]), (4, [pairs])):
        found = messages_of(rows.slice(first), columns)
        assert [one.headers for one in outgoing(found)] == expected
        assert not is_plain(found)
    # Where a message goes, and what accompanies it, is not part of it.
    assert column(messages_of(rows, columns), VALUE)[0] == b'{"id":0}'
    assert sizes_of(messages_of(rows, columns)).to_pylist() == [8 + 23, 8, 8 + 23, 8, 8 + 23]


def test_timestamps_are_counted_in_milliseconds() -> None:
    at = datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC)
    for kind, value in ((pa.timestamp("us", "UTC"), at), (pa.timestamp("us"), at.replace(tzinfo=None))):
        rows = pa.RecordBatch.from_pylist([{"at": value}, {"at": None}], schema=pa.schema([("at", kind)]))
        assert column(messages_of(rows, Columns(timestamp="at")), TIMESTAMP) == [1_709_251_199_999, None]
    early = pa.RecordBatch.from_pylist([{"at": datetime(1969, 1, 1, tzinfo=UTC)}], pa.schema([("at", pa.timestamp("us", "UTC"))]))  # fmt: skip  # noqa: E501
    with pytest.raises(SinkError, match="before 1970"):
        ANY.check(messages_of(early, Columns(timestamp="at")))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (Columns(key="nobody"), "no such column to take the key from"),
        (Columns(key="id"), "the key must be text or bytes"),
        (Columns(headers="nobody"), "no such column to take the headers from"),
        (Columns(headers="name"), "the headers must be a map"),
        (Columns(partition="name"), "the partition must be a whole number"),
        (Columns(timestamp="name"), "the timestamp must be a timestamp"),
    ],
)
def test_columns_that_will_not_do_are_refused(columns: Columns, problem: str) -> None:
    with pytest.raises(SinkError, match=problem):
        check_columns(ROWS.schema, columns)


def test_what_a_broker_would_refuse_is_refused_first() -> None:
    ANY.check(messages_of(ROWS, Columns()))
    large = pa.RecordBatch.from_pylist([{"v": "x" * 101}])
    with pytest.raises(SinkError, match=r"101 bytes.*100.*max\.message\.bytes"):
        ANY.check(messages_of(large, Columns(value="v")))
    with pytest.raises(SinkError, match="no key"):
        ANY._replace(needs_key=True).check(messages_of(ROWS, Columns(key="name")))
    for number in (3, -1):
        rows = pa.RecordBatch.from_pylist([{"p": number, "v": "x"}])
        with pytest.raises(SinkError, match="does not have: it has 3"):
            ANY.check(messages_of(rows, Columns(value="v", partition="p")))
    with pytest.raises(SinkError, match="no topic has"):
        messages_of(pa.RecordBatch.from_pylist([{"p": 1 << 40, "v": "x"}]), Columns(value="v", partition="p"))
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    nameless = pa.RecordBatch.from_pylist([{"v": "x", "h": [{"key": None, "value": b""}]}], pa.schema([("v", pa.string()), ("h", kind)]))  # fmt: skip  # noqa: E501
    with pytest.raises(SinkError, match="header has no name"):
        ANY.check(messages_of(nameless, Columns(value="v", headers="h")))
    assert column(messages_of(nameless, Columns(value="v")), HEADERS) == [None]
    assert column(messages_of(nameless, Columns(value="v")), PARTITION) == [None]
