"""``cutline restore``."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cutline.cli.options import FlowName, Json, Storage, parse_renames
from cutline.cli.places import epoch_number, flow_layout, is_running, kept_checkpoints, savepoints_of
from cutline.cli.run import load_flow
from cutline.errors import ConfigError, RecoveryError
from cutline.model import ids
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.model.status import OperatorFate
from cutline.protocol.history.evolution import Changes, Evolution, declared_inputs, match_operators
from cutline.runtime.launch import store_request
from cutline.runtime.status import operator_fates
from cutline.savepoints.store import Savepoints
from cutline.storage.local import LocalStore


def restore(
    flow: FlowName,
    to: Annotated[str | None, typer.Option(help="Checkpoint number, or name of a savepoint.")] = None,
    at: Annotated[str | None, typer.Option(help="The newest checkpoint at this time: 2026-11-16T02:00:00.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="old=new: an operator that was renamed.")] = None,
    allow_dropped: Annotated[
        bool, typer.Option(help="Leave behind operators that the flow no longer has, with their state.")
    ] = False,
    code: Annotated[
        Path | None, typer.Option(help="Python file that defines the flow, to compare its operators now.")
    ] = None,
    storage: Storage = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would happen, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Restore the whole flow at its next start: state and positions; its sinks are rewound.

    Operators are matched by name and by --rename. New ones start without state; operators that the flow no longer has
    are left behind only with --allow-dropped.
    """
    layout = flow_layout(flow, storage)
    if is_running(layout):
        raise ConfigError("the flow runs", next_step=f"stop it first: cutline stop --flow {flow}", flow=flow)
    store, savepoints = LocalStore.reading(layout), savepoints_of(flow, storage)
    target, epoch = _target(store, savepoints, to, at)
    request = RestoreRequest(to=target, rename=parse_renames(rename or []), allow_dropped=allow_dropped)
    matching = _matching(flow, layout, savepoints, request, epoch, code)
    kept = [manifest.epoch for manifest in kept_checkpoints(store) if manifest.epoch > epoch]
    fates = operator_fates(matching)
    plan = {
        "flow": flow,
        "to": target,
        "epoch": epoch,
        "given_up": kept,
        "operators": msgspec.to_builtins(fates),
        "is_compared_with_code": code is not None,
        "is_dry_run": dry_run,
    }
    if not dry_run:
        store_request(layout, request)
    if as_json:
        typer.echo(json.dumps(plan))
        return
    typer.echo(f"the next start of flow {flow} {'would restore' if dry_run else 'restores'} epoch {epoch}")
    typer.echo(f"discarded: {', '.join(map(str, kept)) or 'no complete checkpoint'}, and all work since then")
    typer.echo("sinks are rewound to this epoch; if one cannot be rewound, the start refuses")
    Console().print(operators_table(fates))
    if code is None:
        typer.echo("the start compares these with the code; to compare them now, give --code FILE")


def operators_table(fates: list[OperatorFate]) -> Table:
    """What the restore does with every operator."""
    table = Table("operator", "was", "now", "")
    for one in fates:
        table.add_row(*map(Text, (one.fate, one.was or "", one.now or "", one.note)))
    return table


def _matching(
    flow: str, layout: Layout, savepoints: Savepoints, request: RestoreRequest, epoch: Epoch, code: Path | None
) -> Evolution:
    """Match against the code if it was given; else against the recorded operators, under their new names."""
    recorded = _inputs_then(layout, savepoints, request.to, epoch)
    if code is not None:
        declared = declared_inputs(load_flow(code, flow).graph())
    else:
        names = {old: OperatorId(request.rename.get(old, old)) for old in recorded}
        declared = {new: tuple(names[one] for one in recorded[old]) for old, new in names.items()}
    changes = Changes(rename=request.rename, allow_dropped=request.allow_dropped)
    return match_operators(recorded, declared, flow=ids.FlowName(flow), where=f"epoch {epoch}", changes=changes)


def _inputs_then(
    layout: Layout, savepoints: Savepoints, target: str, epoch: Epoch
) -> dict[OperatorId, list[OperatorId]]:
    """The inputs of each operator of the checkpoint."""
    if epoch_number(target) is not None:
        store = LocalStore.reading(layout)
        manifest, generations = store.checkpoints.load_manifest(epoch), store.generations.load_all()
    else:
        copies = savepoints.tier(target).checkpoints
        manifest, generations = copies.load_manifest(epoch), copies.load_generations()
    for generation in generations:
        if generation.generation == manifest.generation:
            return generation.inputs
    return {name: list(cut.positions) for name, cut in manifest.operators.items()}


def _target(store: LocalStore, savepoints: Savepoints, to: str | None, at: str | None) -> tuple[str, Epoch]:
    kept = kept_checkpoints(store)
    epochs = [manifest.epoch for manifest in kept]
    if at is not None and to is None:
        try:
            moment = datetime.datetime.fromisoformat(at)
            limit_ms = moment.astimezone(datetime.UTC).timestamp() * 1000
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"--at: {at!r} is not a time", next_step="write 2026-11-16T02:00:00") from error
        past = [manifest.epoch for manifest in kept if manifest.completed_ms <= limit_ms]
        if not past:
            raise RecoveryError(f"no available checkpoint is as old as {at}", next_step="see cutline verify --all")
        return str(past[-1]), past[-1]
    if to is None or at is not None:
        raise ConfigError(
            "no target: use --to EPOCH, --to SAVEPOINT or --at TIME", next_step="give exactly one of them"
        )
    epoch = epoch_number(to)
    if epoch is None:
        return to, savepoints.load(to).epoch
    if epoch not in epochs:
        shown = ", ".join(map(str, epochs)) or "none"
        raise RecoveryError(f"epoch {epoch} is not available", next_step=f"choose one of {shown}, or a savepoint")
    return to, epoch
