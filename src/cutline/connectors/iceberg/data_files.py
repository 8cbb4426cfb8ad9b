"""Staged files as Iceberg names them: with their partition, and with statistics from the Parquet footer.

A wrong bound makes a reader skip rows that match its filter, so uncertain bounds are left out: they are optional.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.connectors.iceberg.schema import FIELD_ID, IDENTITY
from cutline.connectors.rows import partition_text
from cutline.errors import InvariantViolation, SinkError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType

    from cutline.model.staging import Piece

#: Longer strings are truncated, as Iceberg's other writers do: statistics are part of every plan.
MOST_CHARACTERS = 16
#: Columns with statistics, by default in Iceberg's other writers too.
MOST_COLUMNS = 100

#: Code points that no UTF-8 text has.
_FIRST_SURROGATE, _LAST_SURROGATE = 0xD800, 0xDFFF
_DAY_ZERO = date(1970, 1, 1)
_ZERO = datetime(1970, 1, 1)  # noqa: DTZ001 (a stand-in for both zoned and zoneless microseconds)


def data_file(table: Table, root: Path, piece: Piece) -> DataFile:
    """``root``: the table's folder; ``piece`` names a file in it."""
    import pyarrow.parquet as pq
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    spec, values = _partition_of(table, piece)
    with pq.ParquetFile(root / piece["path"]) as file:
        statistics = _statistics(file.metadata, file.schema_arrow)
    found = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{table.location().rstrip('/')}/{piece['path']}",
        file_format=FileFormat.PARQUET,
        partition=Record(*values),
        record_count=piece["rows"],
        file_size_in_bytes=piece["size_bytes"],
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **statistics,
    )
    found.spec_id = spec.spec_id
    return found


def _partition_of(table: Table, piece: Piece) -> tuple[PartitionSpec, list[Any]]:
    """The partition spec that the file was written for, and its values: someone may have changed the table's since."""
    given: Mapping[str, str | None] = piece["partition"]
    columns: dict[int, dict[str, IcebergType]] = {}
    for schema in table.metadata.schemas:  # also the former ones: columns may have been renamed since
        for field in schema.fields:
            columns.setdefault(field.field_id, {})[field.name] = field.field_type
    default = table.metadata.default_spec_id
    for spec in sorted(table.metadata.partition_specs, key=lambda one: one.spec_id != default):
        found = [_value_in(given, columns.get(field.source_id, {}), str(field.transform)) for field in spec.fields]
        values = [one for one in found if one is not None]
        if len(values) == len(found) == len(given):
            return spec, [value for (value,) in values]
    raise SinkError(
        f"the table has no partitions by {', '.join(given) or 'nothing'} any more, for which files were staged",
        next_step="give the table its partitions back, or restore the flow to an older checkpoint",
        table=".".join(table.name()),
    )


def _value_in(given: Mapping[str, str | None], names: Mapping[str, IcebergType], transform: str) -> tuple[Any] | None:
    """The value of a partition's field, whose column has, or had, one of these names; None: the file has none."""
    name = next((name for name in names if name in given), None)
    return None if name is None or transform != IDENTITY else (partition_value(given[name], names[name]),)


def partition_value(text: str | None, kind: IcebergType) -> Any:
    """The value of a partition, as manifests store it, from how a piece spells it."""
    from pyiceberg import types

    if text is None:
        return None
    match kind:
        case types.BooleanType():
            return text == "true"
        case types.IntegerType() | types.LongType():
            return int(text)
        case types.DecimalType():
            return Decimal(text)
        case types.DateType():
            return (date.fromisoformat(text) - _DAY_ZERO).days
        case types.TimestampType() | types.TimestamptzType():
            moment = datetime.fromisoformat(text.removesuffix("Z"))
            return (moment - _ZERO) // timedelta(microseconds=1)
        case types.StringType():
            return text
        case _:
            raise InvariantViolation(f"a partition of type {kind} is not supported")


def partition_as_text(value: Any, kind: IcebergType) -> str | None:
    """The inverse of ``partition_value``."""
    from pyiceberg import types

    match value, kind:
        case int(), types.DateType():
            return partition_text(_DAY_ZERO + timedelta(days=value))
        case int(), types.TimestampType():
            return partition_text(_ZERO + timedelta(microseconds=value))
        case int(), types.TimestamptzType():
            return partition_text((_ZERO + timedelta(microseconds=value)).replace(tzinfo=UTC))
        case "", _:
            return ""
        case _:
            return partition_text(value)


