"""A power cut tears a barrier for which nobody has acknowledged a cut: the flow continues as if it were not there."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.model.entries import BarrierEntry
from cutline.model.ids import OperatorId
from tests.support.killing import is_killed_at
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

MODES: list[dict[str, Any]] = [
    {"mode": "per-operator"},
    {"mode": "unaligned"},
    {"mode": "unaligned", "publish": "at_once"},
    {"mode": "unaligned", "publish": "at_once", "on_rollback": "keep"},
]


def killed_while_its_snapshots_wait(storage: Path, mode: dict[str, Any]) -> None:
    """Spark has not committed the batch of the cut, so no barrier was synced."""
    flow = SparklessFlow(storage, **mode)
    flow.emit(3)
    flow.checkpoint()
    flow.emit(2)
    flow.step(NUMBERS, commit=False)
    flow.wait(lambda: flow.step(TOTALS, commit=False))
    flow.request()
    for operator in flow.graph.names:
        flow.wait(lambda operator=operator: isinstance(flow.operators[operator].channel.entries()[-1], BarrierEntry))  # type: ignore[misc]
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("torn", [("numbers",), ("totals",), ("numbers", "totals")], ids="-".join)
def test_a_torn_barrier_that_nothing_rests_on_is_no_damage(
    tmp_path: Path, mode: dict[str, Any], torn: tuple[OperatorId, ...]
) -> None:
    assert is_killed_at("after-barrier#1000", partial(killed_while_its_snapshots_wait, tmp_path, mode))
    for operator in torn:
        folder = tmp_path / "storage/counting/channels" / operator / "g000001"
        max(path for path in folder.iterdir() if not path.name.startswith(".")).write_bytes(b"")
    for again in range(2):
        flow = SparklessFlow(tmp_path, **mode)
        try:
            assert flow.recovered.path == "resume"
            assert not flow.recovered.problems
            flow.emit(1)
            flow.drain()
            rows = flow.sink.rows()
        finally:
            flow.stop()
        assert rows == [[number, number + 1] for number in range(7 + again)]
