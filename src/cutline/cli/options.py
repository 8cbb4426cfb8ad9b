"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

FlowName = Annotated[str, typer.Option("--flow", help="Name of the flow.")]
Storage = Annotated[str | None, typer.Option(help="Folder for everything Cutline stores.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
