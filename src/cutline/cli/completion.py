"""What a shell offers when a person presses Tab: names and numbers that exist. Never an error, whatever is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from cutline.cli.flows_here import flows_in
from cutline.config.loading import load_options
from cutline.errors import CutlineError
from cutline.model.layout import Layout


def complete_flow(ctx: typer.Context, incomplete: str) -> list[str]:
    """The flows of the storage; and what may stand in FLOW's place if there is only one."""
    found: list[str] = []
    for layouts in _flows(ctx):
        found = [one.flow for one in layouts]
        if len(layouts) == 1:
            names = [one.name for one in ctx.command.params]
            found += _epochs(layouts[0]) if "epoch" in names or "which" in names else []
            found += _savepoints(layouts[0]) if "name" in names or "which" in names else []
    return [one for one in found if one.startswith(incomplete)]


def complete_epoch(ctx: typer.Context, incomplete: str) -> list[str]:
    return [one for layout in _chosen(ctx) for one in _epochs(layout) if one.startswith(incomplete)]


def complete_savepoint(ctx: typer.Context, incomplete: str) -> list[str]:
    return [one for layout in _chosen(ctx) for one in _savepoints(layout) if one.startswith(incomplete)]


def complete_target(ctx: typer.Context, incomplete: str) -> list[str]:
    """An epoch or a savepoint."""
    return [*complete_savepoint(ctx, incomplete), *complete_epoch(ctx, incomplete)]


def _chosen(ctx: typer.Context) -> Iterator[Layout]:
    """The flow that the line names so far, or the only one."""
    for layouts in _flows(ctx):
        name = ctx.params.get("flow") or ctx.params.get("flow_option")
        yield from (one for one in layouts if one.flow == name or (name is None and len(layouts) == 1))


def _flows(ctx: typer.Context) -> Iterator[list[Layout]]:
    with contextlib.suppress(CutlineError, OSError):
        options = load_options({"storage": ctx.params.get("storage")}, config_file=ctx.params.get("config"))
        yield flows_in(options)


def _epochs(layout: Layout) -> list[str]:
    """Newest first, as far as the names of the files tell."""
    names = [path.parent.name for path in layout.checkpoints.glob("*/manifest.json")]
    numbers = [int(name) for name in names if name.isdigit()]
    return [str(number) for number in sorted(numbers, reverse=True)]


def _savepoints(layout: Layout) -> list[str]:
    return sorted(path.parent.name for path in layout.savepoints.glob("*/savepoint.json"))
