"""The Delta sink where rows replace others: by key, or by partition."""

from __future__ import annotations

import threading
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cutline.connectors.delta.commits import replace_files
from cutline.errors import ConfigError, FencedError, SinkError
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, Generation
from cutline.sinks import Delta
from cutline.testing.conformance.sinks import RICH, RICH_ROW, SIMPLE, Case, Row, SinkBehaviour, rows
from tests.support.sink_targets import DeltaPartitionsTarget, DeltaUpsertTarget


class TestUpsert(DeltaUpsertTarget, SinkBehaviour):
    pass


class TestOverwritePartitions(DeltaPartitionsTarget, SinkBehaviour):
    pass


KEYED = pa.schema([pa.field("day", pa.date32()), pa.field("shop", pa.string()), pa.field("cents", pa.int64())])
FIRST, SECOND = date(2026, 3, 1), date(2026, 3, 2)


def keyed(day: date, shop: str, cents: int) -> Row:
    return {"day": day, "shop": shop, "cents": cents}


def start(tmp_path: Path, schema: pa.Schema = KEYED, **options: Any) -> Case:
    sink = Delta(tmp_path / "table", **({"mode": "upsert", "key": ["day", "shop"]} | options))
    context = TestUpsert().context(schema)
    sink.open(context)
    return Case(sink=sink, context=context)


def table(tmp_path: Path) -> dict[tuple[date, str], int]:
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist()
    content = {(row["day"], row["shop"]): row["cents"] for row in found}
    assert len(content) == len(found), "a key is there twice"
    return content


# ---------------------------------------------------------------------- upsert


@pytest.mark.parametrize("partition_by", [[], ["day"], ["shop"]])
def test_a_row_replaces_the_one_with_the_same_key(tmp_path: Path, partition_by: list[str]) -> None:
    case = start(tmp_path, partition_by=partition_by)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 2)], [keyed(SECOND, "a", 3)])
    case.publish(2, 1, [keyed(FIRST, "b", 20)], [keyed(SECOND, "b", 4)])
    assert table(tmp_path) == {(FIRST, "a"): 1, (FIRST, "b"): 20, (SECOND, "a"): 3, (SECOND, "b"): 4}


def test_a_row_may_move_to_another_partition(tmp_path: Path) -> None:
    case = start(tmp_path, key="shop", partition_by=["day"])
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 2)])
    case.publish(2, 1, [keyed(SECOND, "a", 10)])
    assert table(tmp_path) == {(SECOND, "a"): 10, (FIRST, "b"): 2}


def test_within_an_epoch_the_newest_batch_wins(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    older = case.stage(1, [keyed(FIRST, "a", 2), keyed(FIRST, "b", 2)], [keyed(FIRST, "c", 2)])
    newer = case.stage(2, [keyed(FIRST, "c", 3)], [keyed(FIRST, "a", 3)])
    case.commit(2, older, newer)
    assert table(tmp_path) == {(FIRST, "a"): 3, (FIRST, "b"): 2, (FIRST, "c"): 3}


def test_files_without_a_match_stay_as_they_are(tmp_path: Path) -> None:
    case = start(tmp_path, SIMPLE, key=["id"])
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(*range(100 * epoch, 100 * epoch + 10)))
    before = {path.name for path in (tmp_path / "table").glob("*.parquet")}
    files = set(DeltaTable(tmp_path / "table").file_uris())
    case.publish(4, 4, rows(205, 999))
    now = set(DeltaTable(tmp_path / "table").file_uris())
    assert len(files & now) == 2  # of the three, only the one that holds 205 was written anew
    # Beside it only the executors' own file has come.
    assert len({path.name for path in (tmp_path / "table").glob("*.parquet")} - before) == 2
    assert len(TestUpsert().ids(tmp_path)) == 31


def test_every_type_may_be_a_key_that_tells_values_apart(tmp_path: Path) -> None:
    """Also as partition columns, whose values stand in the log as text only."""
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
        assert sorted(found, key=lambda row: row["real"]) == [other, changed]


def test_keys_that_cannot_tell_rows_apart_are_refused(tmp_path: Path) -> None:
    for key in (["nothing"], ["real"], ["point"], ["id", "id"]):
        with pytest.raises(SinkError, match=key[0]):
            start(tmp_path, RICH, key=key) if len(set(key)) == len(key) else _named_twice(tmp_path, key)
    assert not (tmp_path / "table").exists()


def _named_twice(tmp_path: Path, key: list[str]) -> None:
    try:
        start(tmp_path, RICH, key=key)
    except SinkError as error:
        raise SinkError(f"{key[0]}: {error}") from error


