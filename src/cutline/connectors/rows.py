"""How files store rows: the Arrow types that Parquet, Delta and Spark read alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from cutline.connectors.parquet_writer import NULL_FOLDER, escape
from cutline.errors import DamagedRecordError, SinkError

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.ports.sinks import SinkContext

MOST_DECIMAL_DIGITS = 38
#: The longest name of a file or folder.
MOST_NAME_BYTES = 255
#: The first and the last that Python can represent, in year 1 and in year 9999, counted from 1970.
_CALENDAR_DAYS = (-719_162, 2_932_896)
_CALENDAR_MICROSECONDS = (-62_135_596_800_000_000, 253_402_300_799_999_999)


def rows_schema(context: SinkContext) -> pa.Schema:
    """The schema of the rows as Spark hands them over."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.BufferReader(context.schema_ipc))


def recorded_schema(schema_ipc: bytes, **where: object) -> pa.Schema:
    """The schema in a ledger. ``where``: how to find the ledger. Raises DamagedRecordError if it is none."""
    import pyarrow as pa

    try:
        return pa.ipc.read_schema(pa.BufferReader(schema_ipc))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise DamagedRecordError(
            f"the sink's ledger holds no schema of its rows: {str(error).splitlines()[0]}",
            next_step="restore the sink's ledger from a backup, or give the sink a new target",
            **where,
        ) from error


def storable_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of the files for such rows; raises SinkError for a type that some reader cannot read.

    Timestamps become microseconds (UTC if they carry a zone), everything is nullable, and nested fields get the
    names that Parquet requires, so that the result does not depend on how Spark is configured to produce Arrow.
    """
    import pyarrow as pa

    seen: dict[str, str] = {}
    for name in schema.names:
        if name.lower() in seen:
            raise SinkError(
                f"two columns have the same name, {seen[name.lower()]!r} and {name!r} "
                "(readers ignore upper and lower case)",
                next_step="rename one of them in the flow",
                column=name,
            )
        seen[name.lower()] = name
    return pa.schema([_storable_field(field, field.name) for field in schema])


def _storable_field(field: pa.Field, column: str) -> pa.Field:
    """``column``: its name, after those of the structs that it is in."""
    import pyarrow as pa

    if "\0" in field.name:
        raise SinkError(
            "a column's name holds the character NUL, at which some readers end the name",
            next_step="rename it in the flow",
            column=repr(column),
        )
    return pa.field(field.name, _storable(field.type, column))


def _storable(kind: pa.DataType, column: str) -> pa.DataType:
    import pyarrow as pa

    is_ = pa.types
    if is_.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if is_.is_struct(kind) and kind.num_fields:
        if len({child.name for child in kind}) != kind.num_fields:
            raise SinkError(
                "two fields of a struct have the same name", next_step="rename one of them in the flow", column=column
            )
        return pa.struct([_storable_field(child, f"{column}.{child.name}") for child in kind])
    if is_.is_map(kind):
        return pa.map_(_storable(kind.key_type, f"{column}.key"), _storable(kind.item_type, f"{column}.value"))
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", _storable(kind.value_type, f"{column}.element")))
    if is_.is_dictionary(kind):
        return _storable(kind.value_type, column)
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return pa.string()
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind) or is_.is_binary_view(kind):
        return pa.binary()
    if is_.is_decimal(kind) and kind.precision <= MOST_DECIMAL_DIGITS:
        return pa.decimal128(kind.precision, kind.scale)
    if is_.is_date(kind):
        return pa.date32()
    if is_.is_boolean(kind) or is_.is_signed_integer(kind) or is_.is_float32(kind) or is_.is_float64(kind):
        return kind
    raise SinkError(
        f"a column of type {kind} cannot be written",
        next_step="cast the column to another type (or drop it) before the sink",
        column=column,
    )


def check_partition_columns(schema: pa.Schema, partition_by: Sequence[str]) -> None:
    """Refuse partition columns that do not exist or whose values make no reliable folder name."""
    import pyarrow as pa

    for name in partition_by:
        if name not in schema.names:
            raise SinkError(
                "the rows have no such column to partition by",
                next_step=f"use some of: {', '.join(schema.names)}",
                column=name,
            )
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind):
            raise SinkError(
                f"cannot partition by a column of type {kind}",
                next_step="partition by a string, integer, boolean, decimal, date or timestamp",
                column=name,
            )
        if len(f"{escape(name)}={NULL_FOLDER}".encode()) > MOST_NAME_BYTES:
            raise SinkError(
                "the name of a partition column is too long for the name of a folder",
                next_step="rename the column in the flow, or partition by another one",
                column=f"{name[:40]}…",
            )
    if len(set(partition_by)) != len(partition_by):
        raise SinkError("a partition column is named twice", next_step="name each column once", column=partition_by)
    if len(partition_by) == len(schema.names):
        raise SinkError(
            "every column is a partition column, so the files would have no columns",
            next_step="partition by fewer columns",
        )


def key_problems(rows: pa.Schema, key: Sequence[str]) -> list[str]:
    """Why these columns cannot identify a row."""
    import pyarrow as pa

    problems = []
    for name in key:
        if name not in rows.names:
            problems.append(f"the key column {name} is not in the rows ({', '.join(rows.names)})")
            continue
        kind = rows.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind):
            problems.append(f"the key column {name} is of type {kind}, whose values do not compare reliably")
    if len(set(key)) != len(key):
        problems.append("a key column is named twice")
    return problems


def has_times(kind: pa.DataType) -> bool:
    """Whether values of a storable type are, or hold, dates or timestamps."""
    import pyarrow as pa

    if pa.types.is_nested(kind):
        return any(has_times(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_beyond_calendar(column: pa.Array) -> bool:
    """Whether a date or timestamp of a storable type is outside the years that Python can represent."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_, kind = pa.types, column.type
    if is_.is_map(kind):
        return is_beyond_calendar(column.keys) or is_beyond_calendar(column.items)
    if is_.is_struct(kind):
        return any(is_beyond_calendar(child) for child in column.flatten())
    if is_.is_list(kind):
        return is_beyond_calendar(column.flatten())
    if not has_times(kind):
        return False
    first, last = _CALENDAR_DAYS if is_.is_date(kind) else _CALENDAR_MICROSECONDS
    bounds = pc.min_max(column.cast(pa.int32() if is_.is_date(kind) else pa.int64())).as_py()
    return bounds["min"] is not None and (bounds["min"] < first or bounds["max"] > last)


def partition_text(value: Any) -> str | None:
    """A partition value as Delta's protocol and Hive's folders spell it. Null and the empty string are the same."""
    match value:
        case None | "":
            return None
        case bool():
            return "true" if value else "false"
        case datetime() if value.tzinfo is not None:
            # With the zone written out, no reader applies its own session's time zone.
            return value.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
        case datetime():
            return value.isoformat(sep=" ", timespec="microseconds")
        case Decimal():
            return f"{value:f}"
        case _:
            return str(value)


def differences(wanted: pa.Schema, found: pa.Schema) -> list[str]:
    """How the schemas differ, so that rows of one cannot join rows of the other; empty if they are the same."""
    lines = [
        f"{field.name} is {field.type} but was {found.field(field.name).type}"
        for field in wanted
        if field.name in found.names and field.type != found.field(field.name).type
    ]
    lines += [f"{name} ({wanted.field(name).type}) is new" for name in wanted.names if name not in found.names]
    lines += [f"{name} ({found.field(name).type}) is gone" for name in found.names if name not in wanted.names]
    if not lines and wanted.names != found.names:
        lines.append("the columns are in another order")
    return lines
