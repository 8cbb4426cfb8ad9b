"""Iceberg tables whose rows are replaced: by key, or partition by partition."""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from cutline.connectors.iceberg import commits
from cutline.connectors.iceberg.sink import Iceberg
from cutline.errors import ConfigError, FencedError, SinkError
from cutline.model.ids import Epoch
from cutline.testing.conformance.sinks import RICH, RICH_ROW, Case, Row, SinkBehaviour
from tests.support import iceberg_others as others
from tests.support.sink_targets import IcebergPartitionsTarget, IcebergUpsertTarget, iceberg, iceberg_table


class TestUpsert(IcebergUpsertTarget, SinkBehaviour):
    pass


class TestOverwritePartitions(IcebergPartitionsTarget, SinkBehaviour):
    pass


KEYED = pa.schema([pa.field("day", pa.date32()), pa.field("shop", pa.string()), pa.field("cents", pa.int64())])
FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


def keyed(day: date, shop: str, cents: int) -> Row:
    return {"day": day, "shop": shop, "cents": cents}


def start(tmp_path: Path, schema: pa.Schema = KEYED, **options: Any) -> Case:
    sink = iceberg(tmp_path, **({"mode": "upsert", "key": ["day", "shop"]} | options))
    context = TestUpsert().context(schema)
    sink.open(context)
    return Case(sink=sink, context=context)


def table(tmp_path: Path) -> dict[tuple[date, str], int]:
    found = TestUpsert().read_rows(tmp_path)
    content = {(row["day"], row["shop"]): row["cents"] for row in found}
    assert len(content) == len(found), "a key is there twice"
    return content


def append(tmp_path: Path, *some: Row, schema: pa.Schema = KEYED) -> None:
    iceberg_table(tmp_path).append(pa.Table.from_pylist(list(some), schema=schema))


def data_files(tmp_path: Path) -> int:
    return len(list((tmp_path / "warehouse").rglob("*.parquet")))


# ---------------------------------------------------------------------- upsert


@pytest.mark.parametrize("partition_by", [[], ["day"], ["shop"]])
def test_a_row_replaces_the_one_with_the_same_key(tmp_path: Path, partition_by: list[str]) -> None:
    case = start(tmp_path, partition_by=partition_by)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 2)], [keyed(SECOND, "a", 3)])
    case.publish(2, 1, [keyed(FIRST, "b", 20)], [keyed(SECOND, "b", 4)])
    assert table(tmp_path) == {(FIRST, "a"): 1, (FIRST, "b"): 20, (SECOND, "a"): 3, (SECOND, "b"): 4}
    newest = iceberg_table(tmp_path).current_snapshot()
    assert newest is not None
    assert newest.summary is not None
    assert newest.summary.operation == Operation.OVERWRITE
    assert newest.summary["total-records"] == "4"


def test_a_row_may_move_to_another_partition(tmp_path: Path) -> None:
    case = start(tmp_path, key="shop", partition_by=["day"])
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)])
    case.publish(2, 1, [keyed(SECOND, "a", 2)])
    assert table(tmp_path) == {(SECOND, "a"): 2, (FIRST, "b"): 1}


def test_within_an_epoch_the_newest_batch_wins_and_what_it_supersedes_is_deleted(tmp_path: Path) -> None:
    case = start(tmp_path)
    older = case.stage(0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)])
    newer = case.stage(1, [keyed(FIRST, "a", 2)], [keyed(FIRST, "c", 2), keyed(FIRST, "c", 3)])
    case.commit(1, older, newer)
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 1, (FIRST, "c"): 3}
    assert data_files(tmp_path) == 3  # those that the snapshot names


def test_files_without_a_match_stay_as_they_are(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)], [keyed(FIRST, "y", 1), keyed(FIRST, "z", 1)])
    before = {task.file.file_path for task in iceberg_table(tmp_path).scan().plan_files()}
    case.publish(2, 1, [keyed(FIRST, "y", 2)])
    after = {task.file.file_path for task in iceberg_table(tmp_path).scan().plan_files()}
    assert len(before & after) == 1
    assert len(after) == 3


