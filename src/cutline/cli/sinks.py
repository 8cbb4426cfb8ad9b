"""``cutline sinks``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cutline.cli.options import FlowName, Json, Storage
from cutline.cli.places import flow_layout, is_running, kept_checkpoints
from cutline.errors import ConfigError
from cutline.model.ids import SinkId
from cutline.model.layout import Layout
from cutline.runtime.lock import FlowLock
from cutline.runtime.status import SinkView, sink_views
from cutline.storage.checkpoints import LocalSnapshotStore
from cutline.storage.metadata.inspector import inspect_coordinator
from cutline.storage.metadata.sqlite import forget_seen


def sinks(
    flow: FlowName,
    storage: Storage = None,
    accept: Annotated[
        str | None,
        typer.Option(help="Go on with this sink although it no longer has all that was published to it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far each sink is: what it has published, what waits, what is staged."""
    layout = flow_layout(flow, storage)
    if accept is not None:
        _accept(layout, flow, SinkId(accept))
    views = _views(layout)
    if as_json:
        typer.echo(json.dumps({"flow": flow, "sinks": [asdict(view) for view in views]}))
    else:
        _print(Console(), views)


def _views(layout: Layout) -> list[SinkView]:
    known = inspect_coordinator(layout.metadata)
    if known.problem:
        raise ConfigError(known.problem, flow=layout.root.name)
    snapshots = LocalSnapshotStore.reading(layout)
    return sink_views(layout, snapshots, known, kept_checkpoints(snapshots))


def _accept(layout: Layout, flow: str, sink: SinkId) -> None:
    if is_running(layout):
        raise ConfigError("the flow is running, so its sinks are accepted", flow=flow)
    known = [view.sink for view in _views(layout)]
    if sink not in known:
        raise ConfigError(
            f"the flow has no sink {sink!r}", next_step=f"it has: {', '.join(known) or 'none'}", flow=flow
        )
    lock = FlowLock(layout.lock, flow)
    lock.acquire(is_noted=False)
    try:
        forget_seen(layout.metadata, sink)
    finally:
        lock.release()


def _print(console: Console, views: list[SinkView]) -> None:
    table = Table("sink", "operator", "published", "with rows", "waiting", "since", "staged batches", "staged rows")
    for view in views:
        table.add_row(
            view.sink,
            view.operator,
            str(view.published or "–"),
            str(view.with_rows or "–"),
            ", ".join(map(str, view.waiting)) or "–",
            f"{view.waiting_ms / 1000:,.1f} s" if view.waiting else "–",
            f"{view.staged_batches:,}",
            f"{view.staged_rows:,}",
        )
    console.print(table)
