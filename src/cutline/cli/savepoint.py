"""Named checkpoints: ``cutline savepoint``, ``clone``, ``stop``."""

from __future__ import annotations

import datetime
import json
import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cutline.cli.options import FlowName, Json, Storage, parse_renames
from cutline.cli.places import flow_layout, is_running, kept_checkpoints, layout_in, savepoints_in, savepoints_of
from cutline.config.loading import load_options
from cutline.errors import ConfigError, RecoveryError
from cutline.model import ids
from cutline.model.layout import Layout
from cutline.runtime.lock import FlowLock
from cutline.savepoints.store import Savepoint, Savepoints
from cutline.storage.local import LocalStore
from cutline.transport.request_files import ask

app = typer.Typer(no_args_is_help=True, help="Named checkpoints: take, list, move and delete them.")

_ANSWER_SECONDS = 600.0
Name = Annotated[str, typer.Argument(help="Name of the savepoint.")]


def _ask(layout: Layout, kind: str, arguments: dict[str, Any], what: str) -> dict[str, Any]:
    """Send a request to the running flow, and show a spinner while waiting."""
    with Console(stderr=True).status(escape(what)):
        answer: dict[str, Any] = ask(
            layout.requests, kind, arguments, seconds=_ANSWER_SECONDS, wait=lambda: _check_running(layout)
        )
    return answer


def _check_running(layout: Layout) -> None:
    if not is_running(layout):
        raise ConfigError("the flow does not run", next_step="start it, or leave this out", flow=layout.root.name)


def _show(savepoint: Savepoint, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(savepoint)))
        return
    table = Table(show_header=False, box=None)
    for key, value in _row(savepoint).items():
        table.add_row(*map(Text, (key, value)))
    Console().print(table)


def _row(savepoint: Savepoint) -> dict[str, str]:
    taken = datetime.datetime.fromtimestamp(savepoint.created_ms / 1000, tz=datetime.UTC)
    return {
        "name": savepoint.name,
        "flow": savepoint.flow,
        "epoch": str(savepoint.epoch),
        "taken": f"{taken:%Y-%m-%d %H:%M:%S} UTC",
        "in flight": "nothing" if savepoint.is_drained else "included",
        "files": str(savepoint.files),
        "MB": f"{savepoint.size_bytes / 1e6:.2f}",
        "note": "".join(one if one.isprintable() else "?" for one in savepoint.note),
    }


@app.command()
def create(
    name: Name,
    flow: FlowName,
    storage: Storage = None,
    drain: Annotated[bool, typer.Option(help="Pause the sources until nothing is under way.")] = True,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: Json = False,
) -> None:
    """Take a savepoint. A running flow takes a new checkpoint for it; a stopped flow keeps its newest one."""
    layout = flow_layout(flow, storage)
    if is_running(layout):
        taken = _ask(layout, "savepoint", {"name": name, "drain": drain, "note": note}, f"taking savepoint {name}")
        _show(msgspec.convert(taken, Savepoint), as_json)
        return
    lock = FlowLock(layout.lock, flow)
    lock.acquire(is_noted=False)  # nothing is collected while it is being copied
    try:
        store = LocalStore.reading(layout)
        kept = kept_checkpoints(store)
        if not kept:
            raise RecoveryError("the flow has no checkpoint", next_step="start it, then take the savepoint", flow=flow)
        manifest = kept[-1]
        savepoint = savepoints_of(flow, storage).create(name, manifest, is_drained=False, note=note)
    finally:
        lock.release()
    _show(savepoint, as_json)


@app.command("list")
def list_(flow: FlowName, storage: Storage = None, as_json: Json = False) -> None:
    """Show the savepoints of a flow, oldest first."""
    found = savepoints_of(flow, storage).list()
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
        return
    table = Table(*(_row(found[0]) if found else {"no savepoints": ""}))
    for savepoint in found:
        table.add_row(*map(Text, _row(savepoint).values()))
    Console().print(table)


