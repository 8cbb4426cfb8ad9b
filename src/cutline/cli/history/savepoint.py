"""Named checkpoints: ``cutline savepoint``, ``clone``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cutline.base.redaction import without_secrets
from cutline.cli.declaring import QuickGroup, flow_command
from cutline.cli.flows_here import flow_here, layout_in
from cutline.cli.options import Config, FlowName, Json, NewName, SavepointName, Storage, parse_renames
from cutline.cli.running.columns import Column, fitted
from cutline.cli.words import size, span, utc
from cutline.config.loading import load_options
from cutline.errors import ConfigError, RecoveryError
from cutline.model import ids

if TYPE_CHECKING:
    from cutline.savepoints.store import Savepoint

app = typer.Typer(
    cls=QuickGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Named checkpoints: take, list, move and delete them.",
)

#: What a narrow terminal leaves out of the list first.
_RANKS = {"files": 6, "taken": 5, "in flight": 4, "note": 3, "code": 2}
_NOT_RESTORABLE = "no, clone only"


def _show(savepoint: Savepoint, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(savepoint)))
        return
    table = Table(show_header=False, box=None)
    for key, value in _row(savepoint).items():
        table.add_row(*map(Text, (key, value)))
    Console().print(table)


def _row(savepoint: Savepoint) -> dict[str, str]:
    return {
        "name": savepoint.name,
        "flow": savepoint.flow,
        "epoch": str(savepoint.epoch),
        "taken": f"{utc(savepoint.created_ms)} UTC",
        "in flight": "nothing" if savepoint.is_drained else "included",
        "files": str(savepoint.files),
        "code": savepoint.code,
        "size": size(savepoint.size_bytes),
        "note": "".join(one if one.isprintable() else "?" for one in savepoint.note),
    }


def _listed(savepoint: Savepoint, at_ms: int, *, is_restorable: bool) -> dict[str, str]:
    row = _row(savepoint)
    first = {"name": row["name"], "epoch": row["epoch"], "age": span(at_ms - savepoint.created_ms), "size": row["size"]}
    rest = {key: value for key, value in row.items() if key not in (*first, "flow")}
    return {**first, "restorable": "yes" if is_restorable else _NOT_RESTORABLE, **rest}


@flow_command(app)
def create(
    flow: FlowName = None,
    *,
    name: NewName,
    storage: Storage = None,
    config: Config = None,
    drain: Annotated[bool, typer.Option(help="Pause the sources until nothing is under way.")] = True,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: Json = False,
) -> None:
    """Take a savepoint. A running flow takes a new checkpoint for it; a stopped flow keeps its newest one."""
    from cutline.cli.asking import ask_running
    from cutline.cli.places import is_running, kept_checkpoints, savepoints_of
    from cutline.runtime.lock import FlowLock
    from cutline.storage.local import LocalStore

    here = flow_here(flow, storage, config)
    if is_running(here.layout):
        from cutline.savepoints.store import Savepoint

        arguments = {"name": name, "drain": drain, "note": note}
        taken = ask_running(here.layout, "savepoint", arguments, f"taking savepoint {name}")
        _show(msgspec.convert(taken, Savepoint), as_json)
        return
    lock = FlowLock(here.layout.lock, here.flow)
    lock.acquire(is_noted=False)  # nothing is collected while it is being copied
    try:
        kept = kept_checkpoints(LocalStore.reading(here.layout))
        if not kept:
            raise RecoveryError(
                "the flow has no checkpoint", next_step="start it, then take the savepoint", flow=here.flow
            )
        savepoint = savepoints_of(here).create(name, kept[-1], is_drained=False, note=note)
    finally:
        lock.release()
    _show(savepoint, as_json)


@flow_command(app, "list")
def list_(flow: FlowName = None, storage: Storage = None, config: Config = None, as_json: Json = False) -> None:
    """Show the savepoints of a flow, oldest first."""
    from rich.console import Console
    from rich.text import Text

    from cutline.base.clock import now_ms
    from cutline.cli.places import savepoints_of
    from cutline.savepoints.automatic import is_restorable
    from cutline.storage.local import LocalStore

    here = flow_here(flow, storage, config)
    savepoints, generations = savepoints_of(here), LocalStore.reading(here.layout).generations.load_all()
    found = savepoints.list()
    restorable = {one.name: is_restorable(one, savepoints, generations) for one in found}
    if as_json:
        rows = [{**msgspec.to_builtins(one), "is_restorable": restorable[one.name]} for one in found]
        typer.echo(json.dumps(rows))
        return
    if not found:
        typer.echo("no savepoints")
        return
    # Without the flow, which is the same in each row; names are needed for the next command, so they are never cut off.
    at_ms = now_ms()
    shown = [_listed(one, at_ms, is_restorable=restorable[one.name]) for one in found]
    columns = [Column(key, rank=_RANKS.get(key, 0), is_text=key == "note") for key in shown[0]]
    console = Console()
    console.print(fitted(columns, [tuple(map(Text, row.values())) for row in shown], console.width))


@flow_command(app)
def show(
    flow: FlowName = None,
    *,
    name: SavepointName,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show one savepoint."""
    from cutline.cli.places import savepoints_of

    _show(savepoints_of(flow_here(flow, storage, config)).load(name), as_json)