def test_every_type_may_be_a_key_that_tells_values_apart(tmp_path: Path) -> None:
    """Also as partition columns."""
    columns = ["flag", "text", "day", "at", "price", "small"]
    for number, partition_by in enumerate(([], columns, ["at", "price"])):
        place = tmp_path / str(number)
        place.mkdir()
        case = start(place, RICH, key=[*columns, "id"], partition_by=partition_by)
        other = {**RICH_ROW, "at": RICH_ROW["at"] - timedelta(microseconds=1)}
        case.publish(1, 0, [RICH_ROW, other])
        changed = {**RICH_ROW, "real": 7.5}
        case.publish(2, 1, [changed])
        found = TestUpsert().read_rows(place)
        assert sorted(found, key=lambda row: float(row["real"])) == [other, changed]


def test_a_null_in_a_key_fails_the_batch_and_an_empty_text_does_not(tmp_path: Path) -> None:
    case = start(tmp_path, partition_by=["shop"])
    with pytest.raises(SinkError, match="no value in a key column"):
        case.stage(0, [{"day": None, "shop": "a", "cents": 1}])
    case.publish(1, 1, [keyed(FIRST, "", 1), keyed(FIRST, "a", 1)])
    case.publish(2, 2, [keyed(FIRST, "", 2)])
    assert table(tmp_path) == {(FIRST, ""): 2, (FIRST, "a"): 1}


def test_columns_that_only_the_table_has_are_kept(tmp_path: Path) -> None:
    wide = KEYED.append(pa.field("note", pa.string()))
    start(tmp_path, wide)
    append(
        tmp_path, {**keyed(FIRST, "a", 1), "note": "kept"}, {**keyed(FIRST, "b", 1), "note": "replaced"}, schema=wide
    )
    case = start(tmp_path, key="shop")
    case.publish(1, 0, [keyed(FIRST, "b", 2)])
    assert {row["shop"]: row["note"] for row in TestUpsert().read_rows(tmp_path)} == {"a": "kept", "b": None}


def test_modes_need_what_they_need(tmp_path: Path) -> None:
    for options in ({"mode": "upsert"}, {"key": ["a"]}, {"mode": "overwrite_partitions"}, {"mode": "merge"}):
        with pytest.raises(ConfigError):
            iceberg(tmp_path, **options)
    for key in (["nothing"], ["real"], ["point"]):
        with pytest.raises(SinkError, match=key[0]):
            start(tmp_path, RICH, key=key)


def test_a_foreign_row_that_comes_during_the_commit_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)])
    foreign = [keyed(FIRST, "a", 100), keyed(FIRST, "z", 100)]
    original = commits.commit_draft

    def disturbed(*given: Any) -> None:
        if foreign:
            append(tmp_path, *foreign)
            foreign.clear()
        original(*given)

    monkeypatch.setattr("cutline.connectors.iceberg.table.commit_draft", disturbed)
    case.publish(2, 1, [keyed(FIRST, "a", 2)])
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 1, (FIRST, "z"): 100}
    # Of the lost race nothing is left: two staged files, a foreign one, and what is left of two that were rewritten.
    assert data_files(tmp_path) == 5


def test_rows_that_others_deleted_do_not_reappear(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1), keyed(FIRST, "c", 1)])
    iceberg_table(tmp_path).delete("shop == 'b'")
    case.publish(2, 1, [keyed(FIRST, "a", 2)])
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "c"): 1}


def test_a_compacted_table_is_upserted_and_rewound(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, [keyed(FIRST, "a", epoch), keyed(FIRST, f"s{epoch}", epoch)])
    others.compact(tmp_path)
    case.publish(4, 4, [keyed(FIRST, "a", 4)])
    assert table(tmp_path) == {(FIRST, "a"): 4, (FIRST, "s1"): 1, (FIRST, "s2"): 2, (FIRST, "s3"): 3}
    case.sink.rewind(Epoch(2))
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "s1"): 1, (FIRST, "s2"): 2}


