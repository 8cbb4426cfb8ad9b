"""Which snapshots show which epochs, as pure decisions on a table's metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.table.metadata import TableMetadata

from cutline.connectors.iceberg.history import Past, State, past_of, tag_name, tagged, walk
from cutline.connectors.iceberg.ledger import Mark, stored_mark
from cutline.errors import DamagedRecordError
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.testing.conformance.sinks import Case, rows
from tests.support.sink_targets import IcebergTarget, iceberg, iceberg_table


def state(since: int, until: int, snapshot: int = 1) -> State:
    return State(since=Epoch(since), until=Epoch(until), snapshot_id=snapshot)


def test_the_epochs_of_states_and_the_gaps_between_them() -> None:
    past = Past(states=(state(7, 8), state(3, 3), state(0, 1)))
    assert [past.at(Epoch(epoch)) is not None for epoch in range(10)] == [
        True, True, False, True, False, False, False, True, True, False,
    ]  # fmt: skip
    assert past.oldest(Epoch(9)) == 0
    assert past.gaps(Epoch(9)) == ((2, 3), (4, 7))
    assert past.gaps(Epoch(11)) == ((2, 3), (4, 7), (9, 11))
    assert (Past(states=()).oldest(Epoch(4)), Past(states=()).gaps(Epoch(4))) == (4, ())


def metadata_with(tmp_path: Path, marks: list[Mark | str]) -> TableMetadata:
    """A table with these marks in its snapshots, whatever its sink has written there."""
    sink, context = iceberg(tmp_path), IcebergTarget().context()
    sink.open(context)
    case = Case(sink=sink, context=context)
    for epoch in range(1, len(marks) + 1):
        case.publish(epoch, epoch, rows(epoch))
    metadata = iceberg_table(tmp_path).metadata
    for snapshot, mark in zip(metadata.snapshots, marks, strict=True):
        assert snapshot.summary is not None
        snapshot.summary["cutline"] = mark if isinstance(mark, str) else stored_mark(mark)["cutline"]
    return metadata


def mark(on: int, before: int, after: int) -> Mark:
    return Mark(
        flow=FlowName("orders"),
        sink=SinkId("totals-out"),
        kind="publish",
        before=Epoch(before),
        after=Epoch(after),
        on=on,
    )


def test_marks_that_name_one_another_in_a_circle_end_the_walk(tmp_path: Path) -> None:
    metadata = metadata_with(tmp_path, ["{}", "{}"])
    first, second = (snapshot.snapshot_id for snapshot in metadata.snapshots)
    for snapshot, on in zip(metadata.snapshots, (second, first), strict=True):
        assert snapshot.summary is not None
        snapshot.summary["cutline"] = stored_mark(mark(on, 1, 2))["cutline"]
    assert len(list(walk(metadata, "orders", "totals-out"))) == 2
    assert len(past_of(metadata, "orders", "totals-out").states) == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"flow": "../x"}', "\x00", '{"flow":"a","sink":"b","kind":"drop"}'])
def test_a_mark_that_cutline_has_not_written_is_named(tmp_path: Path, text: str) -> None:
    metadata = metadata_with(tmp_path, [text])
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        list(walk(metadata, "orders", "totals-out"))


def test_tags_of_others_are_not_taken_for_ours(tmp_path: Path) -> None:
    sink, context = iceberg(tmp_path), IcebergTarget().context()
    sink.open(context)
    Case(sink=sink, context=context).publish(1, 1, rows(1))
    table = iceberg_table(tmp_path)
    newest = table.metadata.current_snapshot_id
    assert newest is not None
    own = tag_name("orders", "totals-out", state(3, 5))
    with table.manage_snapshots() as change:
        for name in (own, "v1", "cutline/orders/other/3-5", own + "x", f"{own}/6", "cutline/orders/totals-out/a-b"):
            change.create_tag(newest, name)
    assert tagged(iceberg_table(tmp_path).metadata, "orders", "totals-out") == [state(3, 5, newest)]
