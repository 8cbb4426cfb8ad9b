"""Schemas of Iceberg tables: which table the sink creates, which it accepts, and the schema of its files.

Files carry the ids of the table's columns, not only their names. So a file that was staged before someone renamed,
added or dropped a column is read correctly after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cutline.errors import InvariantViolation

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType, NestedField

#: The version of the format that this sink writes; it has sequence numbers, and pyiceberg writes it.
FORMAT_VERSION = 2
#: The key of a column's id in the metadata of an Arrow field; it becomes that of the Parquet column.
FIELD_ID = b"PARQUET:field_id"
#: The transform whose value is the column's own.
IDENTITY = "identity"


def table_schema(files: pa.Schema) -> Schema:
    """The schema of a new table for such files. The catalog gives the columns their ids."""
    from pyiceberg.schema import Schema

    ids = itertools.count(1)
    return Schema(*_fields(files, ids))


def partition_spec(schema: Schema, partition_by: Sequence[str]) -> PartitionSpec:
    """Partitions by the values of these columns."""
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.transforms import IdentityTransform

    return PartitionSpec(
        *(
            PartitionField(
                source_id=schema.find_field(name).field_id,
                field_id=PARTITION_FIELD_ID_START + number,
                transform=IdentityTransform(),
                name=name,
            )
            for number, name in enumerate(partition_by)
        )
    )


def file_schema(table: Schema, names: Sequence[str]) -> pa.Schema:
    """The Arrow schema of files with these columns of the table, in this order, with the columns' ids."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    whole = schema_to_pyarrow(table, include_field_ids=True)
    return pa.schema([whole.field(name) for name in names])


def partition_columns(table: Table, spec_id: int) -> tuple[str, ...] | None:
    """The columns whose values are the partitions; None if a partition is anything but a column's value."""
    spec = table.metadata.specs()[spec_id]
    columns = {field.field_id: field.name for field in table.schema().fields}
    names: list[str] = []
    for field in spec.fields:
        name = columns.get(field.source_id)
        if str(field.transform) != IDENTITY or name is None:
            return None
        names.append(name)
    return tuple(names)


def _fields(columns: Iterator[pa.Field] | pa.Schema, ids: Iterator[int]) -> list[NestedField]:
    from pyiceberg.types import NestedField

    return [
        NestedField(field_id=next(ids), name=field.name, field_type=iceberg_type(field.type, ids), required=False)
        for field in columns
    ]


def iceberg_type(kind: pa.DataType, ids: Iterator[int]) -> IcebergType:
    """The type of a column for values of a storable type."""
    import pyarrow as pa
    from pyiceberg import types

    is_ = pa.types
    if is_.is_struct(kind):
        return types.StructType(*_fields(iter(kind), ids))
    if is_.is_list(kind):
        return types.ListType(
            element_id=next(ids), element_type=iceberg_type(kind.value_type, ids), element_required=False
        )
    if is_.is_map(kind):
        return types.MapType(
            key_id=next(ids),
            key_type=iceberg_type(kind.key_type, ids),
            value_id=next(ids),
            value_type=iceberg_type(kind.item_type, ids),
            value_required=False,
        )
    if is_.is_decimal(kind):
        return types.DecimalType(kind.precision, kind.scale)
    if is_.is_timestamp(kind):
        return types.TimestamptzType() if kind.tz else types.TimestampType()
    plain: list[tuple[bool, IcebergType]] = [
        (is_.is_boolean(kind), types.BooleanType()),
        (is_.is_int64(kind), types.LongType()),
        (is_.is_signed_integer(kind), types.IntegerType()),
        (is_.is_float32(kind), types.FloatType()),
        (is_.is_float64(kind), types.DoubleType()),
        (is_.is_string(kind), types.StringType()),
        (is_.is_binary(kind), types.BinaryType()),
        (is_.is_date(kind), types.DateType()),
    ]
    for fits, found in plain:
        if fits:
            return found
    raise InvariantViolation(f"a column of type {kind} is not storable")


