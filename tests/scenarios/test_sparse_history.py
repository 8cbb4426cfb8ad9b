"""A history that retention has thinned out is whole: its gaps are no losses, whatever joins the flow or is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.changing import changing
from tests.support.running import assert_each_once, running
from tests.support.sparkless import FolderSink, SparklessFlow

#: Of the checkpoints that are older than a moment, one in each second stays.
SPARSE: dict[str, Any] = {"retain": "50ms, 1h/1s", "retain_checkpoints": 2}


class WithCopy(SparklessFlow):
    """The same flow with a second sink."""

    def sinks(self, storage: Path) -> dict[str, Any]:
        return {"table": self.sink, "copy": FolderSink(storage / "copy")}


def has_gaps(epochs: Sequence[int]) -> bool:
    return sum(later > earlier + 1 for earlier, later in itertools.pairwise(epochs)) >= 2


def life(storage: Path, *, has_rows: bool = True, **options: Any) -> list[int]:
    """Runs until its history has gaps; the epochs that are left."""
    with running(storage, **{**SPARSE, **options}) as flow:
        flow.emit(2)
        while not has_gaps(flow.checkpoints.epochs()):
            if has_rows:
                flow.emit(1)
            flow.drain()
            flow.checkpoint()
            flow.wait(flow.coordinator.is_settled)
    return list(flow.checkpoints.epochs())


@pytest.mark.parametrize("on_rollback", ["rewind", "keep", "fail"])
def test_a_sink_that_is_added_finds_the_flow_where_it_was(tmp_path: Path, on_rollback: str) -> None:
    left = life(tmp_path, on_rollback=on_rollback)
    with running(tmp_path, kind=WithCopy, on_rollback=on_rollback, **SPARSE) as flow:
        assert (flow.recovered.path, flow.recovered.problems) == ("resume", [])
        assert [one.epoch for one in flow.recovered.manifests] == left
        before = len(flow.sink.rows())
        flow.emit(3)
        flow.drain()
        assert len(flow.sink.rows()) == before + 3
        assert_each_once(flow.sink.rows())


def test_a_sink_without_rows_does_not_lose_the_history_with_the_coordinators_records(tmp_path: Path) -> None:
    left = life(tmp_path, has_rows=False)
    for path in (tmp_path / "storage" / "counting").glob("coordinator.sqlite*"):
        path.unlink()
    with running(tmp_path, **SPARSE) as flow:
        assert (flow.recovered.path, flow.recovered.problems) == ("resume", [])
        assert [one.epoch for one in flow.recovered.manifests] == left
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_an_operator_that_is_added_with_its_sink_finds_the_flow_where_it_was(tmp_path: Path) -> None:
    with changing(tmp_path, {"numbers": (), "totals": ("numbers",)}, {"table": "totals"}, **SPARSE) as flow:
        left: list[int] = []
        while not has_gaps(left):
            flow.emit(1)
            flow.settle()
            left = list(flow.checkpoints.epochs())
        rows = len(flow.table("table"))
    edges = {"numbers": (), "totals": ("numbers",), "copy": ("numbers",)}
    with changing(tmp_path, edges, {"table": "totals", "copies": "copy"}, restore_to=left[-1], **SPARSE) as flow:
        assert flow.recovered.restored_epoch == left[-1]
        flow.emit(2)
        flow.settle()
        assert len(flow.table("table")) == rows + 2
