"""What the demo says at its end."""

from __future__ import annotations

import pytest
from rich.console import Console

from cutline.cli.trying.demo import _verdict

REPORT = {
    "rows_in": 5,
    "ledger_rows": 5,
    "rows_counted": 5,
    "lost": 0,
    "duplicated": 0,
    "checkpoints_completed": 3,
    "checkpoint_ms": {"p50": 12},
    "recoveries": [],
    "ok": True,
}


@pytest.mark.parametrize("kills", [0, 1])
def test_kills_are_told_only_if_there_were_some(kills: int) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        _verdict(console, {**REPORT, "kills": kills})
    told = captured.get()
    assert "Every payment was published exactly once." in told
    assert ("what a run without kills publishes." in " ".join(told.split())) == bool(kills)
    assert ("were killed" in told) == bool(kills)
