"""The Iceberg sink: the suite, and what is special about a table that others use too."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, NestedField, StringType

import cutline
from cutline.connectors.iceberg import commits
from cutline.connectors.iceberg.file_io import folder_of
from cutline.connectors.iceberg.sink import Iceberg
from cutline.errors import ConfigError, DamagedRecordError, FencedError, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkBehaviour, rows
from tests.support import iceberg_others as others
from tests.support.sink_targets import IcebergTarget, iceberg, iceberg_table


class TestIceberg(IcebergTarget, SinkBehaviour):
    pass


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, **options: Any) -> Case:
    sink = iceberg(tmp_path, **options)
    context = TestIceberg().context(schema)
    sink.open(context)
    return Case(sink=sink, context=context)


def ids(tmp_path: Path) -> list[int]:
    return TestIceberg().ids(tmp_path)


def catalog(tmp_path: Path) -> SqlCatalog:
    return SqlCatalog("default", uri=f"sqlite:///{tmp_path}/catalog.sqlite", warehouse=str(tmp_path / "warehouse"))


def data_files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "warehouse").rglob("*.parquet")}


def names(*staged: Any) -> set[str]:
    return {Path(piece["path"]).name for batch in staged for piece in batch.pieces}


def during_the_next_commit(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Something happens when the snapshot is written and the catalog is not told yet."""
    original = commits.commit_draft

    def disturbed(*given: Any) -> None:
        monkeypatch.setattr("cutline.connectors.iceberg.table.commit_draft", original)
        action()
        original(*given)

    monkeypatch.setattr("cutline.connectors.iceberg.table.commit_draft", disturbed)


# ---------------------------------------------------------------------- sharing


