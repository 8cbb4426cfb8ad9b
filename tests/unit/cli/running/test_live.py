"""The view of a flow in the terminal, drawn from real states and at the widths that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cutline.cli.running.live import flow_view
from cutline.errors import CheckpointFailedError
from cutline.model.ids import NO_BATCH, NO_EPOCH
from cutline.model.status import FlowStatus, OperatorStatus, SourceStatus
from tests.support.sample_status import AT_MS, SAMPLE
from tests.support.sparkless import NUMBERS, SparklessFlow
from tests.support.statuses import WRITTEN


def drawn_status(status: FlowStatus, width: int = 200, note: str = "", at_ms: int | None = None) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(flow_view(status, note, at_ms=at_ms))
    return captured.get()


def drawn(flow: SparklessFlow) -> str:
    return drawn_status(flow.run.status())


def with_operators(**operators: OperatorStatus) -> FlowStatus:
    return msgspec.structs.replace(SAMPLE, operators=operators)


def changed(name: str, **fields: Any) -> OperatorStatus:
    return msgspec.structs.replace(SAMPLE.operators[name], **fields)


def row_of(view: str, name: str) -> str:
    tables = view[view.index("\noperator ") :]
    return next(line for line in tables.splitlines() if line.startswith(f"{name} "))


# ---------------------------------------------------------------------- at 80 and 160 columns


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut_off(width: int) -> None:
    view = drawn_status(SAMPLE, width, "Ctrl-C stops", AT_MS)
    assert all(len(line) <= width for line in view.splitlines())
    assert "…" not in view
    for name in ("cards", "upi", "totals", "fraud_scores", "merchant_totals", "fraud_alerts"):
        assert row_of(view, name)
    assert "auto-20251231-215959" in view
    assert "cutline-data/payments/traces/fraud_scores-3f0c9a1b.txt" in view


def test_80_columns_show_what_matters() -> None:
    view = drawn_status(SAMPLE, 80, "Ctrl-C stops", AT_MS)
    assert "payments  unhealthy  for 2 h" in view and "Ctrl-C stops" in view
    assert "checkpoint 812 complete 6 s ago, next in 4 s" in view
    assert "operator      rows/s  backlog   lag     state  restarts  query" in view
    assert row_of(view, "totals").split() == ["totals", "1,012", "1,320", "0", "s", "391.4", "MB", "0", "runs"]
    assert row_of(view, "fraud_scores").split()[:5] == ["fraud_scores", "0", "482.3", "k", "71"]
    assert "waits for fraud_scores" in row_of(view, "upi")
    assert row_of(view, "fraud_alerts").split() == [
        "fraud_alerts",
        "fraud_scores",
        "epoch",
        "808,",
        "46",
        "s",
        "old",
        "36",
        "s",
        "failed",
        "3",
        "times",
    ]
    assert "ValueError: no model for currency 'XTS'" in view


def test_160_columns_show_everything() -> None:
    view = drawn_status(SAMPLE, 160, "Ctrl-C stops", AT_MS)
    for title in ("reads", "batch", "took", "rows ", "whole", "code"):
        assert title in view
    assert "PySpark 4.3.0" in view and "  805  completed" in view and "cards, upi" in view


def test_long_names_push_figures_out_and_are_kept_whole() -> None:
    name = "customer_lifetime_value_by_region_and_channel_v2_final_totals"
    status = with_operators(**{name: changed("totals", inputs=[])})
    view = drawn_status(status, 80, at_ms=AT_MS)
    assert row_of(view, name).split()[1] == "1,012"  # the rate ranks first


def test_operators_stand_in_the_order_of_the_graph() -> None:
    status = with_operators(**{name: SAMPLE.operators[name] for name in ("fraud_scores", "totals", "upi", "cards")})
    view = drawn_status(status, 80, at_ms=AT_MS)
    places = [view.index(row_of(view, name)) for name in ("upi", "cards", "fraud_scores", "totals")]
    assert places == sorted(places)


# ---------------------------------------------------------------------- moments of a flow's life


def test_before_the_first_batch_there_is_no_number_of_none() -> None:
    new = changed("cards", batch=NO_BATCH, batches=0, rows=0, rows_per_second=0.0, backlog_rows={})
    sinks = {
        "t": msgspec.structs.replace(SAMPLE.sinks["fraud_alerts"], published_epoch=NO_EPOCH, published_epoch_ms=None)
    }
    checkpoints = msgspec.structs.replace(
        SAMPLE.checkpoints, complete=[], last_completed_ms=None, next_ms=AT_MS + 9_100, min_epoch=NO_EPOCH
    )
    status = msgspec.structs.replace(
        with_operators(cards=new), sinks=sinks, checkpoints=checkpoints, history=[], state="running"
    )
    for width in (80, 160):
        view = drawn_status(status, width, at_ms=AT_MS)
        assert "-1" not in view
        assert "no checkpoint yet, next in 9 s" in view
        assert "first batch" in row_of(view, "cards") and "nothing yet" in view


def test_a_clock_that_was_set_back_gives_no_negative_age() -> None:
    assert "-" not in drawn_status(SAMPLE, 80, at_ms=AT_MS - 60_000).split("\n")[1]


def test_of_a_stopped_flow_no_next_checkpoint_is_promised() -> None:
    status = msgspec.structs.replace(SAMPLE, state="stopped")
    view = drawn_status(status, 80, at_ms=AT_MS + 3 * 3_600_000)
    assert "checkpoint 812 complete 3 h ago" in view and "next" not in view and "for 2 h" not in view


def test_an_old_checkpoint_and_a_lag_are_coloured() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as captured:
        console.print(flow_view(SAMPLE, at_ms=AT_MS + 60_000))
    view = captured.get()
    yellow, red = "\x1b[33m", "\x1b[31m"
    assert f"{yellow}66 s ago" in view
    assert f"{yellow}71 s" in view
    assert f"{red}failed 2 times" in view and f"{red}unhealthy" in view


def test_a_pending_checkpoint_says_what_it_waits_for() -> None:
    pending = {813: {"state": "collecting", "since_ms": 2_100, "missing": {"totals": [0, 1]}}}
    built = msgspec.to_builtins(SAMPLE.checkpoints, str_keys=True)
    checkpoints = msgspec.convert(
        {**built, "pending": pending, "next_ms": None}, type(SAMPLE.checkpoints), strict=False
    )
    view = drawn_status(msgspec.structs.replace(SAMPLE, checkpoints=checkpoints), 80, at_ms=AT_MS)
    assert "checkpoint 812 complete 6 s ago, 813 begun 2 s ago" in view
    assert "waits for totals" in view


# ---------------------------------------------------------------------- real flows


def test_the_view_shows_checkpoints_that_were_taken_and_that_failed_and_why(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path, tolerable_failures=0)
    try:
        flow.emit(2)
        flow.checkpoint()
        assert "in a row" not in drawn(flow)
        flow.sink.prepare_failures.append(ValueError("disk full"))
        with pytest.raises(CheckpointFailedError):
            flow.checkpoint()
        view = drawn(flow)
    finally:
        flow.stop()
    assert "unhealthy" in view
    assert "1 checkpoint in a row failed: snapshot of totals failed: ValueError: disk full" in view
    assert "completed" in view and "aborted" in view
    assert "epoch 1, 0 s old" in row_of(view, "table")


def test_the_view_names_sources_that_are_not_guarded(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    try:
        assert "not guarded" not in drawn(flow)
        status = flow.run.status()
    finally:
        flow.stop()
    unguarded = SourceStatus(source="rate", guarded=False, note="it cannot be asked")
    numbers = msgspec.structs.replace(status.operators["numbers"], sources=[unguarded])
    status = msgspec.structs.replace(status, operators={**status.operators, "numbers": numbers})
    assert "sources that are not guarded: rate of numbers" in drawn_status(status)


def test_the_view_says_that_some_rows_in_flight_were_not_counted(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    try:
        flow.emit(1)
        flow.checkpoint()
        assert "0 rows" in drawn(flow)
        status = flow.run.status()
    finally:
        flow.stop()
    details = {**status.history[0].details, "in_flight_rows": 1_200, "in_flight_unmeasured": 1}
    status = msgspec.structs.replace(status, history=[msgspec.structs.replace(status.history[0], details=details)])
    assert "1,200 + ? rows" in drawn_status(status)


@pytest.mark.parametrize("text", ["[red]", "[/]", "[delta]", "a [/b] c"])
def test_brackets_are_drawn_as_they_are(text: str) -> None:
    """In names, reasons and notes: they come from outside."""
    status = msgspec.json.decode(msgspec.json.encode(WRITTEN), type=FlowStatus)
    (numbers,) = status.operators.values()
    outcome = msgspec.structs.replace(status.history[0], outcome="aborted", reason=f"because {text}")
    status = msgspec.structs.replace(
        status,
        operators={text: msgspec.structs.replace(numbers, backlog_rows={f"{text}r": 3}, waiting_for_room=True)},
        sinks={f"{text}s": status.sinks["table"]},
        health=msgspec.structs.replace(status.health, healthy=False, reason=f"ill {text}"),
        history=[outcome],
    )
    view = drawn_status(status, note=f"note {text}")
    for part in (f"{text} ", f"waits for {text}r", f"{text}s ", f"ill {text}", f"because {text}", f"note {text}"):
        assert part in view


def is_all_published(status: FlowStatus) -> bool:
    return status.sinks["table"].published_epoch == status.checkpoints.last_epoch


def test_a_flow_tells_its_rate_backlog_lag_and_the_next_checkpoint(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path, checkpoint_interval="1h")
    try:
        assert flow.run.status().checkpoints.last_completed_ms is None
        flow.step(NUMBERS)
        flow.step(NUMBERS)
        status = flow.run.status()
        assert status.started_ms <= status.at_ms
        assert status.checkpoints.interval_ms == 3_600_000
        assert status.checkpoints.next_ms is not None
        assert 3_500_000 < status.checkpoints.next_ms - status.at_ms <= 3_600_000
        assert status.operators["numbers"].backlog_rows == {"totals": 2}
        waited_ms = status.operators["numbers"].backlog_ms["totals"]
        flow.wait(lambda: flow.run.status().operators["numbers"].backlog_ms["totals"] > waited_ms)
        flow.checkpoint()
        # The first automatic checkpoint may come after it.
        flow.wait(lambda: is_all_published(flow.run.status()))
        status = flow.run.status()
        assert status.checkpoints.last_completed_ms is not None
        sink = status.sinks["table"]
        assert sink.published_epoch_ms == status.checkpoints.last_completed_ms and sink.lag_ms == 0
    finally:
        flow.stop()
