"""What manifests say of data files: readers must find every row that they ask for."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg import expressions, types
from pyiceberg.expressions import BooleanExpression

from cutline.connectors.iceberg.data_files import MOST_CHARACTERS, above, partition_as_text, partition_value
from cutline.testing.conformance.sinks import RICH, RICH_ROW, Case
from tests.support.sink_targets import IcebergTarget, iceberg, iceberg_table

#: Its expressions take a name and a value, which their types do not tell.
asked: Any = expressions


def publish(tmp_path: Path, schema: pa.Schema, *parts: list[dict[str, Any]], **options: Any) -> None:
    sink, context = iceberg(tmp_path, **options), IcebergTarget().context(schema)
    sink.open(context)
    Case(sink=sink, context=context).publish(1, 0, *parts)


def found(tmp_path: Path, question: BooleanExpression) -> list[int]:
    return sorted(iceberg_table(tmp_path).scan(question).to_arrow()["id"].to_pylist())


def test_statistics_let_readers_find_every_row_they_ask_for(tmp_path: Path) -> None:
    long = "z" * 50
    publish(tmp_path, RICH, [RICH_ROW], [{**RICH_ROW, "id": 2, "text": long, "real": float("nan"), "raw": None}])
    questions: list[tuple[BooleanExpression, list[int]]] = [
        (asked.GreaterThanOrEqual("at", "2024-02-29T23:59:59.999999+00:00"), [1, 2]),
        (asked.GreaterThan("at", "2024-03-01T00:00:00+00:00"), []),
        (asked.EqualTo("price", "-1234567890123456.7891"), [1, 2]),
        (asked.EqualTo("day", "1969-07-20"), [1, 2]),
        (asked.EqualTo("text", long), [2]),
        (asked.LessThan("small", -6), [1, 2]),
        (asked.EqualTo("id", 2), [2]),
        (asked.EqualTo("real", 0.25), [1]),
        (asked.IsNull("raw"), [2]),
    ]
    for question, wanted in questions:
        assert found(tmp_path, question) == wanted, question
    table = iceberg_table(tmp_path)
    for question, files in (
        (asked.EqualTo("id", 2), 1),
        (asked.EqualTo("text", long), 1),
        (asked.EqualTo("id", 3), 0),
        (asked.IsNull("raw"), 1),
    ):
        assert len(list(table.scan(question).plan_files())) == files, question


def test_files_say_how_many_rows_they_have(tmp_path: Path) -> None:
    publish(tmp_path, RICH, [RICH_ROW, {**dict.fromkeys(RICH_ROW), "id": 2}])
    (task,) = iceberg_table(tmp_path).scan().plan_files()
    path = Path(task.file.file_path)
    assert (task.file.record_count, task.file.file_size_in_bytes) == (2, path.stat().st_size)
    by_name = {field.name: field.field_id for field in iceberg_table(tmp_path).schema().fields}
    assert task.file.null_value_counts[by_name["text"]] == 1
    assert by_name["text"] in task.file.lower_bounds
    assert by_name["raw"] not in task.file.lower_bounds
    assert iceberg_table(tmp_path).scan().count() == 2


def test_times_that_python_lacks_have_bounds_too(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("day", pa.date32())])
    sink, context = iceberg(tmp_path), IcebergTarget().context(schema)
    sink.open(context)
    case = Case(sink=sink, context=context)
    writer = sink.stager().open(_attempt(case))
    late = pa.array([300_000_000_000_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))
    writer.write(
        pa.RecordBatch.from_arrays([[1], late, pa.array([3_000_000], pa.int32()).cast(pa.date32())], schema=schema)
    )
    staged = case.stage(1)
    staged.pieces.extend(writer.close())
    case.commit(1, staged)
    assert found(tmp_path, asked.GreaterThan("at", "9999-01-01T00:00:00+00:00")) == [1]
    assert found(tmp_path, asked.LessThan("at", "9999-01-01T00:00:00+00:00")) == []


def _attempt(case: Case) -> Any:
    from cutline.model.ids import BatchId, Generation
    from cutline.ports.sinks import StageAttempt

    context = case.context
    return StageAttempt(
        flow=context.flow,
        operator=context.operator,
        generation=Generation(1),
        batch=BatchId(1),
        partition=0,
        attempt="a",
    )


def test_partitions_let_readers_skip_files(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("shop", pa.string()), ("day", pa.date32())])
    rows = [
        {"id": number, "shop": shop, "day": date(2026, 3, number)}
        for number, shop in enumerate(("a", "", None, "a"), 1)
    ]
    publish(tmp_path, schema, rows, partition_by=["shop", "day"])
    assert found(tmp_path, asked.EqualTo("shop", "")) == [2]
    assert found(tmp_path, asked.IsNull("shop")) == [3]
    question = asked.And(asked.EqualTo("shop", "a"), asked.GreaterThan("day", "2026-03-01"))
    assert found(tmp_path, question) == [4]
    assert len(list(iceberg_table(tmp_path).scan(question).plan_files())) == 1


@given(st.text(min_size=MOST_CHARACTERS, max_size=MOST_CHARACTERS + 5))
def test_an_upper_bound_is_not_below_the_text(text: str) -> None:
    bound = above(text)
    if bound is None:
        assert set(text[:MOST_CHARACTERS]) == {chr(sys.maxunicode)}
    else:
        assert bound.encode() >= text.encode()
        assert len(bound) <= max(MOST_CHARACTERS, len(bound.rstrip()))


def test_an_upper_bound_never_ends_in_half_a_character() -> None:
    assert above("\ud7ff" * 20) == "\ud7ff" * 15 + "\ue000"
    assert above(chr(sys.maxunicode) * 20) is None


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (types.StringType(), "a b/c%ü", "a b/c%ü"),
        (types.StringType(), "", ""),
        (types.LongType(), "-3", -3),
        (types.IntegerType(), "7", 7),
        (types.BooleanType(), "true", True),
        (types.BooleanType(), "false", False),
        (types.DateType(), "1969-07-20", -165),
        (types.DecimalType(20, 4), "-12.3400", Decimal("-12.3400")),
        (types.TimestampType(), "1970-01-01 00:00:01.000002", 1_000_002),
        (types.TimestamptzType(), "1970-01-01T00:00:01.000002Z", 1_000_002),
        (types.LongType(), None, None),
    ],
)
def test_partition_values_are_spelled_and_read_alike(kind: types.IcebergType, text: str | None, value: Any) -> None:
    assert partition_value(text, kind) == value
    assert partition_as_text(value, kind) == text


def test_moments_before_1970_are_spelled_right() -> None:
    moment = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    assert partition_value("1969-12-31T23:59:59.999999Z", types.TimestamptzType()) == -1
    assert partition_as_text(-1, types.TimestamptzType()) == moment.replace(tzinfo=None).isoformat() + "Z"
