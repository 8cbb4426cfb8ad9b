"""``cutline status``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import typer

from cutline.cli.flows_here import flow_here, no_flow
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.errors import CutlineError, DamagedRecordError
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from cutline.model.status import CloneOrigin, FlowStatus


def status(
    flow: FlowName = None,
    storage: Storage = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the status of a flow: operators, channels, sinks, checkpoints. Only reads files."""
    from rich.console import Console

    from cutline.cli.running.live import flow_view

    here = flow_here(flow, storage, config, must_have_run=False)
    loaded = load_status(here.layout)
    if loaded is None:
        raise no_flow(here.flow, here.options)
    if as_json:
        typer.echo(as_json_line(loaded))
    else:
        Console().print(flow_view(loaded))


def load_status(layout: Layout) -> FlowStatus | None:
    """The status that the flow wrote last, its state corrected if its process is gone or it is starting again.

    With the restore request that waits, which the flow itself does not look for while it runs. Of a flow that starts
    for the first time or was never started, a status without operators; None: there is no flow.
    """
    from cutline.runtime.process.state import state_of
    from cutline.storage.restore_requests import waiting_request

    written = _written(layout)
    now = state_of(layout, written)
    if written is None and now.starting is None and not layout.identity.exists():
        return None
    loaded = written if written is not None else _nothing_yet(layout)
    waiting = waiting_request(layout)
    if now.starting is not None:
        # A request that is stored is what this start carries out.
        restores = now.starting.restores or (waiting.to if waiting is not None else "")
        start = msgspec.structs.replace(now.starting, restores=restores)
        return msgspec.structs.replace(loaded, state=now.state, pid=start.pid, starting=start, failure="")
    loaded = msgspec.structs.replace(loaded, state=now.state)
    return loaded if waiting is None else msgspec.structs.replace(loaded, restore_requested=waiting.to)


def _written(layout: Layout) -> FlowStatus | None:
    """As the flow wrote it last."""
    from cutline.model.status import FlowStatus

    path = layout.status
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=FlowStatus)
    except msgspec.MsgspecError as error:
        raise DamagedRecordError(
            f"the status cannot be read: {error}",
            next_step="a flow that runs writes it again within seconds; what is stored: cutline checkpoints",
            flow=layout.flow,
            path=path,
        ) from error


def _nothing_yet(layout: Layout) -> FlowStatus:
    """Of a flow that has not run yet, with all the keys that programs rely on."""
    from cutline.model import ids
    from cutline.model.status import CheckpointStatus, FlowStatus, HealthStatus, MessageCounts, RecoveryStatus

    return FlowStatus(
        flow=ids.FlowName(layout.flow),
        pid=0,
        state="",
        generation=ids.Generation(0),
        recovery=RecoveryStatus(path="", epoch=None, reason="", problems=[], lost_input=[], operators=[], counts={}),
        operators={},
        sinks={},
        health=HealthStatus(healthy=True, failures=0, reason=""),
        checkpoints=CheckpointStatus(last_epoch=ids.NO_EPOCH, min_epoch=ids.NO_EPOCH, pins=[], complete=[], pending={}),
        messages=MessageCounts(links={}, acknowledgements={}),
        remote=None,
        history=[],
        cloned_from=origin_of(layout) if not layout.metadata.exists() else None,
    )


def origin_of(layout: Layout) -> CloneOrigin | None:
    """The flow that this one was cloned from; None: it is no clone, or was made by a former version."""
    from cutline.base import records
    from cutline.model.status import CloneOrigin

    try:
        identity = records.load("flow", layout.identity, dict, flow=layout.flow)
        return msgspec.convert(identity.get("cloned_from"), CloneOrigin | None)
    except (CutlineError, OSError, msgspec.MsgspecError):
        return None  # ``verify`` reports what is wrong with it


def status_if_readable(layout: Layout, notes: list[str]) -> FlowStatus | None:
    """For a command that can do without it: a status that cannot be read counts as none, with a note."""
    try:
        return load_status(layout)
    except (CutlineError, OSError) as error:
        what = error.without_next_step() if isinstance(error, CutlineError) else str(error)
        notes.append(f"{what}; what only the status knows (rates, which inputs can be read again) is left out")
        return None


def as_json_line(status: FlowStatus) -> str:
    return json.dumps(msgspec.to_builtins(status))