def test_a_column_that_was_renamed_meanwhile_stops_the_upsert(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    with iceberg_table(tmp_path).update_schema() as change:
        change.rename_column("shop", "store")
    with pytest.raises(SinkError, match="shop"):
        case.publish(2, 1, [keyed(FIRST, "a", 2)])


def test_two_that_hold_the_same_permit_publish_once(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    staged = case.stage(1, [keyed(FIRST, "a", 2)], [keyed(FIRST, "b", 2)])
    permit = case.permit(2, [staged])
    sinks = [start(tmp_path).sink for _ in range(3)]
    together = threading.Barrier(3)
    failures: list[BaseException] = []

    def commit(sink: Any) -> None:
        together.wait()
        try:
            sink.commit(permit, [staged], {})
        except BaseException as error:  # noqa: BLE001 (shown by the assertion below)
            failures.append(error)

    threads = [threading.Thread(target=commit, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 2}
    assert len(iceberg_table(tmp_path).snapshots()) == 2


@pytest.mark.parametrize(
    "options", [{}, {"partition_by": ["day"]}, {"mode": "overwrite_partitions", "key": (), "partition_by": ["day"]}]
)
def test_a_rewind_restores_replaced_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    case = start(tmp_path, **options)
    states = {}
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, [keyed(FIRST, "a", epoch), keyed(FIRST, f"b{epoch}", 0)])
        states[epoch] = table(tmp_path)
    for epoch in (2, 1):
        case.sink.rewind(Epoch(epoch))
        assert table(tmp_path) == states[epoch]


def test_a_zombie_is_fenced_after_a_rewind(tmp_path: Path) -> None:
    zombie = start(tmp_path)
    zombie.publish(1, 1, [keyed(FIRST, "a", 1)])
    staged = zombie.stage(2, [keyed(FIRST, "a", 2)])
    permit = zombie.permit(2, [staged])
    other = start(tmp_path)
    assert isinstance(other.sink, Iceberg)
    other.sink.claim("", expected="")
    other.sink.commit(permit, [staged], {})
    other.sink.rewind(Epoch(1))
    with pytest.raises(FencedError):
        zombie.sink.commit(permit, [staged], {})
    assert table(tmp_path) == {(FIRST, "a"): 1}


# ---------------------------------------------------------------------- partitions


def test_the_partitions_of_a_batch_are_replaced_as_a_whole(tmp_path: Path) -> None:
    case = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day"])
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)], [keyed(SECOND, "a", 1)])
    append(tmp_path, keyed(FIRST, "z", 100))
    case.publish(2, 1, [keyed(FIRST, "c", 2)], [keyed(FIRST, "d", 2)])
    assert table(tmp_path) == {(FIRST, "c"): 2, (FIRST, "d"): 2, (SECOND, "a"): 1}


def test_of_two_batches_with_one_partition_the_newest_brings_it(tmp_path: Path) -> None:
    """Otherwise it would depend on where the epoch happens to end."""
    case = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day"])
    older = case.stage(0, [keyed(FIRST, "a", 1), keyed(SECOND, "b", 1)])
    newer = case.stage(1, [keyed(FIRST, "c", 2)], [keyed(FIRST, "d", 2)])
    case.commit(1, older, newer)
    assert table(tmp_path) == {(FIRST, "c"): 2, (FIRST, "d"): 2, (SECOND, "b"): 1}
    assert data_files(tmp_path) == 3


def test_partitions_of_every_type_are_found_again(tmp_path: Path) -> None:
    columns = ["flag", "text", "day", "at", "price", "small"]
    case = start(tmp_path, RICH, mode="overwrite_partitions", key=(), partition_by=columns)
    nothing: Row = {**dict.fromkeys(RICH_ROW), "id": 2}
    empty, other = {**nothing, "id": 3, "text": "", "real": 0.0}, {**RICH_ROW, "price": Decimal("0.0001")}
    case.publish(1, 0, [RICH_ROW, nothing, empty, other])
    changed = [{**RICH_ROW, "real": 2.5}, {**nothing, "real": 3.5}]
    case.publish(2, 1, changed)
    found = sorted(TestUpsert().read_rows(tmp_path), key=lambda row: float(row["real"]))
    assert found == [empty, other, *changed]


def test_files_of_former_partitions_are_named(tmp_path: Path) -> None:
    case = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day"])
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    with iceberg_table(tmp_path).update_spec() as change:
        change.add_identity("shop")
    again = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day", "shop"])
    again.previous, again.through = case.previous, case.through
    with pytest.raises(SinkError, match="written for other partitions"):
        again.publish(2, 1, [keyed(FIRST, "a", 2)])


def test_timestamps_without_a_zone_may_be_partitions(tmp_path: Path) -> None:
    schema = pa.schema([("at", pa.timestamp("us")), ("zoned", pa.timestamp("us", "UTC")), ("cents", pa.int64())])
    moment = datetime(2026, 3, 1, 1, 2, 3, 4, tzinfo=UTC)
    row = {"at": moment.replace(tzinfo=None), "zoned": moment, "cents": 1}
    case = start(tmp_path, schema, mode="overwrite_partitions", key=(), partition_by=["at", "zoned"])
    case.publish(1, 0, [row])
    case.publish(2, 1, [{**row, "cents": 2}])
    assert TestUpsert().read_rows(tmp_path) == [{**row, "cents": 2}]
