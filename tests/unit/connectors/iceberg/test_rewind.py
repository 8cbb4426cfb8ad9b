"""Rewinding an Iceberg table: what it does, how far it reaches, and what keeps it from reaching further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cutline
from cutline.connectors.iceberg.history import tagged
from cutline.connectors.iceberg.sink import Iceberg
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.testing.conformance.sinks import Case, rows
from tests.support import iceberg_others as others
from tests.support.sink_targets import IcebergTarget, iceberg, iceberg_table


def start(tmp_path: Path, points: tuple[int, ...] | None = None, **options: Any) -> Case:
    sink = iceberg(tmp_path, **options)
    context = IcebergTarget().context()
    sink.open(context)
    return Case(sink=sink, context=context, rewind_points=None if points is None else tuple(map(Epoch, points)))


def ids(tmp_path: Path) -> list[int]:
    return IcebergTarget().ids(tmp_path)


def sink_of(case: Case) -> Iceberg:
    assert isinstance(case.sink, Iceberg)
    return case.sink


def tags(tmp_path: Path) -> list[tuple[int, int]]:
    return [(state.since, state.until) for state in tagged(iceberg_table(tmp_path).metadata, "orders", "totals-out")]


def test_a_rewind_is_a_new_snapshot_on_top_of_the_one_it_restores(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 1, rows(1))
    first = others.head(tmp_path)
    for epoch in (2, 3):
        case.publish(epoch, epoch, rows(epoch))
    case.sink.rewind(Epoch(1))
    table = iceberg_table(tmp_path)
    newest = table.current_snapshot()
    assert newest is not None
    assert newest.summary is not None
    # As after a rollback: expiry and incremental readers do not take the rewound snapshots for a part of the history.
    assert newest.parent_snapshot_id == first
    assert newest.snapshot_id != first
    assert newest.summary["total-records"] == "1"
    # They still exist, for whom has begun to read them.
    assert len(table.snapshots()) == 4


def test_a_rewind_is_refused_if_another_writer_changed_rows_since(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    others.append(tmp_path, 100)
    case.publish(3, 3, rows(3))
    case.publish(4, 4, rows(4))
    assert sink_of(case).oldest_rewind() == 2
    with pytest.raises(SinkError, match="another writer changed the table since"):
        case.sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1, 2, 3, 4, 100]
    case.sink.rewind(Epoch(2))
    assert ids(tmp_path) == [1, 2, 100]
    others.append(tmp_path, 101)
    assert sink_of(case).oldest_rewind() == 2
    with pytest.raises(SinkError, match="another writer"):
        case.sink.rewind(NO_EPOCH)


def test_a_compaction_since_does_not_matter(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    others.compact(tmp_path)
    case.publish(3, 3, rows(3))
    assert sink_of(case).oldest_rewind() == NO_EPOCH
    case.sink.rewind(Epoch(2))
    assert ids(tmp_path) == [1, 2]
    case.sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1]


def test_a_claim_by_another_flow_is_no_change(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    other = iceberg(tmp_path)
    other.open(IcebergTarget().context(flow="strangers"))
    other.claim("history", expected="")
    case.sink.rewind(Epoch(1))
    assert ids(tmp_path) == [1]
    assert other.claimed().endswith(" history")


def test_what_has_expired_cannot_be_rewound_and_is_told_before(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in range(1, 6):
        case.publish(epoch, epoch, rows(epoch))
    assert (sink_of(case).oldest_rewind(), sink_of(case).rewind_gaps()) == (NO_EPOCH, ())
    others.expire_all(tmp_path)
    assert (sink_of(case).oldest_rewind(), sink_of(case).rewind_gaps()) == (5, ())
    with pytest.raises(SinkError, match="epoch 5 at the earliest"):
        case.sink.rewind(Epoch(3))
    case.publish(6, 6, rows(6))
    case.publish(7, 7, rows(7))
    assert sink_of(case).oldest_rewind() == 5
    with pytest.raises(SinkError, match="expire fewer snapshots"):
        case.sink.rewind(NO_EPOCH)
    assert ids(tmp_path) == list(range(1, 8))
    case.sink.rewind(Epoch(5))
    assert ids(tmp_path) == list(range(1, 6))


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": ["id"]}])
def test_what_a_restore_may_need_does_not_expire(tmp_path: Path, options: dict[str, Any]) -> None:
    case = start(tmp_path, (2, 5), **options)
    for epoch in range(1, 9):
        case.publish(epoch, epoch, rows(epoch, 1000))
    assert tags(tmp_path) == [(5, 5), (2, 2)]
    others.expire_all(tmp_path)
    assert sink_of(case).oldest_rewind() == 2
    assert sink_of(case).rewind_gaps() == ((3, 5), (6, 8))
    for epoch in (3, 4, 6, 7):
        with pytest.raises(SinkError, match="keeps no state between"):
            case.sink.rewind(Epoch(epoch))
    with pytest.raises(SinkError, match="epoch 2 at the earliest"):
        case.sink.rewind(Epoch(1))
    assert cutline.read(iceberg(tmp_path, **options), as_of=5).epoch == 5
    case.sink.rewind(Epoch(5))
    assert sorted(set(ids(tmp_path))) == [1, 2, 3, 4, 5, 1000]
    # The restored state is the present one; what is not needed any more may expire.
    assert tags(tmp_path) == [(2, 2)]
    case.rewind_points = (Epoch(5),)
    case.previous = Epoch(5)
    case.publish(12, 12, rows(12))
    assert tags(tmp_path) == [(5, 11)]
    others.expire_all(tmp_path)
    case.sink.rewind(Epoch(9))
    assert sorted(set(ids(tmp_path))) == [1, 2, 3, 4, 5, 1000]


def test_tags_before_another_writers_change_are_of_no_use_and_removed(tmp_path: Path) -> None:
    case = start(tmp_path, (1, 2, 3))
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    others.append(tmp_path, 100)
    assert tags(tmp_path) == [(1, 1)]
    assert sink_of(case).oldest_rewind() == 2
    case.publish(3, 3, rows(3))
    assert tags(tmp_path) == [(2, 2)]
    others.expire_all(tmp_path)
    case.publish(4, 4, rows(4))
    assert tags(tmp_path) == [(3, 3), (2, 2)]
    case.sink.rewind(Epoch(2))
    assert ids(tmp_path) == [1, 2, 100]


def test_when_it_is_not_known_whether_others_changed_rows_older_tags_go(tmp_path: Path) -> None:
    case = start(tmp_path, (1, 2, 3))
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    others.append(tmp_path, 100)
    others.compact(tmp_path)
    others.expire_all(tmp_path)  # what is left says that files were compacted, and nothing of the rows that were added
    case.publish(3, 3, rows(3))
    assert tags(tmp_path) == [(2, 2)]
    with pytest.raises(SinkError):
        case.sink.rewind(Epoch(1))
    case.sink.rewind(Epoch(2))
    assert ids(tmp_path) == [1, 2, 100]


def test_files_that_someone_deleted_are_noticed_before_anything_changes(tmp_path: Path) -> None:
    case = start(tmp_path, mode="upsert", key=["id"])
    case.publish(1, 1, rows(1))
    lost = next((tmp_path / "warehouse").rglob("*.parquet"))
    case.publish(2, 2, rows(1))
    lost.unlink()
    with pytest.raises(SinkError, match="were deleted"):
        case.sink.rewind(Epoch(1))
    assert sink_of(case).published() == 2


def test_the_columns_of_a_table_stay_when_it_is_rewound(tmp_path: Path) -> None:
    from pyiceberg.types import LongType

    case = start(tmp_path)
    for epoch in (1, 2):
        case.publish(epoch, epoch, rows(epoch))
    with iceberg_table(tmp_path).update_schema() as change:
        change.add_column("more", LongType())
    case.sink.rewind(Epoch(1))
    assert IcebergTarget().read_rows(tmp_path) == [{"id": 1, "name": "row 1", "more": None}]
    assert cutline.read(iceberg(tmp_path)).to_arrow().to_pylist() == [{"id": 1, "name": "row 1", "more": None}]