def test_a_reader_polling_during_commits_never_sees_half_an_epoch(tmp_path: Path) -> None:
    case = start(tmp_path)
    seen: list[Counter[int]] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            seen.append(Counter(number // 10 for number in ids(tmp_path)))

    thread = threading.Thread(target=poll)
    thread.start()
    for epoch in range(1, 16):
        case.publish(
            epoch, epoch, rows(*range(10 * epoch, 10 * epoch + 5)), rows(*range(10 * epoch + 5, 10 * epoch + 10))
        )
    is_over.set()
    thread.join()
    for look in seen:
        assert set(look.values()) <= {10}, look
        assert sorted(look) == list(range(1, len(look) + 1))


def test_commits_of_others_are_kept_and_do_not_disturb(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    others.append(tmp_path, 100)
    case.publish(2, 1, rows(2))
    others.append(tmp_path, 101)
    assert ids(tmp_path) == [1, 2, 100, 101]
    assert case.sink.published() == 2


def test_a_foreign_commit_during_ours_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    during_the_next_commit(monkeypatch, lambda: others.append(tmp_path, 100))
    case.publish(2, 1, rows(2))
    assert ids(tmp_path) == [1, 2, 100]
    # The lost race has left no files of its snapshot: one list for each snapshot, one manifest for each of three.
    assert len(list((tmp_path / "warehouse").rglob("*.avro"))) == 6


def test_a_compaction_during_our_commit_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    compacted: list[int] = []
    during_the_next_commit(monkeypatch, lambda: compacted.append(others.compact(tmp_path)))
    case.publish(3, 3, rows(3))
    assert compacted == [2]
    assert ids(tmp_path) == [1, 2, 3]
    case.sink.rewind(Epoch(1))  # the same rows in other files are no change
    assert ids(tmp_path) == [1]


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
    assert len(iceberg_table(tmp_path).snapshots()) == 1


# ---------------------------------------------------------------------- failing commits


@pytest.mark.parametrize("error", [OSError("the connection broke"), CommitStateUnknownException("504")])
def test_a_commit_whose_answer_is_lost_is_found_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    case = start(tmp_path)
    original = SqlCatalog.commit_table

    def silent(*given: Any) -> None:
        original(*given)
        raise error

    monkeypatch.setattr(SqlCatalog, "commit_table", silent)
    sink = case.sink
    assert isinstance(sink, Iceberg)
    sink.claim("first", expected="")
    assert sink.claimed().endswith(" first")
    case.publish(1, 0, rows(1))
    case.publish(2, 1, rows(2))
    assert ids(tmp_path) == [1, 2]
    sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1]
    # One snapshot for each: the claim, two epochs, the rewind.
    assert len(iceberg_table(tmp_path).snapshots()) == 4


def test_a_commit_is_tried_again_and_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    original, failures = SqlCatalog.commit_table, [OSError("no route")] * 100

    def failing(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*given)

    monkeypatch.setattr(SqlCatalog, "commit_table", failing)
    monkeypatch.setattr("cutline.base.retry.time.sleep", lambda _: None)
    permit = case.permit(1, [staged])
    with pytest.raises(NotDone, match="no route"):
        case.sink.commit(permit, [staged], {})
    assert len(failures) == 90
    assert ids(tmp_path) == []
    del failures[:-3]
    case.sink.commit(permit, [staged], {})
    assert ids(tmp_path) == [1]


def test_a_rewind_in_the_middle_of_a_commit_fences_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the rewind restores exactly the snapshot on top of which the commit was computed."""
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    late = case.stage(2, rows(2))
    permit = case.permit(3, [late])

    def rewound() -> None:
        other = start(tmp_path)
        other.previous, other.through = case.previous, case.through
        other.publish(4, 2, rows(4))
        other.sink.rewind(Epoch(1))

    during_the_next_commit(monkeypatch, rewound)
    with pytest.raises(FencedError):
        case.sink.commit(permit, [late], {})
    assert ids(tmp_path) == [1]


def test_a_staged_file_that_was_removed_as_an_orphan_is_not_published(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    next((tmp_path / "warehouse").rglob("*.parquet")).unlink()
    with pytest.raises(SinkError, match="gone"):
        case.sink.prepare(Epoch(1), [staged])
    with pytest.raises(SinkError, match="gone"):
        case.sink.commit(case.permit(1, [staged]), [staged], {})
    assert ids(tmp_path) == []


def test_abort_deletes_staged_files_but_none_that_a_snapshot_names(tmp_path: Path) -> None:
    case = start(tmp_path)
    published, rewound, aborted = case.stage(1, rows(1)), case.stage(2, rows(2)), case.stage(3, rows(3))
    case.commit(1, published)
    case.commit(2, rewound)
    case.sink.rewind(Epoch(1))
    case.sink.abort([published, rewound, aborted])
    assert data_files(tmp_path) == names(published, rewound)


def test_abort_keeps_what_is_published_when_its_snapshot_has_expired(tmp_path: Path) -> None:
    case = start(tmp_path)
    first, second = case.stage(1, rows(1)), case.stage(2, rows(2))
    case.commit(1, first)
    case.commit(2, second)
    others.expire_all(tmp_path)
    case.sink.abort([first, second])
    assert ids(tmp_path) == [1, 2]


# ---------------------------------------------------------------------- a table that was changed by hand


def test_a_table_that_was_set_back_by_hand_is_noticed(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    earlier = others.head(tmp_path)
    for epoch in (2, 3):
        case.publish(epoch, epoch, rows(epoch))
    others.roll_back(tmp_path, earlier)
    staged = case.stage(4, rows(4))
    with pytest.raises(SinkError, match="set the table back from epoch 3 to epoch 1"):
        case.sink.commit(case.permit(4, [staged]), [staged], {})
    # A start is told what readers see, and the flow refuses: it has published more.
    again = start(tmp_path)
    assert (again.sink.published(), again.sink.highest()) == (1, 3)
    assert cutline.read(iceberg(tmp_path)).epoch == 1
    again.previous = Epoch(1)
    with pytest.raises(FencedError):
        again.publish(3, 5, rows(3))
    again.publish(5, 6, rows(5))
    assert ids(tmp_path) == [1, 5]
    assert (again.sink.published(), again.sink.highest()) == (5, 5)
    others.append(tmp_path, 100)
    others.roll_back(tmp_path, earlier)
    others.append(tmp_path, 101)  # newer than the sink's newest snapshot, and yet not on top of it
    assert start(tmp_path).sink.published() == 1


def test_a_ledger_that_was_removed_is_noticed(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    with iceberg_table(tmp_path).transaction() as change:
        change.remove_properties("cutline/orders/totals-out")
    with pytest.raises(DamagedRecordError, match="ledger is gone"):
        start(tmp_path)
    with iceberg_table(tmp_path).transaction() as change:
        change.set_properties({"cutline/orders/totals-out": "something else"})
    with pytest.raises(DamagedRecordError):
        case.sink.published()


def test_a_table_that_was_dropped_is_named(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(1, rows(1))
    catalog(tmp_path).drop_table("shop.totals")
    with pytest.raises(SinkError, match="not in the catalog"):
        case.sink.commit(case.permit(1, [staged]), [staged], {})


# ---------------------------------------------------------------------- what a table may look like


def test_schema_changes_while_the_flow_runs_are_survived(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    staged = case.stage(2, rows(2))
    with iceberg_table(tmp_path).update_schema() as change:
        change.add_column("more", LongType())
        change.rename_column("name", "title")
    case.commit(2, staged)
    case.publish(3, 3, rows(3))
    found = TestIceberg().read_rows(tmp_path)
    assert sorted((row["id"], row["title"], row["more"]) for row in found) == [
        (number, f"row {number}", None) for number in (1, 2, 3)
    ]
    with iceberg_table(tmp_path).update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("title")
    with pytest.raises(SinkError, match="name is no longer in the table"):
        case.publish(4, 4, rows(4))
    with pytest.raises(SinkError, match=r"name \(string\) is not in the table"):
        start(tmp_path)


def test_other_partitions_while_the_flow_runs_are_survived(tmp_path: Path) -> None:
    case = start(tmp_path, partition_by=["name"])
    staged = case.stage(1, rows(1, 2))
    with iceberg_table(tmp_path).update_spec() as change:
        change.remove_field("name")
    case.commit(1, staged)
    assert ids(tmp_path) == [1, 2]
    with pytest.raises(SinkError, match="partitioned by nothing"):
        start(tmp_path, partition_by=["name"])
    again = start(tmp_path)
    again.previous, again.through = case.previous, case.through
    again.publish(2, 2, rows(3))
    assert ids(tmp_path) == [1, 2, 3]


def test_an_existing_table_with_a_further_column_and_wider_types_is_fine(tmp_path: Path) -> None:
    start(tmp_path, pa.schema([("id", pa.int64()), ("name", pa.string()), ("more", pa.float64())]))
    narrow = pa.schema([pa.field("id", pa.int32()), pa.field("name", pa.string()), pa.field("more", pa.float32())])
    case = start(tmp_path, narrow)
    case.publish(1, 0, [{"id": 1, "name": "row 1", "more": 0.5}])
    case = start(tmp_path)
    case.previous, case.through = Epoch(1), case.through
    case.publish(2, 1, rows(2))
    assert ids(tmp_path) == [1, 2]


def test_tables_that_the_sink_cannot_write_are_refused(tmp_path: Path) -> None:
    start(tmp_path, partition_by=["name"])
    with pytest.raises(SinkError, match="partitioned by"):
        start(tmp_path)
    schema = Schema(NestedField(1, "id", LongType(), required=True), NestedField(2, "name", StringType()))
    bucket = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"))
    tables = catalog(tmp_path)
    tables.create_table("shop.old", schema, properties={"format-version": "1"})
    tables.create_table("shop.required", schema)
    tables.create_table("shop.bucket", schema, partition_spec=bucket)
    for table, match in (
        ("shop.old", "format version 1"),
        ("shop.required", "id may be null in the rows"),
        ("shop.bucket", "bucket, days"),
    ):
        with pytest.raises(SinkError, match=match):
            iceberg(tmp_path, table).open(TestIceberg().context())
    promised = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    iceberg(tmp_path, "shop.required").open(TestIceberg().context(promised))


def test_where_a_table_cannot_be_created_the_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not know where"):
        Iceberg(f"sqlite:///{tmp_path}/c.sqlite", "a.b").open(TestIceberg().context())
    with pytest.raises(SinkError, match="mounted file system"):
        Iceberg(f"sqlite:///{tmp_path}/d.sqlite", "a.b", warehouse="s3://bucket/x")
    with pytest.raises(SinkError, match="mounted file system"):
        folder_of("s3://bucket/x/totals")


def test_pyiceberg_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.iceberg.catalog.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pyiceberg"):
        iceberg(tmp_path)


def test_a_rewind_to_nothing_in_a_table_that_was_there_keeps_its_rows(tmp_path: Path) -> None:
    start(tmp_path)
    others.append(tmp_path, 100)
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    case.sink.rewind(NO_EPOCH)
    assert ids(tmp_path) == [100]


def test_many_small_manifests_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "MANIFESTS_TO_MERGE", 4)
    case = start(tmp_path)
    for epoch in range(1, 12):
        case.publish(epoch, epoch, rows(epoch))
        newest = iceberg_table(tmp_path).current_snapshot()
        assert newest is not None
        assert len(newest.manifests(iceberg_table(tmp_path).io)) < 4
    assert ids(tmp_path) == list(range(1, 12))
    assert cutline.read(iceberg(tmp_path), after=7).to_arrow()["id"].to_pylist() == [8, 9, 10, 11]
    case.sink.rewind(Epoch(5))
    assert ids(tmp_path) == list(range(1, 6))


def test_old_metadata_files_do_not_pile_up(tmp_path: Path) -> None:
    case = start(tmp_path)
    with iceberg_table(tmp_path).transaction() as change:
        change.set_properties({"write.metadata.previous-versions-max": "3"})
    for epoch in range(1, 9):
        case.publish(epoch, epoch, rows(epoch))
    assert len(list((tmp_path / "warehouse").rglob("*.metadata.json"))) <= 5
    assert ids(tmp_path) == list(range(1, 9))
