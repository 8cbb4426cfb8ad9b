"""Which tables take which rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from cutline.connectors.iceberg.schema import FIELD_ID, file_schema, fit_problems, table_schema
from cutline.connectors.rows import storable_schema
from cutline.testing.conformance.sinks import RICH
from tests.support.sink_targets import IcebergTarget, iceberg, iceberg_table


def problems(tmp_path: Path, table: pa.Schema, rows: pa.Schema) -> list[str]:
    iceberg(tmp_path).open(IcebergTarget().context(table))
    return fit_problems(iceberg_table(tmp_path), rows, storable_schema(rows), ())


def test_a_table_takes_the_rows_it_was_created_for(tmp_path: Path) -> None:
    assert problems(tmp_path, RICH, RICH) == []


def test_every_column_of_a_file_has_the_tables_id() -> None:
    schema = table_schema(storable_schema(RICH))
    files = file_schema(schema, RICH.names)
    assert {field.name: int(field.metadata[FIELD_ID]) for field in files} == {
        field.name: field.field_id for field in schema.fields
    }
    point = files.field("point").type
    assert int(point.field("x").metadata[FIELD_ID]) == schema.find_field("point.x").field_id


NESTED = pa.schema(
    [("a", pa.struct([("b", pa.int64()), ("c", pa.list_(pa.string()))])), ("m", pa.map_(pa.string(), pa.int32()))]
)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (pa.schema([("a", pa.int64())]), "a is int64 in the rows but struct"),
        (pa.schema([("a", pa.struct([("b", pa.string())]))]), "a.b is string in the rows but long"),
        (pa.schema([("a", pa.struct([("c", pa.list_(pa.int64()))]))]), "a.c.element is long in the rows but string"),
        (pa.schema([("a", pa.struct([("x", pa.int64())]))]), "a.x (int64) is not in the table"),
        (pa.schema([("m", pa.map_(pa.string(), pa.int64()))]), "m.value is long in the rows but int"),
        (pa.schema([("z", pa.int64())]), "z (int64) is not in the table"),
    ],
)
def test_differences_are_named(tmp_path: Path, rows: pa.Schema, problem: str) -> None:
    (found,) = problems(tmp_path, NESTED, rows)
    assert found.startswith(problem)


def test_rows_may_lack_columns_and_have_narrower_ones(tmp_path: Path) -> None:
    narrow = pa.schema([("a", pa.struct([("b", pa.int16())]))])
    assert problems(tmp_path, NESTED, narrow) == []
    wide = pa.schema([("p", pa.decimal128(20, 4))])
    (tmp_path / "p").mkdir()
    assert problems(tmp_path / "p", wide, pa.schema([("p", pa.decimal128(10, 4))])) == []
    assert problems(tmp_path / "p", wide, pa.schema([("p", pa.decimal128(10, 2))])) != []
    assert problems(tmp_path / "p", wide, pa.schema([("p", pa.decimal128(21, 4))])) != []
