"""What must not be left behind for ever when a channel's rows lie in an object store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutline.errors import NotDone
from cutline.model.ids import BatchId, FlowName, Generation, OperatorId
from cutline.ports.engine import SegmentPlace, StageJob
from cutline.spark.executor_staging import _stage_task
from tests.support.changing import changing
from tests.support.remote import Faults


def test_a_task_that_fails_leaves_no_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    schema = pa.schema([("number", pa.int64())])
    job = StageJob(
        flow=FlowName("counting"),
        operator=OperatorId("numbers"),
        generation=Generation(1),
        batch=BatchId(0),
        schema_ipc=schema.serialize().to_pybytes(),
        segments=SegmentPlace(url=(tmp_path / "bucket").as_uri()),
        stagers={},
    )

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"number": list(range(100_000))}, schema=schema)
        raise RuntimeError("the query was stopped")

    with pytest.raises(RuntimeError):
        _stage_task(job, rows())
    assert not list(tmp_path.glob("cutline-segment-*"))


def test_rows_of_dropped_operators_go_in_the_end_even_if_the_store_was_away_once(tmp_path: Path) -> None:
    both, one = (
        {"numbers": (), "totals": ("numbers",), "others": (), "copy": ("others",)},
        {"numbers": (), "totals": ("numbers",)},
    )
    settings: dict[str, Any] = {"channel_store": (tmp_path / "a").as_uri(), "retain_checkpoints": 1}
    with changing(tmp_path, both, {"table": "totals", "copies": "copy"}, **settings) as flow:
        flow.emit(3)
        epoch = flow.checkpoint()
        others = flow.layout.channel(OperatorId("others"))
    faults = Faults()
    with (
        faults.injected("cutline.channels.segment_store.open_store"),
        changing(tmp_path, one, {"table": "totals"}, restore_to=epoch, allow_dropped=True, **settings) as flow,
    ):
        faults.failing = lambda operation, path: NotDone("away") if operation in ("walk", "delete") else None
        for _ in range(3):
            flow.checkpoint()
        assert others.exists()
    with changing(tmp_path, one, {"table": "totals"}, **settings) as flow:
        for _ in range(3):
            flow.checkpoint()
    assert not list((tmp_path / "a").rglob("others/*.arrow"))
