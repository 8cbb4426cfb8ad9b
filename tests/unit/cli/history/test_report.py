"""What a person reads of a restore before it happens."""

from __future__ import annotations

from typing import Any

import msgspec

from cutline.cli.history.report import RestoreReport, SinkReport, lines_of
from cutline.model.ids import Epoch, OperatorId, SinkId

SINK = SinkReport(
    sink=SinkId("table"),
    operator=OperatorId("totals"),
    fate="rewind",
    published=Epoch(20),
    oldest_rewind=Epoch(0),
    epochs=9,
    rows=90,
    unmeasured=0,
)
REPORT = RestoreReport(
    flow="sales",
    to="11",
    epoch=Epoch(11),
    completed="",
    completed_ms=1,
    age_ms=1,
    code="",
    size_bytes=1,
    is_running=False,
    would_refuse=False,
    given_up=[Epoch(one) for one in range(12, 25)],
    sinks=[SINK],
    sources=[],
    estimate=None,
    is_compared_with_code=False,
    notes=[],
)


def lines(**changes: Any) -> list[str]:
    return list(lines_of(msgspec.structs.replace(REPORT, **changes)))


def test_epochs_without_rows_for_a_sink_are_told() -> None:
    told = next(line for line in lines() if line.startswith("sink table"))
    assert "rewound from epoch 20 to 11: 9 epochs, 90 rows withdrawn" in told
    assert "; no rows of epoch 21 to 24 were published to it" in told
    told = next(line for line in lines(given_up=[Epoch(12), Epoch(20)]) if line.startswith("sink table"))
    assert "no rows of" not in told


def test_a_refusal_comes_first() -> None:
    told = lines(would_refuse=True, why="it is gone", next_step="choose another")
    assert told[:2] == ["the start would refuse: it is gone", "Next: choose another"]
    assert not any("would restore" in line or line.startswith("given up") for line in told)
