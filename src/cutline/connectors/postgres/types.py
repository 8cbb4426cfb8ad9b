"""PostgreSQL's types for Arrow's, and rows in COPY's text format."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.connectors.rows import MOST_DECIMAL_DIGITS, storable_schema
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_NAME_BYTES = 63
#: Prefix of the columns that the sink adds.
_OWN_PREFIX = "cutline_"

#: Which column types take values of another without loss.
_WIDER: Mapping[str, frozenset[str]] = {
    "smallint": frozenset({"integer", "bigint", "numeric"}),
    "integer": frozenset({"bigint", "numeric"}),
    "bigint": frozenset({"numeric"}),
    "real": frozenset({"double precision"}),
    "text": frozenset({"character varying"}),
    "jsonb": frozenset({"json"}),
}


def table_columns(schema: pa.Schema) -> dict[str, str]:
    """Column name → PostgreSQL type for such rows; raises SinkError for a type that PostgreSQL lacks."""
    for name in schema.names:
        if not is_usable_name(name) or name.startswith(_OWN_PREFIX):
            raise SinkError(
                f"a column's name has 1 to {_LONGEST_NAME_BYTES} bytes, no %, and does not begin with {_OWN_PREFIX}",
                next_step="rename the column in the flow",
                column=name,
            )
    return {field.name: _column_type(field.type) for field in storable_schema(schema)}


def is_usable_name(name: str) -> bool:
    """PostgreSQL truncates long names silently; a % in a statement marks a parameter."""
    return 0 < len(name.encode()) <= _LONGEST_NAME_BYTES and not {"%", "\x00"} & set(name)


def _column_type(kind: pa.DataType) -> str:
    import pyarrow as pa

    is_ = pa.types
    if is_.is_nested(kind):
        return "jsonb"
    if is_.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if is_.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    names = {
        pa.int8(): "smallint",
        pa.int16(): "smallint",
        pa.int32(): "integer",
        pa.int64(): "bigint",
        pa.float32(): "real",
        pa.float64(): "double precision",
        pa.bool_(): "boolean",
        pa.string(): "text",
        pa.binary(): "bytea",
        pa.date32(): "date",
    }
    return names[kind]


def arrow_type(column: str) -> pa.DataType:
    """The Arrow type of a column, for readers. JSON, and types that Arrow lacks, are read as text."""
    import pyarrow as pa

    if column.startswith("numeric("):
        digits, scale = _digits(column)
        return pa.decimal128(digits, scale) if digits <= MOST_DECIMAL_DIGITS else pa.string()
    return {
        "smallint": pa.int16(),
        "integer": pa.int32(),
        "bigint": pa.int64(),
        "real": pa.float32(),
        "double precision": pa.float64(),
        "boolean": pa.bool_(),
        "bytea": pa.binary(),
        "date": pa.date32(),
        "timestamp with time zone": pa.timestamp("us", "UTC"),
        "timestamp without time zone": pa.timestamp("us"),
    }.get(column, pa.string())


def takes(column: str, wanted: str) -> bool:
    """Whether a column of one type (as PostgreSQL writes it) takes all values of another."""
    if column == wanted or column in _WIDER.get(wanted, frozenset()):
        return True
    if wanted.startswith("numeric("):
        if column == "numeric":
            return True
        if column.startswith("numeric("):
            (digits, scale), (wanted_digits, wanted_scale) = _digits(column), _digits(wanted)
            return scale >= wanted_scale and digits - scale >= wanted_digits - wanted_scale
    return False


def _digits(numeric: str) -> tuple[int, int]:
    digits, _, scale = numeric.removeprefix("numeric(").removesuffix(")").partition(",")
    return int(digits), int(scale or 0)


# ---------------------------------------------------------------------------------------------------- COPY


def copy_text(batch: pa.RecordBatch, first_row: int, piece: int) -> bytes:
    """The rows as lines of COPY's text format; each begins with its piece and its number in the piece.

    Text and not CSV: before version 17 PostgreSQL takes a line ``\\.`` inside a quoted value for the end of the data.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    count = batch.num_rows
    if not count:
        return b""
    text = pa.large_string()
    columns = [
        pc.cast(pa.repeat(pa.scalar(piece, pa.int64()), count), text),
        pc.cast(pa.array(range(first_row, first_row + count), pa.int64()), text),
        *(pc.fill_null(_texts(column), "\\N") for column in batch.columns),
    ]
    line = pc.binary_join_element_wise(*columns, pa.scalar("\t", text))
    # Arrow stores them one after the other in one buffer, so the lines need no joining.
    lines = pc.binary_join_element_wise(line, pa.scalar("", text), pa.scalar("\n", text))
    size_bytes = pc.sum(pc.binary_length(lines)).as_py()
    return bytes(lines.buffers()[2].slice(0, size_bytes))


def _texts(column: pa.Array) -> pa.Array:
    """Each value as text with COPY's escapes; nulls stay null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_, kind, text = pa.types, column.type, pa.large_string()
    if is_.is_dictionary(kind):
        return _texts(column.dictionary_decode())
    if is_.is_nested(kind):
        encoder = msgspec.json.Encoder(decimal_format="number")
        values = [
            None if value is None else encoder.encode(plain(value, kind)).decode() for value in column.to_pylist()
        ]
        return _escaped(pa.array(values, text))
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind) or is_.is_binary_view(kind):
        # Two backslashes: the first is COPY's escape for the second.
        return pa.array([None if value is None else f"\\\\x{value.hex()}" for value in column.to_pylist()], text)
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return _escaped(pc.cast(column, text))
    if is_.is_timestamp(kind):
        column = pc.cast(column, pa.timestamp("us", "UTC" if kind.tz else None), safe=False)
    return pc.cast(column, text)


def _escaped(texts: pa.Array) -> pa.Array:
    import pyarrow.compute as pc

    for character, escape in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        texts = pc.replace_substring(texts, character, escape)
    return texts


def plain(value: Any, kind: pa.DataType) -> Any:
    """A nested value for JSON: structs and maps as objects, binary as base64."""
    import pyarrow as pa

    is_ = pa.types
    if value is None:
        return None
    if is_.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if is_.is_map(kind):
        return {_key(key, kind.key_type): plain(item, kind.item_type) for key, item in value}
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def _key(key: Any, kind: pa.DataType) -> str:
    """The keys of an object are strings, whatever those of the map are."""
    if isinstance(key, str):
        return key
    text = msgspec.json.encode(plain(key, kind)).decode()
    return text[1:-1] if text.startswith('"') else text
