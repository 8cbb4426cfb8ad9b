"""The Delta sink: the suite, and what is special about a shared transaction log."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError

from cutline.errors import ConfigError, FencedError, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.sinks import RewindsSoFar
from cutline.sinks import Delta
from cutline.testing.conformance.sinks import RICH, RICH_ROW, SIMPLE, Case, SinkBehaviour, rows
from tests.support.sink_targets import DeltaTarget


class TestDelta(DeltaTarget, SinkBehaviour):
    pass


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, **options: Any) -> Case:
    """A case over ``tmp_path/table``, with options of the sink."""
    sink = Delta(tmp_path / "table", **options)
    context = TestDelta().context(schema)
    sink.open(context)
    return Case(sink=sink, context=context)


def ids(tmp_path: Path) -> list[int]:
    return TestDelta().ids(tmp_path)


def oldest_rewind(case: Case) -> int:
    assert isinstance(case.sink, RewindsSoFar)
    return case.sink.oldest_rewind()


def append(tmp_path: Path, *numbers: int) -> None:
    """What somebody else would do."""
    write_deltalake(tmp_path / "table", pa.Table.from_pylist(rows(*numbers), schema=SIMPLE), mode="append")


def data_files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "table").rglob("*.parquet") if "_delta_log" not in path.parts}


def names(case: Case, *staged: Any) -> set[str]:
    return {Path(piece["path"]).name for batch in staged for piece in batch.pieces}


# ---------------------------------------------------------------------- sharing


def test_a_reader_polling_during_commits_never_sees_half_an_epoch(tmp_path: Path) -> None:
    case = start(tmp_path)
    seen: list[Counter[int]] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            seen.append(Counter(number // 10 for number in ids(tmp_path)))

    reader = threading.Thread(target=poll)
    reader.start()
    for epoch in range(1, 200):
        case.publish(epoch, epoch, *(rows(10 * epoch + task) for task in range(4)))
        if len({len(counts) for counts in seen}) >= 5:  # enough commits were watched, however slow the reader is
            break
    is_over.set()
    reader.join()
    assert all(count == 4 for counts in seen for count in counts.values())
    assert len({len(counts) for counts in seen}) > 1, "the reader saw no commit happen"


def test_commits_of_others_are_kept_and_do_not_disturb(tmp_path: Path) -> None:
    case = start(tmp_path)
    append(tmp_path, 100)
    case.publish(1, 0, rows(1))
    append(tmp_path, 101)
    case.publish(2, 1, rows(2))
    assert ids(tmp_path) == [1, 2, 100, 101]
    assert case.sink.published() == 2


def test_a_foreign_commit_during_ours_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    original = DeltaTable.create_write_transaction

    def disturbed(table: DeltaTable, *args: Any, **more: Any) -> None:
        append(tmp_path, 100)
        original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", disturbed)
    case.publish(1, 0, rows(1))
    assert ids(tmp_path) == [1, 100]


def test_a_compaction_during_our_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    original = DeltaTable.create_write_transaction

    def disturbed(table: DeltaTable, *args: Any, **more: Any) -> None:
        assert DeltaTable(tmp_path / "table").optimize.compact()["numFilesRemoved"] == 2
        original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", disturbed)
    case.publish(3, 3, rows(3))
    assert ids(tmp_path) == [1, 2, 3]
    case.sink.rewind(Epoch(1))  # the same rows in other files are no change
    assert ids(tmp_path) == [1]


def test_an_existing_table_with_a_further_nullable_column_is_fine(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "table", SIMPLE.append(pa.field("more", pa.int64())))
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    assert TestDelta().read_rows(tmp_path) == [{**rows(1)[0], "more": None}]


def test_two_that_hold_the_same_permit_publish_once(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    permit = case.permit(1, [staged])
    sinks = [start(tmp_path).sink for _ in range(4)]
    together = threading.Barrier(4)
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
    assert ids(tmp_path) == [1, 2]
    assert DeltaTable(tmp_path / "table").version() == 1


# ---------------------------------------------------------------------- failing commits


def test_a_commit_whose_answer_is_lost_is_found_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    original = DeltaTable.create_write_transaction

    def silent(table: DeltaTable, *args: Any, **more: Any) -> None:
        original(table, *args, **more)
        raise OSError("the connection broke")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", silent)
    case.publish(1, 0, rows(1))
    assert ids(tmp_path) == [1]
    assert DeltaTable(tmp_path / "table").version() == 1


def test_a_commit_is_tried_again_and_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    original = DeltaTable.create_write_transaction
    failures = 100

    def failing(table: DeltaTable, *args: Any, **more: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise DeltaError("not now")
        original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", failing)
    with pytest.raises(NotDone, match="not now"):
        case.commit(1, staged)
    assert ids(tmp_path) == []
    failures = 2
    case.commit(1, staged)
    assert ids(tmp_path) == [1]


def test_a_rewind_in_the_middle_of_a_commit_fences_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    case.publish(2, 2, rows(2))
    case.publish(3, 3, rows(3))
    zombie = start(tmp_path)
    zombie.through, zombie.previous = case.through, case.previous
    staged = zombie.stage(4, rows(4))
    original = DeltaTable.create_write_transaction

    def overtaken(table: DeltaTable, *args: Any, **more: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", original)
        case.publish(5, 5, rows(5))
        case.sink.rewind(Epoch(1))
        original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", overtaken)
    with pytest.raises(FencedError):
        zombie.commit(4, staged)
    assert ids(tmp_path) == [1]


def test_a_staged_file_that_a_vacuum_took_is_not_published(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    table = DeltaTable(tmp_path / "table")
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert data_files(tmp_path) == names(case, staged), "the usual vacuum takes only what a commit removed"
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    with pytest.raises(SinkError, match=r"gone.*VACUUM"):
        case.commit(1, staged)
    assert case.sink.published() is None


def test_the_log_is_condensed_now_and_then(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "table", SIMPLE, configuration={"delta.checkpointInterval": "3"})
    case = start(tmp_path)
    for epoch in range(1, 8):
        case.publish(epoch, epoch, rows(epoch))
    pointer = json.loads((tmp_path / "table" / "_delta_log" / "_last_checkpoint").read_text())
    assert pointer["version"] == 6
    fresh = start(tmp_path)
    assert fresh.sink.published() == 7
    assert ids(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


# ---------------------------------------------------------------------- abort and orphans


def test_abort_deletes_staged_files_but_none_that_a_commit_names(tmp_path: Path) -> None:
    case = start(tmp_path)
    published, staged = case.stage(0, rows(1)), case.stage(1, rows(2))
    orphan = case.stage(1, rows(2))  # a task whose report was lost: nobody names it, nobody knows it
    case.commit(1, published)
    case.sink.abort([published, staged])
    assert data_files(tmp_path) == names(case, published, orphan)


def test_abort_keeps_the_files_of_a_rewound_epoch_for_time_travel(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    case.commit(1, staged)
    case.sink.rewind(NO_EPOCH)
    case.sink.abort([staged])
    assert DeltaTable(tmp_path / "table", version=1).to_pyarrow_table().num_rows == 1


def test_abort_knows_partition_folders_with_odd_names(tmp_path: Path) -> None:
    case = start(tmp_path, partition_by=["name"])
    odd = [{"id": 1, "name": "a b/c%ü"}]
    published, staged = case.stage(0, odd), case.stage(1, odd)
    case.commit(1, published)
    case.sink.abort([published, staged])
    assert data_files(tmp_path) == names(case, published)
    assert TestDelta().read_rows(tmp_path) == odd


# ---------------------------------------------------------------------- rewind


def test_rewind_restores_rows_and_epoch_in_one_version(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    case.sink.rewind(Epoch(1))
    table = DeltaTable(tmp_path / "table")
    assert table.version() == 4
    assert table.transaction_version("cutline/orders/totals-out") == 1
    sink = case.sink
    assert isinstance(sink, Delta)
    assert sink.highest() == 3


def test_rewind_is_refused_when_somebody_else_changed_the_table_since(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    append(tmp_path, 100)
    case.publish(2, 2, rows(2))
    assert oldest_rewind(case) == 1
    case.sink.rewind(Epoch(1))  # the foreign rows came before epoch 2: nothing of theirs is lost
    assert ids(tmp_path) == [1, 100]
    with pytest.raises(SinkError, match="another writer changed the table"):
        case.sink.rewind(NO_EPOCH)
    assert ids(tmp_path) == [1, 100]
    assert case.sink.published() == 1


def test_rewind_sees_foreign_commits_that_say_nothing_about_themselves(tmp_path: Path) -> None:
    """deltalake's own history leaves such a commit out and numbers the others wrongly."""
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    append(tmp_path, 100)
    path = tmp_path / "table" / "_delta_log" / f"{2:020}.json"
    lines = [line for line in path.read_text().splitlines() if "commitInfo" not in line]
    path.write_text("\n".join(lines))
    case.publish(2, 2, rows(2))
    case.publish(3, 3, rows(3))
    case.sink.rewind(Epoch(2))
    assert ids(tmp_path) == [1, 2, 100]
    with pytest.raises(SinkError, match="another writer changed the table"):
        case.sink.rewind(NO_EPOCH)


