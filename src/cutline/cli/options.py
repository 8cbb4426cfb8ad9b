"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from cutline.config.options import OPTION_NAMES, doc_of
from cutline.errors import ConfigError

FlowName = Annotated[str, typer.Option("--flow", help="Name of the flow.")]
Storage = Annotated[str | None, typer.Option(help=doc_of("storage"))]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help=f"Any option, as name=value: {', '.join(OPTION_NAMES)}.")
]


def parse_renames(items: list[str]) -> dict[str, str]:
    """Parse ``old=new`` pairs."""
    pairs = [item.partition("=") for item in items]
    for old, separator, new in pairs:
        if not (old and separator and new):
            raise ConfigError(f"--rename {old}{separator}{new}: not a pair", next_step="write old=new")
    return {old: new for old, _, new in pairs}
