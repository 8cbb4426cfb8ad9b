"""Rows in SQLite's five types: other types than numbers, texts and blobs become texts that sort alike."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

Convert = Callable[[Any], Any]


def quoted(name: str) -> str:
    """A name of a table or column inside a statement."""
    return '"' + name.replace('"', '""') + '"'


def declared_type(kind: pa.DataType) -> str:
    """The type of a column. Decimals are texts: SQLite would round them as numbers."""
    import pyarrow as pa

    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) else "TEXT"


def tuples_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows as parameters of a statement, in the order of the columns."""
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        if pa.types.is_timestamp(column.type):
            columns.append(_timestamps(column))
            continue
        convert = _converter(column.type)
        values = column.to_pylist()
        columns.append(values if convert is None else [None if value is None else convert(value) for value in values])
    return zip(*columns, strict=True)


def _converter(kind: pa.DataType) -> Convert | None:
    """Converts a value to one that SQLite takes; None: no conversion is needed."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_boolean(kind):
        return int
    if is_.is_timestamp(kind):
        return _timestamp
    if is_.is_date(kind):
        return str
    if is_.is_decimal(kind):
        return lambda value: f"{value:f}"
    if is_.is_nested(kind):
        plain = _plain(kind)
        return lambda value: msgspec.json.encode(plain(value)).decode()
    return None


def _timestamps(column: pa.Array) -> list[str | None]:
    """What ``_timestamp`` returns for each, without a Python object for every value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    zone = "UTC" if column.type.tz else None
    texts = pc.cast(pc.cast(column, pa.timestamp("us", zone)), pa.string())
    values: list[str | None] = pc.replace_substring(texts, " ", "T", max_replacements=1).to_pylist()
    return values


def arrow_of(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """The inverse of ``tuples_of``: rows of the table as they were written."""
    import pyarrow as pa

    columns = []
    for field, values in zip(schema, zip(*rows, strict=True), strict=True):
        convert = _from_database(field.type)
        columns.append(pa.array(values if convert is None else map(convert, values), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _from_database(kind: pa.DataType) -> Convert | None:
    import pyarrow as pa

    if pa.types.is_nested(kind):
        back = _from_plain(kind)
        return _if_there(lambda value: back(msgspec.json.decode(value)))
    return _from_text(kind)


def _from_text(kind: pa.DataType) -> Convert | None:
    """Converts a value to one that Arrow takes for such a column; None: no conversion is needed."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_boolean(kind):
        return _if_there(bool)
    if is_.is_timestamp(kind):
        return _if_there(datetime.fromisoformat)
    if is_.is_date(kind):
        return _if_there(date.fromisoformat)
    return _if_there(Decimal) if is_.is_decimal(kind) else None


def _from_plain(kind: pa.DataType) -> Convert:
    """The inverse of ``_plain``."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_struct(kind):
        fields = {field.name: _from_plain(field.type) for field in kind}
        return _if_there(lambda value: {name: convert(value[name]) for name, convert in fields.items()})
    if is_.is_map(kind):
        key, item = _from_plain(kind.key_type), _from_plain(kind.item_type)
        pairs: Convert = dict.items if is_.is_string(kind.key_type) else list
        return _if_there(lambda value: [(key(name), item(one)) for name, one in pairs(value)])
    if is_.is_list(kind):
        element = _from_plain(kind.value_type)
        return _if_there(lambda value: [element(one) for one in value])
    if is_.is_binary(kind):
        return _if_there(b64decode)
    return _from_text(kind) or (lambda value: value)


def _timestamp(value: datetime) -> str:
    """Always of the same width, so that the texts sort like the times. SQLite's own functions read it."""
    text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
    return text if value.tzinfo is None else text + "Z"


def _plain(kind: pa.DataType) -> Convert:
    """Converts a value to one that JSON has. A map with text keys becomes an object, any other a list of pairs."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_struct(kind):
        fields = {field.name: _plain(field.type) for field in kind}
        return _if_there(lambda value: {name: convert(value[name]) for name, convert in fields.items()})
    if is_.is_map(kind):
        key, item = _plain(kind.key_type), _plain(kind.item_type)
        pairs: type[dict[Any, Any]] | type[list[Any]] = dict if is_.is_string(kind.key_type) else list
        return _if_there(lambda value: pairs((key(name), item(one)) for name, one in value))
    if is_.is_list(kind):
        element = _plain(kind.value_type)
        return _if_there(lambda value: [element(one) for one in value])
    convert = _converter(kind)
    if is_.is_boolean(kind) or convert is None:
        return lambda value: value  # msgspec encodes bytes as base64
    return _if_there(convert)


def _if_there(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)
