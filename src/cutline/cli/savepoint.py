"""Named checkpoints and going back: ``cutline savepoint``, ``restore``, ``clone``, ``stop``."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import cutline.ids
from cutline import durable, records
from cutline.cli.options import FlowName, Json, Storage
from cutline.config import Options
from cutline.errors import ConfigError, CutlineError, RecoveryError
from cutline.layout import Layout
from cutline.ports import Manifest
from cutline.service.lock import FlowLock, running_pid
from cutline.service.manifests import of_present_history
from cutline.service.requests import ask
from cutline.service.savepoints import Savepoint, Savepoints
from cutline.snapshots.store import LocalSnapshotStore
from cutline.wiring import load_options, store_at

app = typer.Typer(no_args_is_help=True, help="Named checkpoints: take, list, move and delete them.")

_ANSWER_SECONDS = 600.0
Name = Annotated[str, typer.Argument(help="Name of the savepoint.")]


def _layout(flow: str, storage: str | None) -> Layout:
    options = load_options({"storage": storage})
    layout = Layout(Path(options.storage).resolve(), flow)
    if not layout.identity.exists():
        raise ConfigError(f"there is no flow {flow!r} in {options.storage}", next_step="check --storage and the name")
    return layout


def _savepoints(flow: str, storage: str | None) -> Savepoints:
    return _savepoints_in(_layout(flow, storage), load_options({"storage": storage}))


def _savepoints_in(layout: Layout, options: Options) -> Savepoints:
    return Savepoints(layout, partial(store_at, remote_options=options.remote_options))


def _ask(layout: Layout, kind: str, arguments: dict[str, Any], what: str) -> dict[str, Any]:
    """Ask the running flow, and show that one waits."""
    with Console(stderr=True).status(what):
        answer: dict[str, Any] = ask(
            layout.requests, kind, arguments, seconds=_ANSWER_SECONDS, wait=lambda: _check_running(layout)
        )
    return answer


def _is_running(layout: Layout) -> bool:
    return running_pid(layout.lock) is not None


def _check_running(layout: Layout) -> None:
    if not _is_running(layout):
        raise ConfigError("the flow does not run", next_step="start it, or leave this out", flow=layout.root.name)


def _show(savepoint: Savepoint, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(savepoint)))
        return
    table = Table(show_header=False, box=None)
    for key, value in _row(savepoint).items():
        table.add_row(key, value)
    Console().print(table)


def _row(savepoint: Savepoint) -> dict[str, str]:
    taken = datetime.datetime.fromtimestamp(savepoint.created_ms / 1000, tz=datetime.UTC)
    return {
        "name": savepoint.name,
        "flow": savepoint.flow,
        "epoch": str(savepoint.epoch),
        "taken": f"{taken:%Y-%m-%d %H:%M:%S} UTC",
        "in flight": "nothing" if savepoint.is_drained else "kept with it",
        "files": str(savepoint.files),
        "MB": f"{savepoint.size_bytes / 1e6:.2f}",
        "note": savepoint.note,
    }


@app.command()
def create(
    name: Name,
    flow: FlowName,
    storage: Storage = None,
    drain: Annotated[bool, typer.Option(help="Let the sources rest until nothing is under way.")] = True,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: Json = False,
) -> None:
    """Take a savepoint. A running flow takes a new checkpoint for it; of a stopped one the newest is kept."""
    layout = _layout(flow, storage)
    if _is_running(layout):
        taken = _ask(layout, "savepoint", {"name": name, "drain": drain, "note": note}, f"taking savepoint {name}")
        _show(msgspec.convert(taken, Savepoint), as_json)
        return
    lock = FlowLock(layout.lock, flow)
    lock.acquire(is_noted=False)  # nobody lets go meanwhile of what is being copied
    try:
        store = LocalSnapshotStore.reading(layout)
        kept = _kept(store)
        if not kept:
            raise RecoveryError(
                "the flow has no checkpoint", next_step="start it, and take the savepoint then", flow=flow
            )
        manifest = kept[-1]
        savepoint = _savepoints(flow, storage).create(name, manifest, is_drained=False, note=note)
    finally:
        lock.release()
    _show(savepoint, as_json)


@app.command("list")
def list_(flow: FlowName, storage: Storage = None, as_json: Json = False) -> None:
    """Show the savepoints of a flow, oldest first."""
    found = _savepoints(flow, storage).list()
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found)))
        return
    table = Table(*(_row(found[0]) if found else {"no savepoints": ""}))
    for savepoint in found:
        table.add_row(*_row(savepoint).values())
    Console().print(table)


@app.command()
def show(name: Name, flow: FlowName, storage: Storage = None, as_json: Json = False) -> None:
    """Show one savepoint."""
    _show(_savepoints(flow, storage).load(name), as_json)


@app.command()
def delete(name: Name, flow: FlowName, storage: Storage = None) -> None:
    """Delete a savepoint and all it holds. What flows were started from it is not touched."""
    _savepoints(flow, storage).delete(name)
    typer.echo(f"savepoint {name} is deleted")


@app.command()
def export(
    name: Name,
    place: Annotated[str, typer.Argument(help="A folder, or a place in a bucket: s3://bucket/prefix.")],
    flow: FlowName,
    storage: Storage = None,
) -> None:
    """Copy a savepoint to another disk or a bucket."""
    with Console(stderr=True).status(f"copying {name}"):
        size = _savepoints(flow, storage).export(name, place)
    typer.echo(f"savepoint {name} is at {place}: {size / 1e6:.2f} MB")


@app.command("import")
def import_(
    place: Annotated[str, typer.Argument(help="Where it was exported to.")],
    name: Name,
    flow: FlowName,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Take in a savepoint that was exported, on this machine or another. The flow need not exist here yet."""
    options = load_options({"storage": storage})
    layout = Layout(Path(options.storage).resolve(), flow)
    with Console(stderr=True).status(f"copying {place}"):
        savepoint = _savepoints_in(layout, options).bring(place, name)
    _show(savepoint, as_json)


