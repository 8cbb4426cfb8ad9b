"""``cutline stop``."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from cutline.cli.flows_here import flow_here
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.errors import ConfigError


def stop(
    flow: FlowName = None,
    storage: Storage = None,
    config: Config = None,
    drain: Annotated[bool, typer.Option("--drain", help="Process what is under way and publish it first.")] = False,
    savepoint: Annotated[str | None, typer.Option(help="Drain, and keep the last checkpoint under this name.")] = None,
    as_json: Json = False,
) -> None:
    """Stop a running flow at a batch boundary."""
    from rich.console import Console

    from cutline.cli.asking import ask_running
    from cutline.cli.places import is_running

    here = flow_here(flow, storage, config)
    if not is_running(here.layout):
        raise ConfigError(
            "the flow does not run",
            next_step="nothing is left to stop; cutline status shows it",
            flow=here.flow,
        )
    answer = ask_running(here.layout, "stop", {"drain": drain, "savepoint": savepoint}, "asking the flow to stop")
    with Console(stderr=True).status("waiting until it has stopped"):
        while is_running(here.layout):
            time.sleep(0.05)
    typer.echo(json.dumps(answer) if as_json else f"flow {here.flow} has stopped")
