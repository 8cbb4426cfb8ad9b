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
from cutline.config.loading import load_options
from cutline.errors import ConfigError
from cutline.model.layout import Layout
from cutline.model.status import FlowStatus


def status(
    flow: Annotated[str, typer.Argument(help="Name of the flow.")],
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show the status of a flow: operators, channels, sinks, checkpoints. Only reads files."""
    options = load_options({"storage": storage})
    path = Layout(Path(options.storage), flow).status
    if not path.exists():
        raise ConfigError(f"there is no flow {flow!r} in {options.storage}", next_step="check --storage and the name")
    try:
        loaded = msgspec.json.decode(path.read_bytes(), type=FlowStatus)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a status: {error}", next_step="start the flow to write it again") from error
    if loaded.state not in ("stopped", "failed") and not Path(f"/proc/{loaded.pid}").exists():
        gone = "not running (its process has ended; start it again to resume)"
        loaded = msgspec.structs.replace(loaded, state=gone)
    if as_json:
        typer.echo(as_json_line(loaded))
    else:
        Console().print(flow_view(loaded))


def as_json_line(status: FlowStatus) -> str:
    return json.dumps(msgspec.to_builtins(status))
