"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutline.cli.completion import complete_epoch, complete_flow, complete_savepoint
from cutline.cli.failures import UsageError
from cutline.config.options import OPTION_NAMES, doc_of

FlowName = Annotated[
    str | None,
    typer.Argument(
        metavar="FLOW",
        help="Name of the flow; may be left out if the storage has only one.",
        autocompletion=complete_flow,
        show_default=False,
    ),
]
EpochNumber = Annotated[
    str, typer.Argument(metavar="EPOCH", help="Number of the checkpoint.", autocompletion=complete_epoch)
]
SavepointName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the savepoint.", autocompletion=complete_savepoint)
]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the savepoint.")]
Storage = Annotated[str | None, typer.Option(help=doc_of("storage"), show_default=False)]
Config = Annotated[
    Path | None, typer.Option(help="Configuration file; default: cutline.toml, if it exists.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help=f"Any option, as name=value: {', '.join(OPTION_NAMES)}."),
]


def parse_renames(items: list[str]) -> dict[str, str]:
    """Parse ``old=new`` pairs."""
    pairs = [item.partition("=") for item in items]
    for old, separator, new in pairs:
        if not (old and separator and new):
            raise UsageError(f"--rename {old}{separator}{new}: not a pair", next_step="write old=new")
    return {old: new for old, _, new in pairs}
