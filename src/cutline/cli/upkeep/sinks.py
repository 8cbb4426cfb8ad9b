"""``cutline sinks``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cutline.cli.flows_here import flow_here
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.cli.running.columns import Column, fitted
from cutline.errors import ConfigError
from cutline.model.ids import SinkId
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.model.status import SinkDetails

_COLUMNS = (
    Column("sink"),
    Column("operator", rank=1),
    Column("published", is_number=True),
    Column("with rows", rank=4, is_number=True),
    Column("waiting", is_text=True),
    Column("since", rank=1, is_number=True),
    Column("staged batches", rank=3, is_number=True),
    Column("staged rows", rank=2, is_number=True),
)


def sinks(
    flow: FlowName = None,
    storage: Storage = None,
    config: Config = None,
    accept: Annotated[
        str | None,
        typer.Option(help="Continue with this sink although some of its published rows are missing."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how far each sink is: what it has published, what waits, what is staged."""
    from rich.console import Console

    here = flow_here(flow, storage, config)
    layout = here.layout
    if accept is not None:
        _accept(layout, here.flow, SinkId(accept))
    found = _details(layout)
    if as_json:
        typer.echo(json.dumps({"flow": here.flow, "sinks": msgspec.to_builtins(found)}))
    else:
        _print(Console(), found)


def _details(layout: Layout) -> list[SinkDetails]:
    from cutline.cli.places import kept_checkpoints
    from cutline.runtime.status import sink_details
    from cutline.storage.local import LocalStore
    from cutline.storage.metadata.inspector import inspect_coordinator

    known = inspect_coordinator(layout.metadata)
    if known.problem:
        raise ConfigError(known.problem, next_step=f"see cutline verify {layout.flow}", flow=layout.flow)
    store = LocalStore.reading(layout)
    manifests = kept_checkpoints(store)
    return sink_details(layout, store.checkpoints, store.generations.load_all(), known, manifests)


def _accept(layout: Layout, flow: str, sink: SinkId) -> None:
    from cutline.cli.places import is_running
    from cutline.runtime.lock import FlowLock
    from cutline.storage.metadata.sqlite import forget_seen

    if is_running(layout):
        raise ConfigError(
            "the flow is running, so its sinks need no acceptance", next_step="leave out --accept", flow=flow
        )
    known = [one.sink for one in _details(layout)]
    if sink not in known:
        raise ConfigError(
            f"the flow has no sink {sink!r}", next_step=f"its sinks are: {', '.join(known) or 'none'}", flow=flow
        )
    lock = FlowLock(layout.lock, flow)
    lock.acquire(is_noted=False)
    try:
        forget_seen(layout.metadata, sink)
    finally:
        lock.release()


def _print(console: Console, sinks: list[SinkDetails]) -> None:
    from rich.text import Text

    rows = [
        (
            one.sink,
            one.operator,
            str(one.published or "–"),
            str(one.with_rows or "–"),
            ", ".join(map(str, one.waiting)) or "–",
            f"{one.waiting_ms / 1000:,.1f} s" if one.waiting else "–",
            f"{one.staged_batches:,}",
            f"{one.staged_rows:,}",
        )
        for one in sinks
    ]
    console.print(fitted(_COLUMNS, [tuple(map(Text, row)) for row in rows], console.width))