def dropped_columns(table: Table, files: pa.Schema) -> list[str]:
    """The columns of staged files that the table no longer has: readers would not see them."""
    there = {field.field_id for field in table.schema().fields}
    return [field.name for field in files if int(field.metadata[FIELD_ID]) not in there]


# ---------------------------------------------------------------------------------------------------------- fitting


def fit_problems(table: Table, rows: pa.Schema, files: pa.Schema, partition_by: tuple[str, ...]) -> list[str]:
    """Why files of this schema cannot become part of the table. The order of columns does not matter."""
    import pyarrow as pa

    # The files' schema allows nulls everywhere; only the schema of the rows says where nulls can occur.
    strict = pa.schema([field.with_nullable(rows.field(field.name).nullable) for field in files])
    problems = [] if table.format_version == FORMAT_VERSION else [_version_problem(table.format_version)]
    problems += _struct_problems("", list(strict), table.schema().fields)
    found = partition_columns(table, table.metadata.default_spec_id)
    if found is None:
        problems.append("it is partitioned by more than the values of columns (bucket, days, truncate …)")
    elif found != partition_by:
        problems.append(f"it is partitioned by {found or 'nothing'}, the sink by {partition_by or 'nothing'}")
    return problems


def _version_problem(version: int) -> str:
    if version < FORMAT_VERSION:
        return f"it is of format version {version} (set the table's property format-version to {FORMAT_VERSION})"
    return f"it is of format version {version}, and this sink writes version {FORMAT_VERSION}"


def _struct_problems(path: str, rows: Sequence[pa.Field], table: Sequence[NestedField]) -> list[str]:
    problems: list[str] = []
    targets = {column.name: column for column in table}
    for column in rows:
        name = f"{path}.{column.name}".lstrip(".")
        target = targets.pop(column.name, None)
        if target is None:
            problems.append(f"{name} ({column.type}) is not in the table")
            continue
        problems += _type_problems(name, column.type, target.field_type)
        if column.nullable and target.required:
            problems.append(f"{name} may be null in the rows but not in the table")
    # A column that a file lacks is read as null, so it must be optional.
    problems += [
        f"{path}.{column.name}".lstrip(".") + " is not in the rows and may not be null in the table"
        for column in targets.values()
        if column.required
    ]
    return problems


def _type_problems(path: str, rows: pa.DataType, table: IcebergType) -> list[str]:
    import pyarrow as pa
    from pyiceberg import types

    is_ = pa.types
    if is_.is_struct(rows) and isinstance(table, types.StructType):
        return _struct_problems(path, list(rows), table.fields)
    if is_.is_list(rows) and isinstance(table, types.ListType):
        problems = _type_problems(f"{path}.element", rows.value_type, table.element_type)
        return problems + _null_problems(f"{path}.element", table.element_required)
    if is_.is_map(rows) and isinstance(table, types.MapType):
        problems = _type_problems(f"{path}.key", rows.key_type, table.key_type)
        problems += _type_problems(f"{path}.value", rows.item_type, table.value_type)
        return problems + _null_problems(f"{path}.value", table.value_required)
    if is_.is_nested(rows) or not table.is_primitive:
        return [f"{path} is {rows} in the rows but {table} in the table"]
    found = iceberg_type(rows, itertools.count(1))
    return (
        [] if found == table or _is_wider(found, table) else [f"{path} is {found} in the rows but {table} in the table"]
    )


def _null_problems(path: str, is_required: bool) -> list[str]:
    return [f"{path} may be null in the rows but not in the table"] if is_required else []


def _is_wider(rows: IcebergType, table: IcebergType) -> bool:
    """Whether every value of the rows' type is one of the table's, as Iceberg promotes types."""
    from pyiceberg import types

    match rows, table:
        case (types.IntegerType(), types.LongType()) | (types.FloatType(), types.DoubleType()):
            return True
        case types.DecimalType(), types.DecimalType():
            return rows.scale == table.scale and rows.precision <= table.precision
        case _:
            return False
