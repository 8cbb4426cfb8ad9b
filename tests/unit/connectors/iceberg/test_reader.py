"""Reading an Iceberg table by epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import cutline
from cutline.errors import RewoundError, SinkError
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.testing.conformance.sinks import RICH, RICH_ROW, Case, rows
from tests.support import iceberg_others as others
from tests.support.sink_targets import IcebergTarget, iceberg


def start(tmp_path: Path, flow: str = "orders", sink: str = "totals-out") -> Case:
    one = iceberg(tmp_path)
    context = msgspec.structs.replace(IcebergTarget().context(), flow=FlowName(flow), sink=SinkId(sink))
    one.open(context)
    return Case(sink=one, context=context)


def ids(tmp_path: Path, **request: Any) -> list[int]:
    return sorted(cutline.read(iceberg(tmp_path), **request).to_arrow()["id"].to_pylist())


def test_two_flows_in_one_table_must_be_told_apart(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path, "returns", "back")
    first.publish(4, 0, rows(1))
    second.publish(7, 0, rows(2))
    first.publish(5, 1, rows(3))
    with pytest.raises(SinkError, match="orders/totals-out, returns/back"):
        cutline.read(iceberg(tmp_path))
    both = cutline.read(iceberg(tmp_path), flow="returns")
    assert (both.epoch, sorted(both.to_arrow()["id"].to_pylist())) == (7, [1, 2, 3])
    new = cutline.read(iceberg(tmp_path), flow="orders", name="totals-out", after=4)
    assert (new.epoch, new.to_arrow()["id"].to_pylist()) == (5, [3])
    with pytest.raises(SinkError, match="no such sink"):
        cutline.read(iceberg(tmp_path), flow="nobody")


def test_rows_that_others_add_are_not_new_epochs(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    others.append(tmp_path, 50)
    case.publish(2, 1, rows(2))
    others.compact(tmp_path)
    assert ids(tmp_path, after=1) == [2]
    assert ids(tmp_path, as_of=1) == [1, 50]
    assert ids(tmp_path) == [1, 2, 50]
    others.expire_all(tmp_path)
    requests: list[dict[str, Any]] = [{"after": 1}, {"as_of": 1}]
    for request in requests:
        with pytest.raises(SinkError, match="have expired"):
            cutline.read(iceberg(tmp_path), **request)
    assert (cutline.read(iceberg(tmp_path)).epoch, ids(tmp_path)) == (2, [1, 2, 50])
    assert ids(tmp_path, after=2) == []


def test_a_result_does_not_change_while_the_flow_publishes(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    found = cutline.read(iceberg(tmp_path))
    case.publish(2, 1, rows(2))
    case.sink.rewind(Epoch(1))
    assert found.to_arrow()["id"].to_pylist() == [1]


def test_who_has_read_rewound_rows_is_told(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    case.sink.rewind(Epoch(1))
    with pytest.raises(RewoundError) as told:
        cutline.read(iceberg(tmp_path), after=3)
    assert told.value.still == 1
    with pytest.raises(SinkError, match="is not published here"):
        cutline.read(iceberg(tmp_path), after=9)


def test_a_table_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="no flow has published anything there"):
        cutline.read(iceberg(tmp_path))


def test_every_type_comes_back_as_it_went(tmp_path: Path) -> None:
    one = iceberg(tmp_path, partition_by=["day"])
    context = IcebergTarget().context(RICH)
    one.open(context)
    rich = [RICH_ROW, {**dict.fromkeys(RICH_ROW), "id": 2}]
    Case(sink=one, context=context).publish(1, 0, rich)
    found = cutline.read(iceberg(tmp_path)).to_arrow().to_pylist()
    assert sorted(found, key=lambda row: int(row["id"])) == rich
