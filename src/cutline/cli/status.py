"""``cutline status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from cutline.cli.live import flow_view
from cutline.cli.options import Json, Storage
from cutline.cli.places import layout_in, no_flow
from cutline.config.loading import load_options
from cutline.errors import ConfigError
from cutline.model.status import FlowStatus
from cutline.runtime.lock import is_copied


def status(
    flow: Annotated[str, typer.Argument(help="Name of the flow.")],
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show the status of a flow: operators, channels, sinks, checkpoints. Only reads files."""
    options = load_options({"storage": storage})
    layout = layout_in(options, flow)
    path = layout.status
    if not path.exists():
        raise no_flow(flow, options)
    try:
        loaded = msgspec.json.decode(path.read_bytes(), type=FlowStatus)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a status: {error}", next_step="start the flow to write it again") from error
    if loaded.state not in ("stopped", "failed"):
        if is_copied(layout.lock):
            gone = "not running (this folder is a copy; the status is the original's)"
            loaded = msgspec.structs.replace(loaded, state=gone)
        elif not Path(f"/proc/{loaded.pid}").exists():
            gone = "not running (its process has ended; start it again to resume)"
            loaded = msgspec.structs.replace(loaded, state=gone)
    if as_json:
        typer.echo(as_json_line(loaded))
    else:
        Console().print(flow_view(loaded))


def as_json_line(status: FlowStatus) -> str:
    return json.dumps(msgspec.to_builtins(status))
