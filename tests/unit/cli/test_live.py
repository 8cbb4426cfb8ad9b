"""The view of a flow in the terminal, drawn from real states."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cutline.cli.live import flow_view
from cutline.errors import CheckpointFailedError
from cutline.model.status import FlowStatus, SourceStatus
from tests.support.sparkless import SparklessFlow
from tests.support.statuses import WRITTEN


def drawn(flow: SparklessFlow) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the process)
    console.print(flow_view(flow.run.status()))
    console.file.close()
    return console.export_text()


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
    assert "1 checkpoints in a row have failed: snapshot of totals failed: ValueError: disk full" in view
    assert "completed" in view and "aborted" in view
    assert "table: epoch 1" in view


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
    console = Console(width=200)
    with console.capture() as captured:
        console.print(flow_view(status))
    assert "sources that are not guarded: rate of numbers" in captured.get()


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
    console = Console(width=200)
    with console.capture() as captured:
        console.print(flow_view(status))
    assert "1,200 + ? rows" in captured.get()


@pytest.mark.parametrize("text", ["[red]", "[/]", "[delta]", "a [/b] c"])
def test_brackets_are_drawn_as_they_are(text: str) -> None:
    """In names, reasons and notes: they come from outside."""
    status = msgspec.json.decode(msgspec.json.encode(WRITTEN), type=FlowStatus)
    (numbers,) = status.operators.values()
    outcome = msgspec.structs.replace(status.history[0], outcome="aborted", reason=f"because {text}")
    status = msgspec.structs.replace(
        status,
        operators={text: msgspec.structs.replace(numbers, backlog_rows={f"{text}r": 3}, aligning={})},
        sinks={f"{text}s": status.sinks["table"]},
        health=msgspec.structs.replace(status.health, healthy=False, reason=f"ill {text}"),
        history=[outcome],
    )
    console = Console(width=200)
    with console.capture() as captured:
        console.print(flow_view(status, f"note {text}"))
    drawn = captured.get()
    for part in (f"{text} ", f"{text}r: 3", f"{text}s: epoch 5", f"ill {text}", f"because {text}", f"note {text}"):
        assert part in drawn
