"""``cutline status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from cutline.cli.flows_here import flow_here, no_flow
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.errors import CutlineError, DamagedRecordError
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from cutline.model.status import FlowStatus


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
    """The status that the flow wrote last, its state corrected if its process is gone; None: it wrote none.

    With the restore request that waits, which the flow itself does not look for while it runs.
    """
    from cutline.model.status import FlowStatus
    from cutline.runtime.lock import is_copied
    from cutline.storage.restore_requests import waiting_request

    path = layout.status
    if not path.exists():
        return None
    try:
        loaded = msgspec.json.decode(path.read_bytes(), type=FlowStatus)
    except msgspec.MsgspecError as error:
        raise DamagedRecordError(
            f"the status cannot be read: {error}",
            next_step="a flow that runs writes it again within seconds; what is stored: cutline checkpoints",
            flow=layout.flow,
            path=path,
        ) from error
    if loaded.state not in ("stopped", "failed"):
        if is_copied(layout.lock):
            gone = "not running (this folder is a copy; the status is the original's)"
            loaded = msgspec.structs.replace(loaded, state=gone)
        elif not Path(f"/proc/{loaded.pid}").exists():
            gone = "not running (its process has ended; start it again to resume)"
            loaded = msgspec.structs.replace(loaded, state=gone)
    waiting = waiting_request(layout)
    return loaded if waiting is None else msgspec.structs.replace(loaded, restore_requested=waiting.to)


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