def test_rewind_is_refused_when_somebody_commits_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    original = DeltaTable.restore

    def disturbed(table: DeltaTable, *args: Any, **more: Any) -> Any:
        append(tmp_path, 100)
        return original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "restore", disturbed)
    with pytest.raises(SinkError, match="another writer changed the table"):
        case.sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1, 2, 100]


def test_a_vacuum_since_does_not_stand_in_the_way_of_a_rewind(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    case.stage(3, rows(3))  # without anything to delete, a vacuum leaves no trace in the log
    table = DeltaTable(tmp_path / "table")
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    assert table.history(1)[0]["operation"] == "VACUUM END"
    case.sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1]


def test_rewind_in_a_table_that_was_there_before_keeps_its_rows(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "table", pa.Table.from_pylist(rows(100), schema=SIMPLE))
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    assert oldest_rewind(case) == NO_EPOCH
    case.sink.rewind(NO_EPOCH)
    assert ids(tmp_path) == [100]


def test_rewind_beyond_the_log_is_refused(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    DeltaTable(tmp_path / "table").create_checkpoint()
    for version in (0, 1, 2):
        (tmp_path / "table" / "_delta_log" / f"{version:020}.json").unlink()
    assert oldest_rewind(case) == 3
    with pytest.raises(SinkError, match="reaches back"):
        case.sink.rewind(Epoch(1))


def test_an_append_only_table_cannot_be_rewound(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "table", SIMPLE, configuration={"delta.appendOnly": "true"})
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    with pytest.raises(SinkError, match="append-only"):
        case.sink.rewind(NO_EPOCH)


# ---------------------------------------------------------------------- what fits


def test_deltalake_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.delta.sink.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install cutline\[delta\]"):
        Delta(tmp_path)


def test_a_folder_that_is_not_a_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "notes.txt").write_text("mine")
    with pytest.raises(SinkError, match="not a Delta table"):
        start(tmp_path)