@flow_command(app)
def delete(
    flow: FlowName = None,
    *,
    name: SavepointName,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete a savepoint and its content. Flows that were started from it are not affected."""
    from cutline.cli.places import savepoints_of
    from cutline.storage.restore_requests import requested_savepoints

    here = flow_here(flow, storage, config)
    if name in requested_savepoints(here.layout):
        raise ConfigError(
            f"the next start of the flow restores savepoint {name}, as requested",
            next_step=f"withdraw the request first: cutline restore {here.flow} --cancel",
            flow=here.flow,
        )
    savepoints_of(here).delete(name)
    typer.echo(json.dumps({"flow": here.flow, "deleted": name}) if as_json else f"savepoint {name} is deleted")


@flow_command(app)
def export(
    flow: FlowName = None,
    *,
    name: SavepointName,
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A folder, or a place in a bucket: s3://bucket/prefix.")
    ],
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Copy a savepoint to another disk or a bucket."""
    from rich.console import Console
    from rich.markup import escape

    from cutline.cli.places import savepoints_of

    here = flow_here(flow, storage, config)
    with Console(stderr=True).status(escape(f"copying {name}")):
        size_bytes = savepoints_of(here).export(name, place)
    if as_json:
        answer = {"flow": here.flow, "savepoint": name, "place": without_secrets(place), "size_bytes": size_bytes}
        typer.echo(json.dumps(answer))
    else:
        typer.echo(f"savepoint {name} is at {without_secrets(place)}: {size(size_bytes)}")


@flow_command(app, "import")
def import_(
    flow: FlowName = None,
    *,
    place: Annotated[str, typer.Argument(metavar="PLACE", help="The place it was exported to.")],
    name: NewName,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Import a savepoint that was exported, on this machine or another. The flow need not exist here yet."""
    from rich.console import Console
    from rich.markup import escape

    from cutline.cli.places import savepoints_of

    here = flow_here(flow, storage, config, must_have_run=False)
    with Console(stderr=True).status(escape(f"copying {place}")):
        savepoint = savepoints_of(here).import_from(place, name)
    _show(savepoint, as_json)


def clone(
    flow: FlowName = None,
    *,
    name: SavepointName,
    new_flow: Annotated[str, typer.Argument(metavar="NEW_FLOW", help="Name of the new flow.")],
    storage: Storage = None,
    config: Config = None,
    into: Annotated[str | None, typer.Option(help="Storage folder of the new flow; default: the same.")] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="old=new: an operator with another name in the new flow."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="OPERATOR", help="An operator that the new flow does not have.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a second flow that begins at a savepoint, shares nothing with the first, and has empty sinks."""
    from rich.console import Console
    from rich.markup import escape

    from cutline.cli.places import savepoints_of

    # An imported savepoint is enough: the flow itself need not have run here.
    here = flow_here(flow, storage, config, must_have_run=False)
    target = layout_in(load_options({"storage": into or storage}, config_file=config), new_flow)
    with Console(stderr=True).status(escape(f"cloning {name}")):
        manifest, renaming = savepoints_of(here).clone(
            name, target, ids.FlowName(new_flow), rename=parse_renames(rename or []), drop=drop or []
        )
    matched = {str(old): str(new) for old, new in renaming.new_names.items()}
    if as_json:
        report = {"flow": new_flow, "epoch": manifest.epoch, "operators": matched, "dropped": drop or []}
        typer.echo(json.dumps(report))
        return
    typer.echo(f'flow {new_flow} begins at epoch {manifest.epoch} of {here.flow}; run it with Flow("{new_flow}")')
    names = [f"{old} (now {new})" if old != new else old for old, new in matched.items()]
    typer.echo(f"operators with their state: {', '.join(names)}")
    if drop:
        typer.echo(f"dropped: {', '.join(drop)}")