def test_a_null_in_a_key_fails_the_batch(tmp_path: Path) -> None:
    case = start(tmp_path)
    with pytest.raises(SinkError, match="no value in a key column"):
        case.stage(0, [{"day": None, "shop": "a", "cents": 1}])
    case = start(tmp_path / "more", partition_by=["shop"])
    with pytest.raises(SinkError, match="no value in a key column"):
        case.stage(0, [keyed(FIRST, "", 1)])


def test_columns_that_only_the_table_has_are_kept(tmp_path: Path) -> None:
    wide = KEYED.append(pa.field("note", pa.string()))
    write_deltalake(tmp_path / "table", pa.Table.from_pylist([{**keyed(FIRST, "a", 1), "note": "kept"}], schema=wide))
    case = start(tmp_path, key="shop")
    write_deltalake(
        tmp_path / "table", pa.Table.from_pylist([{**keyed(FIRST, "b", 1), "note": "b"}], schema=wide), mode="append"
    )
    DeltaTable(tmp_path / "table").optimize.compact()
    case.publish(1, 0, [keyed(FIRST, "b", 2)])
    found = {row["shop"]: row["note"] for row in TestUpsert().read_rows(tmp_path)}
    assert found == {"a": "kept", "b": None}


@pytest.mark.parametrize(
    "configuration",
    [{"delta.appendOnly": "true"}, {"delta.enableChangeDataFeed": "true"}, {"delta.enableDeletionVectors": "true"}],
)
def test_tables_whose_rows_cannot_be_replaced_are_refused(tmp_path: Path, configuration: dict[str, str]) -> None:
    DeltaTable.create(tmp_path / "table", KEYED, configuration=dict(configuration))
    with pytest.raises(SinkError, match=next(iter(configuration))):
        start(tmp_path)


def test_timestamps_without_a_zone_are_fine(tmp_path: Path) -> None:
    """Such a table asks its writers for a feature by name."""
    schema = pa.schema([pa.field("at", pa.timestamp("us")), pa.field("value", pa.int64())])
    case = start(tmp_path, schema, key=["at"])
    at = datetime(2026, 3, 1, tzinfo=UTC).replace(tzinfo=None)
    case.publish(1, 0, [{"at": at, "value": 1}])
    case.publish(2, 1, [{"at": at, "value": 2}])
    assert TestUpsert().read_rows(tmp_path) == [{"at": at, "value": 2}]


def test_modes_need_what_they_need() -> None:
    for options in ({"mode": "upsert"}, {"key": ["a"]}, {"mode": "overwrite_partitions"}, {"mode": "else"}):
        with pytest.raises(ConfigError):
            Delta("unused", **options)


# ---------------------------------------------------------------------- others at the same time


def test_a_foreign_row_that_comes_during_the_commit_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    foreign = [keyed(FIRST, "a", 100), keyed(FIRST, "z", 100)]

    def disturbed(*args: Any, **more: Any) -> bool:
        if foreign:
            write_deltalake(tmp_path / "table", pa.Table.from_pylist(foreign, schema=KEYED), mode="append")
            foreign.clear()
        return replace_files(*args, **more)

    monkeypatch.setattr("cutline.connectors.delta.publish.replace_files", disturbed)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    assert table(tmp_path) == {(FIRST, "a"): 1, (FIRST, "z"): 100}


def test_what_a_lost_race_has_written_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)])
    lost = [1, 2]
    monkeypatch.setattr(
        "cutline.connectors.delta.publish.replace_files",
        lambda *args, **more: False if lost and lost.pop() else replace_files(*args, **more),
    )
    case.publish(2, 1, [keyed(FIRST, "a", 2)])
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 1}
    assert len(list((tmp_path / "table").glob("*.parquet"))) == 3  # first, second, and what is left of the first


def test_what_a_kill_leaves_beside_a_version_disturbs_nobody(tmp_path: Path) -> None:
    case = start(tmp_path)
    (tmp_path / "table/_delta_log/.tmp-00000000000000000001.json-0badcafe").write_text('{"commitInfo"')
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    assert table(tmp_path) == {(FIRST, "a"): 1}


def test_two_that_hold_the_same_permit_publish_once(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    staged = case.stage(1, [keyed(FIRST, "a", 2)], [keyed(FIRST, "b", 2)])
    permit = case.permit(2, [staged])
    sinks = [start(tmp_path).sink for _ in range(4)]
    together = threading.Barrier(4)
    failures: list[BaseException] = []

    def commit(sink: Any) -> None:
        together.wait()
        try:
            sink.commit(permit, [staged], {})
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=commit, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 2}
    marks = [info for info in DeltaTable(tmp_path / "table").history() if info.get("cutline")]
    assert len(marks) == 2