def test_another_partitioning_is_refused(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(SinkError, match="partitioned by"):
        start(tmp_path, partition_by=["name"])


def test_a_column_that_must_not_be_null_is_refused_unless_the_rows_promise_it(tmp_path: Path) -> None:
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    DeltaTable.create(tmp_path / "table", strict)
    with pytest.raises(SinkError, match="id may be null"):
        start(tmp_path)
    case = start(tmp_path, strict)
    case.publish(1, 0, rows(1))
    assert ids(tmp_path) == [1]


def test_a_nested_difference_is_named(tmp_path: Path) -> None:
    def schema(kind: pa.DataType) -> pa.Schema:
        return pa.schema([("a", pa.list_(pa.struct([("b", pa.map_(pa.string(), kind))])))])

    start(tmp_path, schema(pa.int64()))
    with pytest.raises(SinkError, match=r"a\.element\.b\.value is string in the rows but long in the table"):
        start(tmp_path, schema(pa.string()))


def test_a_table_whose_constraints_would_not_be_checked_is_refused(tmp_path: Path) -> None:
    start(tmp_path)
    DeltaTable(tmp_path / "table").alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(SinkError, match="constraints"):
        start(tmp_path)


def test_a_schema_that_changes_while_the_flow_runs_stops_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    original = DeltaTable.create_write_transaction

    def disturbed(table: DeltaTable, *args: Any, **more: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", original)
        DeltaTable(tmp_path / "table").alter.add_constraint({"positive": "id > 0"})
        original(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", disturbed)
    with pytest.raises(SinkError, match="constraints"):
        case.publish(1, 0, rows(1))
    assert ids(tmp_path) == []


# ---------------------------------------------------------------------- types and statistics


def test_partition_columns_of_every_kind_come_back(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("s", pa.string()),
            ("n", pa.int32()),
            ("f", pa.bool_()),
            ("d", pa.date32()),
            ("t", pa.timestamp("us", "UTC")),
            ("p", pa.decimal128(9, 2)),
        ]
    )
    filled = {
        "id": 1,
        "s": "a b/c%ü=?",
        "n": -3,
        "f": False,
        "d": date(2024, 2, 29),
        "t": datetime(2024, 1, 1, 1, 2, 3, 456_789, UTC),
        "p": Decimal("1.50"),  # deltalake itself cannot read back a negative one as a pyarrow dataset
    }
    empty = {**dict.fromkeys(filled), "id": 2}
    case = start(tmp_path, schema, partition_by=["s", "n", "f", "d", "t", "p"])
    case.publish(1, 0, [filled, empty])
    assert sorted(TestDelta().read_rows(tmp_path), key=lambda row: int(row["id"])) == [filled, empty]


def test_statistics_let_readers_find_every_row_they_ask_for(tmp_path: Path) -> None:
    case = start(tmp_path, RICH)
    case.publish(1, 0, [RICH_ROW], [{**RICH_ROW, "id": 2, "text": "z" * 50, "real": float("nan")}])
    questions = {
        "at >= '2024-02-29T23:59:59.999999Z'": [1, 2],
        "at > '2024-03-01T00:00:00Z'": [],
        # deltalake's own writer rounds such a bound to a double, and the row is not found.
        "price = cast('-1234567890123456.7891' as decimal(20, 4))": [1, 2],
        "day = '1969-07-20'": [1, 2],
        f"text = '{'z' * 50}'": [2],
        "small < -6": [1, 2],
        "id = 2": [2],
    }
    for question, wanted in questions.items():
        query = QueryBuilder().register("t", DeltaTable(tmp_path / "table"))
        found = pa.table(query.execute(f"select id from t where {question}"))
        assert sorted(found["id"].to_pylist()) == wanted, question
    table = DeltaTable(tmp_path / "table")
    assert len(table.file_uris(file_pruning_predicate="id = 2")) == 1
    assert table.count() == 2


def test_zoneless_timestamps_get_the_table_feature_they_need(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))])
    case = start(tmp_path, schema)
    row = {"id": 1, "at": datetime(2024, 1, 1, 0, 0, 0, 1)}  # noqa: DTZ001 (without a zone on purpose)
    case.publish(1, 0, [row])
    assert TestDelta().read_rows(tmp_path) == [row]
