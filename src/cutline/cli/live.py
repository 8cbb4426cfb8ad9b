"""A live view of a running flow in the terminal, drawn from its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cutline.model.status import FlowStatus


def flow_view(status: FlowStatus | None, note: str = "") -> RenderableType:
    """Operators, channels, sinks and checkpoints at one glance; None: the flow has no status yet."""
    if status is None:
        return Text(f"starting Spark …  {note}", style="yellow")
    title = Text.assemble(
        ("flow ", "dim"),
        (status.flow, "bold"),
        f"  {status.state}  generation {status.generation}  recovery path: {status.recovery.path}",
        (f"  {note}", "yellow"),
    )
    return Group(title, *_health(status), *_unguarded(status), _operators(status), _checkpoints(status))


def _health(status: FlowStatus) -> list[Text]:
    health = status.health
    if status.failure:
        return [Text(status.failure, style="red")]
    if health.healthy:
        return []
    failed = f"{health.failures} checkpoints in a row have failed: " if health.failures else ""
    return [Text(failed + health.reason, style="red")]


def _unguarded(status: FlowStatus) -> list[Text]:
    found = [
        f"{one.source} of {name}"
        for name, operator in status.operators.items()
        for one in operator.sources
        if not one.guarded
    ]
    return [Text(f"sources that are not guarded: {', '.join(found)}", style="yellow")] if found else []


def _operators(status: FlowStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("operator", "batch", "rows", "batch ms", "unread by consumers", "state"):
        table.add_column(name, justify="left" if name in ("operator", "state", "unread by consumers") else "right")
    for name, item in status.operators.items():
        backlog = ", ".join(f"{consumer}: {rows:,}" for consumer, rows in item.backlog_rows.items())
        state = "running" if item.active else "stopped"
        if item.waiting_for_room:
            state = "blocked by a full channel"
        for epoch, inputs in item.aligning.items():
            state = f"aligning epoch {epoch} (waits for {', '.join(inputs)})"
        cells = (name, str(item.batch), f"{item.rows:,}", f"{item.batch_ms:.0f}", backlog, state)
        table.add_row(*map(Text, cells))
    return table


def _checkpoints(status: FlowStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("epoch", "outcome", "ms", "new bytes", "in flight", ""):
        table.add_column(name, justify="right" if name in ("epoch", "ms", "new bytes", "in flight") else "left")
    for epoch, item in status.checkpoints.pending.items():
        cells = (str(epoch), item.state, str(item.since_ms), "", "", f"waits for {', '.join(item.missing)}")
        table.add_row(*map(Text, cells))
    for outcome in status.history[:6]:
        details = outcome.details
        is_complete = outcome.outcome == "completed"
        cells = (
            str(outcome.epoch),
            outcome.outcome,
            str(details.get("duration_ms", "")),
            f"{details.get('new_bytes', 0):,}" if is_complete else "",
            _in_flight(details) if is_complete else "",
            outcome.reason,
        )
        table.add_row(*map(Text, cells))
    published = ", ".join(f"{name}: epoch {sink.published_epoch}" for name, sink in status.sinks.items())
    table.caption = Text(f"published – {published}") if published else None
    table.caption_justify = "left"
    return table


def _in_flight(details: Mapping[str, Any]) -> str:
    rest = " + ?" if details.get("in_flight_unmeasured") else ""
    return f"{details.get('in_flight_rows', 0):,}{rest} rows"