def bounds_of(file: DataFile, columns: Mapping[str, tuple[int, IcebergType]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The least and greatest values of these columns (by name: id and type), as far as they are known."""
    from pyiceberg import types
    from pyiceberg.conversions import from_bytes

    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, (field_id, kind) in columns.items():
        if not isinstance(kind, types.PrimitiveType):
            continue
        for values, bounds in zip(found, (file.lower_bounds, file.upper_bounds), strict=True):
            if bounds and field_id in bounds:
                value: Any = from_bytes(kind, bounds[field_id])
                values[name] = _DAY_ZERO + timedelta(days=value) if isinstance(kind, types.DateType) else value
    return found


# ------------------------------------------------------------------------------------------------------- statistics


def _statistics(metadata: Any, schema: pa.Schema) -> dict[str, Any]:
    sizes: dict[int, int] = {}
    counts: dict[int, int] = {}
    nulls: dict[int, int] = {}
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    for index, (field_id, kind) in enumerate(_leaves(schema)):
        if index >= MOST_COLUMNS:
            break
        chunks = [metadata.row_group(group).column(index) for group in range(metadata.num_row_groups)]
        sizes[field_id] = sum(chunk.total_compressed_size for chunk in chunks)
        found = [chunk.statistics for chunk in chunks]
        if kind is None or any(one is None or not one.has_null_count for one in found):
            continue
        counts[field_id] = metadata.num_rows
        nulls[field_id] = sum(one.null_count for one in found)
        # A chunk of nulls only has no bounds and constrains nothing; any other without bounds spoils the column.
        bounded = [one for one in found if one.num_values]
        if not bounded or any(not one.has_min_max for one in bounded):
            continue
        low, high = _lower(kind, bounded), _upper(kind, bounded)
        if low is not None and high is not None:
            lower[field_id], upper[field_id] = low, high
    return {
        "column_sizes": sizes,
        "value_counts": counts,
        "null_value_counts": nulls,
        "nan_value_counts": {},
        "lower_bounds": lower,
        "upper_bounds": upper,
        "split_offsets": None,
    }


def _leaves(schema: pa.Schema) -> Iterator[tuple[int, pa.DataType | None]]:
    """The Parquet columns of a schema in file order, by id; the type is None inside of structs, lists and maps."""
    for field in schema:
        yield from _leaves_of(field, is_flat=True)


def _leaves_of(field: pa.Field, *, is_flat: bool) -> Iterator[tuple[int, pa.DataType | None]]:
    import pyarrow as pa

    kind = field.type
    if pa.types.is_map(kind):
        children: Sequence[pa.Field] = [kind.key_field, kind.item_field]
    elif pa.types.is_struct(kind):
        children = list(kind)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        children = [kind.value_field]
    else:
        yield int(field.metadata[FIELD_ID]), kind if is_flat else None
        return
    for child in children:
        yield from _leaves_of(child, is_flat=False)


def _lower(kind: pa.DataType, chunks: Sequence[Any]) -> bytes | None:
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text: str = min(chunk.min for chunk in chunks)
        return text[:MOST_CHARACTERS].encode()
    return _plain(kind, chunks, min, "min")


def _upper(kind: pa.DataType, chunks: Sequence[Any]) -> bytes | None:
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = above(max(chunk.max for chunk in chunks))
        return None if text is None else text.encode()
    return _plain(kind, chunks, max, "max")


def above(text: str) -> str | None:
    """The text, or a short one that sorts after it; None if there is none."""
    if len(text) <= MOST_CHARACTERS:
        return text
    for end in range(MOST_CHARACTERS, 0, -1):
        following = ord(text[end - 1]) + 1
        if following == _FIRST_SURROGATE:
            following = _LAST_SURROGATE + 1
        if following <= sys.maxunicode:
            return text[: end - 1] + chr(following)
    return None


def _plain(kind: pa.DataType, chunks: Sequence[Any], choose: Any, side: str) -> bytes | None:
    """A bound in Iceberg's binary form. Raw numbers, because Python lacks some dates and times."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_integer(kind) or is_.is_date(kind) or is_.is_timestamp(kind):
        value = choose(getattr(chunk, f"{side}_raw") for chunk in chunks)
        return struct.pack("<q" if is_.is_int64(kind) or is_.is_timestamp(kind) else "<i", value)
    if is_.is_floating(kind):
        number = choose(getattr(chunk, side) for chunk in chunks)
        return None if math.isnan(number) else struct.pack("<d" if is_.is_float64(kind) else "<f", number)
    if is_.is_decimal(kind):
        unscaled = int(choose(getattr(chunk, side) for chunk in chunks).scaleb(kind.scale))
        return unscaled.to_bytes((unscaled.bit_length() + 8) // 8, "big", signed=True)
    return None  # bounds of booleans and binaries are of little use
