"""Going back: ``cutline restore``."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import cutline.model.ids
from cutline.cli.options import FlowName, Json, Storage
from cutline.cli.places import flow_layout, is_running, kept_checkpoints, savepoints_of
from cutline.cli.run import load_flow
from cutline.errors import ConfigError, RecoveryError
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreWish, parse_renames, store_wish
from cutline.protocol.history.evolution import Changes, Matching, declared_inputs, match
from cutline.savepoints.store import Savepoints
from cutline.storage.checkpoints import LocalSnapshotStore


def restore(
    flow: FlowName,
    to: Annotated[str | None, typer.Option(help="Checkpoint number, or name of a savepoint.")] = None,
    at: Annotated[str | None, typer.Option(help="The newest checkpoint at this time: 2026-11-16T02:00:00.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="old=new: an operator that has another name now.")] = None,
    allow_dropped: Annotated[
        bool, typer.Option(help="Leave operators behind, with their state, that the flow no longer has.")
    ] = False,
    code: Annotated[
        Path | None, typer.Option(help="Python file that defines the flow as it is now: compare with that.")
    ] = None,
    storage: Storage = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would happen, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Take the whole flow back at its next start: state, positions, and what its sinks have published since.

    Operators are matched by name and by --rename. New ones begin without state; what the flow no longer has is left
    behind only with --allow-dropped.
    """
    layout = flow_layout(flow, storage)
    if is_running(layout):
        raise ConfigError("the flow runs", next_step=f"stop it first: cutline stop --flow {flow}", flow=flow)
    store, savepoints = LocalSnapshotStore.reading(layout), savepoints_of(flow, storage)
    target, epoch = _target(store, savepoints, to, at)
    wish = RestoreWish(to=target, rename=parse_renames(rename or []), allow_dropped=allow_dropped)
    matching = _matching(flow, layout, savepoints, wish, epoch, code)
    kept = [manifest.epoch for manifest in kept_checkpoints(store) if manifest.epoch > epoch]
    plan = {
        "flow": flow,
        "to": target,
        "epoch": epoch,
        "given_up": kept,
        "operators": matching.rows(),
        "is_compared_with_code": code is not None,
        "is_dry_run": dry_run,
    }
    if not dry_run:
        store_wish(layout, wish)
    if as_json:
        typer.echo(json.dumps(plan))
        return
    typer.echo(f"flow {flow} {'would go' if dry_run else 'goes'} back to epoch {epoch} when it is started next")
    typer.echo(f"given up: {', '.join(map(str, kept)) or 'no complete checkpoint'}, and all that was done since")
    typer.echo("what sinks have published since is taken back where the sink can; otherwise the start refuses")
    Console().print(operators_table(matching.rows()))
    if code is None:
        typer.echo("the start compares these with the code; to see that now, give --code FILE")


def operators_table(rows: list[dict[str, Any]]) -> Table:
    """What becomes of every operator."""
    table = Table("operator", "was", "now", "")
    for row in rows:
        table.add_row(row["fate"], row["was"] or "", row["now"] or "", row["note"])
    return table


def _matching(
    flow: str, layout: Layout, savepoints: Savepoints, wish: RestoreWish, epoch: Epoch, code: Path | None
) -> Matching:
    """By the code if it was given; else as if the code had exactly what is there, under the new names."""
    recorded = _inputs_then(layout, savepoints, wish.to, epoch)
    if code is not None:
        declared = declared_inputs(load_flow(code, flow).graph())
    else:
        names = {old: OperatorId(wish.rename.get(old, old)) for old in recorded}
        declared = {new: tuple(names[one] for one in recorded[old]) for old, new in names.items()}
    changes = Changes(rename=wish.rename, allow_dropped=wish.allow_dropped)
    return match(recorded, declared, flow=cutline.model.ids.FlowName(flow), where=f"epoch {epoch}", changes=changes)


def _inputs_then(
    layout: Layout, savepoints: Savepoints, target: str, epoch: Epoch
) -> dict[OperatorId, list[OperatorId]]:
    """What each operator of the checkpoint was reading."""
    if target.isdigit():
        store = LocalSnapshotStore.reading(layout)
        manifest, generations = store.load_manifest(epoch), store.generations()
    else:
        replica = savepoints.replica(target)
        manifest, generations = replica.load_manifest(epoch), replica.load_generations()
    for generation in generations:
        if generation.generation == manifest.generation:
            return generation.inputs
    return {name: list(cut.positions) for name, cut in manifest.operators.items()}


def _target(store: LocalSnapshotStore, savepoints: Savepoints, to: str | None, at: str | None) -> tuple[str, Epoch]:
    kept = kept_checkpoints(store)
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
    return to, Epoch(int(to))