def test_readers_see_whole_epochs(tmp_path: Path) -> None:
    """Every epoch sets all keys to its number: a reader that sees two numbers has seen half of one."""
    case = start(tmp_path, key="shop")
    seen: list[set[int]] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            seen.append(set(table(tmp_path).values()))

    reader = threading.Thread(target=poll)
    reader.start()
    for epoch in range(1, 100):
        case.publish(epoch, epoch, *([keyed(FIRST, f"{task}-{n}", epoch) for n in range(3)] for task in range(3)))
        if len({next(iter(values)) for values in seen if values}) >= 5:
            break
    is_over.set()
    reader.join()
    assert all(len(values) <= 1 for values in seen)


# ---------------------------------------------------------------------- back


@pytest.mark.parametrize("options", [{}, {"mode": "overwrite_partitions", "key": (), "partition_by": ["day", "shop"]}])
def test_rewind_brings_replaced_rows_back(tmp_path: Path, options: dict[str, Any]) -> None:
    case = start(tmp_path, **options)
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)])
    case.publish(2, 1, [keyed(FIRST, "a", 2)])
    case.publish(3, 2, [keyed(FIRST, "a", 3), keyed(SECOND, "a", 3)])
    case.sink.rewind(Epoch(1))
    assert table(tmp_path) == {(FIRST, "a"): 1, (FIRST, "b"): 1}
    case.through, case.previous, case.generation = BatchId(0), Epoch(1), Generation(2)
    case.publish(4, 1, [keyed(FIRST, "b", 4)])
    assert table(tmp_path) == {(FIRST, "a"): 1, (FIRST, "b"): 4}
    case.sink.rewind(NO_EPOCH)
    assert table(tmp_path) == {}


def test_what_a_vacuum_has_deleted_cannot_come_back_and_it_says_so(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    case.publish(2, 1, [keyed(FIRST, "a", 2)])
    case.publish(3, 2, [keyed(FIRST, "b", 3)])
    sink = case.sink
    assert isinstance(sink, Delta) and sink.oldest_rewind() < 1
    DeltaTable(tmp_path / "table").vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    assert sink.oldest_rewind() == 2, "it is known before a rewind is tried"
    with pytest.raises(SinkError, match="vacuum"):
        case.sink.rewind(Epoch(1))
    assert table(tmp_path) == {(FIRST, "a"): 2, (FIRST, "b"): 3}
    case.sink.rewind(Epoch(2))
    assert table(tmp_path) == {(FIRST, "a"): 2}


def test_a_zombie_is_fenced_after_a_rewind(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [keyed(FIRST, "a", 1)])
    zombie = start(tmp_path)
    staged = case.stage(1, [keyed(FIRST, "a", 2)])
    permit = case.commit(2, staged)
    case.sink.rewind(Epoch(1))
    with pytest.raises(FencedError):
        zombie.sink.commit(permit, [staged], {})
    assert table(tmp_path) == {(FIRST, "a"): 1}


# ---------------------------------------------------------------------- partitions


def test_the_partitions_of_a_batch_are_replaced_as_a_whole(tmp_path: Path) -> None:
    case = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day"])
    case.publish(1, 0, [keyed(FIRST, "a", 1), keyed(FIRST, "b", 1)], [keyed(SECOND, "a", 1)])
    case.publish(2, 1, [keyed(FIRST, "c", 2)], [keyed(FIRST, "d", 2)])
    assert table(tmp_path) == {(FIRST, "c"): 2, (FIRST, "d"): 2, (SECOND, "a"): 1}


def test_of_two_batches_with_one_partition_the_newest_brings_it(tmp_path: Path) -> None:
    """Otherwise it would depend on where the epoch happens to end."""
    case = start(tmp_path, mode="overwrite_partitions", key=(), partition_by=["day"])
    older = case.stage(0, [keyed(FIRST, "a", 1), keyed(SECOND, "b", 1)])
    newer = case.stage(1, [keyed(FIRST, "c", 2)], [keyed(FIRST, "d", 2)])
    case.commit(1, older, newer)
    assert table(tmp_path) == {(FIRST, "c"): 2, (FIRST, "d"): 2, (SECOND, "b"): 1}


def test_partitions_of_every_type_are_found_again(tmp_path: Path) -> None:
    columns = ["flag", "text", "day", "at", "price", "small"]
    case = start(tmp_path, RICH, mode="overwrite_partitions", key=(), partition_by=columns)
    nothing: Row = {**dict.fromkeys(RICH_ROW), "id": 2}
    other = {**RICH_ROW, "price": Decimal("0.0001")}
    case.publish(1, 0, [RICH_ROW, nothing, other])
    changed = [{**RICH_ROW, "real": 2.5}, {**nothing, "real": 3.5}]
    case.publish(2, 1, changed)
    found = sorted(TestUpsert().read_rows(tmp_path), key=lambda row: row["real"])
    assert found == [other, *changed]
