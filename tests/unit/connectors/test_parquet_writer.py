"""The executor side: what ends up in files, under which names, and with which statistics."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import check_partition_columns, storable_schema
from cutline.errors import SinkError
from cutline.model.ids import BatchId, FlowName, Generation, OperatorId
from cutline.model.staging import Piece
from cutline.ports.sinks import StageAttempt


def stager(root: Path, schema: pa.Schema, **more: Any) -> ParquetStager:
    ipc = storable_schema(schema).serialize().to_pybytes()
    return ParquetStager(root=str(root), folder="{generation}/{batch}", sink="out", schema_ipc=ipc, **more)


def attempt(number: int = 0, *, partition: int = 3) -> StageAttempt:
    return StageAttempt(
        flow=FlowName("f"),
        operator=OperatorId("to/tals"),
        generation=Generation(2),
        batch=BatchId(7),
        partition=partition,
        attempt=f"try {number}",
    )


def stage(stager: ParquetStager, *batches: pa.RecordBatch) -> list[Piece]:
    writer = stager.open(attempt())
    for batch in batches:
        writer.write(batch)
    return writer.close()


def batch_of(schema: pa.Schema, *values: Any) -> pa.RecordBatch:
    """Rows of one column each."""
    return pa.RecordBatch.from_pylist([{schema.names[0]: value} for value in values], schema=schema)


def stats_of(tmp_path: Path, kind: pa.DataType, *values: Any) -> dict[str, Any]:
    schema = pa.schema([pa.field("c", kind)])
    (piece,) = stage(stager(tmp_path, schema, has_stats=True), batch_of(schema, *values))
    loaded: dict[str, Any] = json.loads(piece["stats"])
    return loaded


def bounds(tmp_path: Path, kind: pa.DataType, *values: Any) -> tuple[Any, Any]:
    stats = stats_of(tmp_path, kind, *values)
    return stats["minValues"].get("c"), stats["maxValues"].get("c")


# ---------------------------------------------------------------------- files


def test_importing_the_stager_loads_neither_pyarrow_nor_deltalake() -> None:
    script = (
        "import sys, cutline.sinks, cutline.connectors.parquet_writer;"
        "print([name for name in ('pyarrow', 'deltalake', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_tells_operator_generation_batch_partition_and_attempt(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    (piece,) = stage(stager(tmp_path, schema), batch_of(schema, 1))
    assert piece["path"].startswith("2/7/part-to_tals-g2-b7-p3-try_0-")
    assert piece["rows"] == 1
    assert piece["size_bytes"] == (tmp_path / piece["path"]).stat().st_size


def test_attempts_and_sinks_never_share_a_file(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    here = stager(tmp_path, schema)
    there = ParquetStager(root=here.root, folder=here.folder, sink="other", schema_ipc=here.schema_ipc)
    paths = set()
    for opener in (here, there):
        for number in (0, 1):
            writer = opener.open(attempt(number))
            writer.write(batch_of(schema, 1))
            paths |= {piece["path"] for piece in writer.close()}
    assert len(paths) == 4


def test_an_attempt_that_is_not_unique_overwrites_nothing(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    (piece,) = stage(stager(tmp_path, schema), batch_of(schema, 1))
    with pytest.raises(SinkError, match="cannot create"):
        stage(stager(tmp_path, schema), batch_of(schema, 2))
    assert pq.read_table(tmp_path / piece["path"])["id"].to_pylist() == [1]


def test_small_batches_become_one_row_group_and_large_ones_are_not_all_held(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    batches = [batch_of(schema, *range(start, start + 100)) for start in range(0, 1_000, 100)]
    (piece,) = stage(stager(tmp_path / "a", schema), *batches)
    assert pq.read_metadata(tmp_path / "a" / piece["path"]).num_row_groups == 1
    writer = stager(tmp_path / "b", schema, row_group_bytes=1_600).open(attempt())
    for batch in batches:
        writer.write(batch)
        assert writer._held_bytes < 1_600
    (piece,) = writer.close()
    assert pq.read_metadata(tmp_path / "b" / piece["path"]).num_row_groups == 5
    assert pq.read_table(tmp_path / "b" / piece["path"])["id"].to_pylist() == list(range(1_000))


def test_many_partition_values_stay_within_the_limits_and_lose_nothing(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("key", pa.int32())])
    limits = {"row_group_bytes": 400, "buffer_bytes": 2_000, "most_open_files": 3}
    writer = stager(tmp_path, schema, partition_by=("key",), **limits).open(attempt())
    for start in range(0, 3_000, 300):
        numbers = range(start, start + 300)
        rows = [{"id": number, "key": number % 17} for number in numbers]
        writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
        assert writer._held_bytes < 2_000 + 400
        assert writer._open_files <= 3
    pieces = writer.close()
    assert len({piece["path"] for piece in pieces}) == len(pieces)
    assert sum(piece["rows"] for piece in pieces) == 3_000
    found = ds.dataset(tmp_path / "2" / "7", partitioning="hive").to_table().to_pylist()
    assert sorted(row["id"] for row in found) == list(range(3_000))
    assert all(row["id"] % 17 == row["key"] for row in found)


def test_partition_values_are_spelled_for_delta_and_for_folders(tmp_path: Path) -> None:
    cases = [
        (pa.string(), "a b/c%ü=", "a b/c%ü=", "k=a b%2Fc%25ü%3D"),
        (pa.string(), "", None, "k=__HIVE_DEFAULT_PARTITION__"),
        (pa.string(), None, None, "k=__HIVE_DEFAULT_PARTITION__"),
        (pa.bool_(), True, "true", "k=true"),
        (pa.int64(), -5, "-5", "k=-5"),
        (pa.date32(), date(2024, 1, 2), "2024-01-02", "k=2024-01-02"),
        (pa.decimal128(10, 2), Decimal("1.50"), "1.50", "k=1.50"),
        (
            pa.timestamp("us", "Europe/Berlin"),
            datetime(2024, 1, 2, 3, 4, 5, 6, UTC),
            "2024-01-02T03:04:05.000006Z",
            "k=2024-01-02T03%3A04%3A05.000006Z",
        ),
    ]
    for number, (kind, value, text, folder) in enumerate(cases):
        schema = pa.schema([("k", kind), ("id", pa.int64())])
        root = tmp_path / str(number)
        rows = pa.RecordBatch.from_pylist([{"k": value, "id": 1}], schema=schema)
        (piece,) = stage(stager(root, schema, partition_by=("k",)), rows)
        assert piece["partition"] == {"k": text}
        assert piece["path"].split("/")[2] == folder
        assert pq.ParquetFile(root / piece["path"]).schema_arrow.names == ["id"]


def test_rows_are_split_by_several_columns_in_their_order(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int8())])
    rows = [{"id": number, "a": "xy"[number % 2], "b": number % 3 or None} for number in range(60)]
    pieces = stage(stager(tmp_path, schema, partition_by=("b", "a")), pa.RecordBatch.from_pylist(rows, schema=schema))
    assert len(pieces) == 6
    for piece in pieces:
        ids = pq.ParquetFile(tmp_path / piece["path"]).read()["id"].to_pylist()
        wanted = [
            row["id"]
            for row in rows
            if row["a"] == piece["partition"]["a"] and (str(row["b"]) if row["b"] else None) == piece["partition"]["b"]
        ]
        assert ids == wanted


def test_a_stager_travels_by_pickle(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    there = pickle.loads(pickle.dumps(stager(tmp_path, schema)))
    assert stage(there, batch_of(schema, 1))


# ---------------------------------------------------------------------- types


def test_zones_units_and_wide_types_become_what_every_reader_knows(tmp_path: Path) -> None:
    at = datetime(2024, 6, 1, 12, tzinfo=UTC)
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("ns", "Europe/Berlin")),
            pa.field("s", pa.large_string(), nullable=False),
            pa.field("l", pa.large_list(pa.field("item", pa.timestamp("ms", "Asia/Tokyo"), nullable=False))),
            pa.field("m", pa.map_(pa.string(), pa.struct([("when", pa.timestamp("s", "UTC"))]))),
            pa.field("d", pa.dictionary(pa.int32(), pa.string())),
            pa.field("f", pa.binary(2)),
        ]
    )
    row = {"at": at, "s": "x", "l": [at], "m": [("k", {"when": at})], "d": "y", "f": b"ab"}
    (piece,) = stage(stager(tmp_path, schema), pa.RecordBatch.from_pylist([row], schema=schema))
    found = pq.ParquetFile(tmp_path / piece["path"]).read()
    assert found.to_pylist() == [row]
    assert found.schema.field("at").type == pa.timestamp("us", "UTC")
    assert found.schema.field("s").type == pa.string()


@pytest.mark.parametrize("kind", [pa.null(), pa.duration("us"), pa.time64("us"), pa.uint64(), pa.struct([])])
def test_a_type_that_not_every_reader_knows_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(SinkError, match=r"column=outer\.element"):
        storable_schema(pa.schema([("outer", pa.list_(kind))]))


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(SinkError, match="same name"):
        storable_schema(pa.schema([("id", pa.int64()), ("ID", pa.int64())]))


@pytest.mark.parametrize("columns", [["nope"], ["real"], ["id", "id"], ["id", "real"]])
def test_bad_partition_columns_are_refused(columns: list[str]) -> None:
    with pytest.raises(SinkError):
        check_partition_columns(pa.schema([("id", pa.int64()), ("real", pa.float64())]), columns)


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        (pa.date32(), -719_162, 2_932_896),
        (pa.timestamp("us"), -62_135_596_800_000_000, 253_402_300_799_999_999),
        (pa.timestamp("us", "UTC"), -62_135_596_800_000_000, 253_402_300_799_999_999),
    ],
)
def test_years_that_python_cannot_name_are_refused_where_they_are_staged(
    tmp_path: Path, kind: pa.DataType, first: int, last: int
) -> None:
    """In the driver they would fail every try to publish their epoch."""
    numbers = pa.int32() if kind == pa.date32() else pa.int64()
    for number in (first, None, last, first - 1, last + 1):
        time = pa.array([number], numbers).cast(kind)
        columns = {
            "plain": time,
            "struct": pa.StructArray.from_arrays([time], ["at"]),
            "list": pa.ListArray.from_arrays([0, 1], time),
            "map": pa.MapArray.from_arrays([0, 1], ["k"], time),
        }
        for name, column in columns.items():
            rows = pa.RecordBatch.from_arrays([column], [name])
            target = stager(tmp_path / f"{number}-{name}", rows.schema, in_calendar=(name,))
            if number in (first, None, last):
                (piece,) = stage(target, rows)
                assert pq.read_table(Path(target.root) / piece["path"])[name].to_pylist() == column.to_pylist()
            else:
                with pytest.raises(SinkError, match="year 9999"):
                    stage(target, rows)


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    other = pa.schema([("id", pa.string())])
    with pytest.raises(SinkError, match="schema"):
        stage(stager(tmp_path, schema), batch_of(other, "not a number"))


# ---------------------------------------------------------------------- statistics


def test_bounds_cover_all_row_groups_and_nulls_are_counted(tmp_path: Path) -> None:
    schema = pa.schema([("c", pa.int64())])
    opener = stager(tmp_path, schema, has_stats=True, row_group_bytes=1)
    (piece,) = stage(opener, *(batch_of(schema, *values) for values in ([5, None], [None, None], [-2, 3])))
    assert json.loads(piece["stats"]) == {
        "numRecords": 6,
        "minValues": {"c": -2},
        "maxValues": {"c": 5},
        "nullCount": {"c": 3},
    }


def test_timestamp_bounds_are_milliseconds_rounded_outwards(tmp_path: Path) -> None:
    at = datetime(2024, 1, 1, 0, 0, 0, 1_500, UTC)
    assert bounds(tmp_path / "z", pa.timestamp("us", "UTC"), at) == (
        "2024-01-01T00:00:00.001Z",
        "2024-01-01T00:00:00.002Z",
    )
    assert bounds(tmp_path / "n", pa.timestamp("us"), at.replace(tzinfo=None)) == (
        "2024-01-01T00:00:00.001",
        "2024-01-01T00:00:00.002",
    )


def test_a_time_beyond_pythons_calendar_has_no_bounds(tmp_path: Path) -> None:
    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("us", "UTC"))
    schema = pa.schema([("c", far.type)])
    (piece,) = stage(stager(tmp_path, schema, has_stats=True), pa.RecordBatch.from_arrays([far], schema=schema))
    assert json.loads(piece["stats"])["maxValues"] == {}


def test_long_strings_are_cut_to_bounds_that_still_hold(tmp_path: Path) -> None:
    low, high = bounds(tmp_path, pa.string(), "b" * 40, "a" * 40)
    assert low == "a" * 32
    assert high == "b" * 32 + "\U0010ffff"
    assert low <= "a" * 40 < "b" * 40 <= high


def test_a_column_with_nan_has_no_bounds_since_spark_sorts_nan_highest(tmp_path: Path) -> None:
    assert bounds(tmp_path / "a", pa.float64(), 1.0, float("nan"), 2.0) == (None, None)
    assert bounds(tmp_path / "b", pa.float64(), 1.0, float("inf")) == (None, None)
    assert bounds(tmp_path / "c", pa.float64(), 1.0, 2.5, None) == (1.0, 2.5)


def test_decimals_are_written_out_in_full(tmp_path: Path) -> None:
    schema = pa.schema([("c", pa.decimal128(20, 9))])
    rows = batch_of(schema, Decimal("0.000000001"), Decimal(100))
    (piece,) = stage(stager(tmp_path, schema, has_stats=True), rows)
    assert '"minValues":{"c":0.000000001}' in piece["stats"]
    assert '"maxValues":{"c":100.000000000}' in piece["stats"]


def test_structs_have_nested_statistics_and_lists_none(tmp_path: Path) -> None:
    kind = pa.struct([("l", pa.list_(pa.int64())), ("x", pa.int64()), ("r", pa.float64())])
    stats = stats_of(tmp_path, kind, {"l": [1, 2], "x": 4, "r": 1.0}, None)
    assert stats["minValues"] == {"c": {"x": 4}}
    assert stats["nullCount"] == {"c": {"x": 1, "r": 1}}