def clone(
    name: Name,
    new_flow: Annotated[str, typer.Argument(help="Name of the flow that begins there.")],
    flow: FlowName,
    storage: Storage = None,
    into: Annotated[str | None, typer.Option(help="Storage folder of the new flow; default: the same.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="old=new: an operator that has another name there.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="An operator that the new flow does not have.")] = None,
    as_json: Json = False,
) -> None:
    """Make a second flow that begins where a savepoint lies, shares nothing with the first, and has empty sinks."""
    options = load_options({"storage": into or storage})
    target = Layout(Path(options.storage).resolve(), new_flow)
    with Console(stderr=True).status(f"cloning {name}"):
        manifest, renaming = _savepoints_anywhere(flow, storage).clone(
            name, target, cutline.ids.FlowName(new_flow), rename=_renames(rename or []), drop=drop or []
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


def _renames(items: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    for old, separator, new in pairs:
        if not (old and separator and new):
            raise ConfigError(f"--rename {old}{separator}{new}: not a pair", next_step="write old=new")
    return {old: new for old, _, new in pairs}


def _savepoints_anywhere(flow: str, storage: str | None) -> Savepoints:
    """Also of a flow that never ran here: an imported savepoint is enough."""
    options = load_options({"storage": storage})
    return _savepoints_in(Layout(Path(options.storage).resolve(), flow), options)


def restore(
    flow: FlowName,
    to: Annotated[str | None, typer.Option(help="Checkpoint number, or name of a savepoint.")] = None,
    at: Annotated[str | None, typer.Option(help="The newest checkpoint at this time: 2026-11-16T02:00:00.")] = None,
    storage: Storage = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would happen, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Take the whole flow back at its next start: state, positions, and what its sinks have published since."""
    layout = _layout(flow, storage)
    if _is_running(layout):
        raise ConfigError("the flow runs", next_step=f"stop it first: cutline stop --flow {flow}", flow=flow)
    store, savepoints = LocalSnapshotStore.reading(layout), _savepoints(flow, storage)
    target, epoch = _target(store, savepoints, to, at)
    kept = [manifest.epoch for manifest in _kept(store) if manifest.epoch > epoch]
    plan = {
        "flow": flow,
        "to": target,
        "epoch": epoch,
        "given_up": kept,
        "is_dry_run": dry_run,
    }
    if not dry_run:
        durable.replace(layout.restore_wish, records.encode("restore", {"to": str(target)}))
    if as_json:
        typer.echo(json.dumps(plan))
        return
    typer.echo(f"flow {flow} {'would go' if dry_run else 'goes'} back to epoch {epoch} when it is started next")
    typer.echo(f"given up: {', '.join(map(str, kept)) or 'no complete checkpoint'}, and all that was done since")
    typer.echo("what sinks have published since is taken back where the sink can; otherwise the start refuses")


def _kept(store: LocalSnapshotStore) -> list[Manifest]:
    """The checkpoints that can be read and that the flow goes on from, ascending."""
    found = []
    for epoch in store.epochs():
        with contextlib.suppress(CutlineError):
            found.append(store.load_manifest(epoch))
    return of_present_history(found, store.generations())


def _target(store: LocalSnapshotStore, savepoints: Savepoints, to: str | None, at: str | None) -> tuple[str, int]:
    kept = _kept(store)
    epochs = [manifest.epoch for manifest in kept]
    if at is not None and to is None:
        try:
            moment = datetime.datetime.fromisoformat(at)
        except ValueError as error:
            raise ConfigError(f"--at: {at!r} is not a time", next_step="write 2026-11-16T02:00:00") from error
        limit_ms = moment.astimezone(datetime.UTC).timestamp() * 1000
        past = [manifest.epoch for manifest in kept if manifest.completed_ms <= limit_ms]
        if not past:
            raise RecoveryError(f"no checkpoint that is kept is as old as {at}", next_step="see cutline verify --all")
        return str(past[-1]), past[-1]
    if to is None or at is not None:
        raise ConfigError("say where to: --to EPOCH, --to SAVEPOINT or --at TIME", next_step="give exactly one of them")
    if not to.isdigit():
        return to, savepoints.load(to).epoch
    if int(to) not in epochs:
        shown = ", ".join(map(str, epochs)) or "none"
        raise RecoveryError(f"epoch {to} is not kept", next_step=f"choose one of {shown}, or a savepoint")
    return to, int(to)


def stop(
    flow: FlowName,
    storage: Storage = None,
    drain: Annotated[bool, typer.Option(help="Process what is under way and publish it first.")] = False,
    savepoint: Annotated[str | None, typer.Option(help="Drain, and keep the last checkpoint under this name.")] = None,
    as_json: Json = False,
) -> None:
    """Stop a running flow at a batch boundary."""
    layout = _layout(flow, storage)
    answer = _ask(layout, "stop", {"drain": drain, "savepoint": savepoint}, "asking the flow to stop")
    with Console(stderr=True).status("waiting until it has stopped"):
        while _is_running(layout):
            time.sleep(0.05)
    typer.echo(json.dumps(answer) if as_json else f"flow {flow} has stopped")