@app.command()
def show(name: Name, flow: FlowName, storage: Storage = None, as_json: Json = False) -> None:
    """Show one savepoint."""
    _show(savepoints_of(flow, storage).load(name), as_json)


@app.command()
def delete(name: Name, flow: FlowName, storage: Storage = None) -> None:
    """Delete a savepoint and its content. Flows that were started from it are not affected."""
    savepoints_of(flow, storage).delete(name)
    typer.echo(f"savepoint {name} is deleted")


@app.command()
def export(
    name: Name,
    place: Annotated[str, typer.Argument(help="A folder, or a place in a bucket: s3://bucket/prefix.")],
    flow: FlowName,
    storage: Storage = None,
) -> None:
    """Copy a savepoint to another disk or a bucket."""
    with Console(stderr=True).status(escape(f"copying {name}")):
        size = savepoints_of(flow, storage).export(name, place)
    typer.echo(f"savepoint {name} is at {place}: {size / 1e6:.2f} MB")


@app.command("import")
def import_(
    place: Annotated[str, typer.Argument(help="The place it was exported to.")],
    name: Name,
    flow: FlowName,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Import a savepoint that was exported, on this machine or another. The flow need not exist here yet."""
    options = load_options({"storage": storage})
    layout = layout_in(options, flow)
    with Console(stderr=True).status(escape(f"copying {place}")):
        savepoint = savepoints_in(layout, options).import_from(place, name)
    _show(savepoint, as_json)


def clone(
    name: Name,
    new_flow: Annotated[str, typer.Argument(help="Name of the new flow.")],
    flow: FlowName,
    storage: Storage = None,
    into: Annotated[str | None, typer.Option(help="Storage folder of the new flow; default: the same.")] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="old=new: an operator with another name in the new flow.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="An operator that the new flow does not have.")] = None,
    as_json: Json = False,
) -> None:
    """Create a second flow that begins at a savepoint, shares nothing with the first, and has empty sinks."""
    options = load_options({"storage": into or storage})
    target = layout_in(options, new_flow)
    with Console(stderr=True).status(escape(f"cloning {name}")):
        manifest, renaming = _savepoints_anywhere(flow, storage).clone(
            name, target, ids.FlowName(new_flow), rename=parse_renames(rename or []), drop=drop or []
        )
    matched = {str(old): str(new) for old, new in renaming.new_names.items()}
    if as_json:
        report = {"flow": new_flow, "epoch": manifest.epoch, "operators": matched, "dropped": drop or []}
        typer.echo(json.dumps(report))
        return
    for old, new in matched.items():
        typer.echo(f"{old} -> {new}" if old != new else old)
    for old in drop or []:
        typer.echo(f"{old}: dropped")
    typer.echo(f"flow {new_flow} begins at epoch {manifest.epoch} of {flow}; run it with a Flow of that name")


def _savepoints_anywhere(flow: str, storage: str | None) -> Savepoints:
    """The savepoints of a flow, even if it never ran here: an imported savepoint is enough."""
    options = load_options({"storage": storage})
    return savepoints_in(layout_in(options, flow), options)


def stop(
    flow: FlowName,
    storage: Storage = None,
    drain: Annotated[bool, typer.Option(help="Process what is under way and publish it first.")] = False,
    savepoint: Annotated[str | None, typer.Option(help="Drain, and keep the last checkpoint under this name.")] = None,
    as_json: Json = False,
) -> None:
    """Stop a running flow at a batch boundary."""
    layout = flow_layout(flow, storage)
    answer = _ask(layout, "stop", {"drain": drain, "savepoint": savepoint}, "asking the flow to stop")
    with Console(stderr=True).status("waiting until it has stopped"):
        while is_running(layout):
            time.sleep(0.05)
    typer.echo(json.dumps(answer) if as_json else f"flow {flow} has stopped")
