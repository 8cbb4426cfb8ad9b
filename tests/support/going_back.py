"""Twenty minutes of checkpoints by a clock that the test moves, and a restore to one of fifteen minutes ago."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cutline.base import clock
from cutline.base.clock import now_ms
from cutline.config.options import WEEK
from cutline.config.values import Ladder
from cutline.model.ids import Epoch
from cutline.ports.sinks import Sink
from cutline.storage.local import LocalStore
from tests.support.torture_flow import (
    EVENTS,
    ROWS_PER_BATCH,
    Row,
    TortureFlow,
    all_rows,
    layout_of,
    newest_rows,
    rows_at_epochs,
    with_totals,
)

INTERVAL_MS = 15_000
MINUTE_MS = 60_000
HISTORY: dict[str, Any] = {"retain": Ladder().show(WEEK), "retain_checkpoints": 2}

MakeSinks = Callable[[], Mapping[str, Sink]]
#: The rows of ``events`` and of ``latest``.
ReadTables = Callable[[], tuple[list[Row], list[Row]]]


def let_time_pass(monkeypatch: pytest.MonkeyPatch, passed_ms: int) -> None:
    monkeypatch.setattr(clock, "_STARTED_WALL_NS", clock._STARTED_WALL_NS + passed_ms * 1_000_000)


def run_for(flow: TortureFlow, minutes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began_ms = now_ms()
    for number in range(1, minutes * MINUTE_MS // INTERVAL_MS + 1):
        # The time that a step really took counts as part of the interval: a slow machine changes nothing.
        let_time_pass(monkeypatch, max(1, began_ms + number * INTERVAL_MS - now_ms()))
        flow.step(EVENTS)
        flow.drain()


def age_of(flow_folder: Path, epoch: int) -> int:
    manifest = LocalStore.reading(layout_of(flow_folder)).checkpoints.load_manifest(Epoch(epoch))
    return now_ms() - manifest.completed_ms


def assert_tables_go_back(
    folder: Path, make_sinks: MakeSinks, read: ReadTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables show exactly what they showed then, and what comes afterwards is right."""
    flow = TortureFlow(folder, make_sinks(), only_newest=False, **HISTORY)
    run_for(flow, 20, monkeypatch)
    flow.stop()
    cuts = rows_at_epochs(folder)
    ages = {epoch: age_of(folder, epoch) for epoch in cuts}
    assert len([age for age in ages.values() if age < 10 * MINUTE_MS]) >= 39, "all of the last ten minutes"
    old = [epoch for epoch, age in ages.items() if 10 * MINUTE_MS < age < 19 * MINUTE_MS]
    assert 8 <= len(old) <= 11, "one a minute"
    wanted = min(old, key=lambda epoch: abs(ages[epoch] - 15 * MINUTE_MS))
    events, latest = cuts[wanted]
    assert events is not None and latest is not None

    flow = TortureFlow(folder, make_sinks(), only_newest=False, restore_to=wanted, **HISTORY)
    assert read() == (sorted(all_rows(events)), newest_rows(with_totals(latest)))
    run_for(flow, 1, monkeypatch)
    count = flow.batches() * ROWS_PER_BATCH
    flow.stop()
    assert read() == (sorted(all_rows(count)), newest_rows(with_totals(count)))
