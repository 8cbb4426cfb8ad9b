"""``cutline simulate``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.testing.simulator import Outcome, Report


def simulate(
    seeds: Annotated[int, typer.Option(help="Number of seeds to run.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="The first of them.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Replay one seed and print its trace.", min=0)] = None,
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Run the protocol under simulated faults and check that nothing is lost, duplicated or stuck.

    The same seed gives the same trace, byte for byte. A seed that fails prints its trace; replay it with --seed.
    """
    from rich.console import Console

    from cutline.testing.simulator import simulate as simulate_seed

    if seed is not None:
        outcome = simulate_seed(seed, with_story=True)
        _show_story(outcome, as_json=as_json)
        if outcome.violation:
            raise typer.Exit(1)
        return
    report = _run(range(first, first + seeds), workers or os.cpu_count() or 1, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _show(Console(), report)
    if report.violations:
        raise typer.Exit(1)


def _run(seeds: range, workers: int, *, quiet: bool) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cutline.testing.simulator import run_seeds

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        return run_seeds(
            seeds,
            workers=workers,
            on_done=lambda report: progress.update(
                task, completed=report.seeds, description=f"seeds ({len(report.violations)} violations)"
            ),
        )


def _show_story(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"seed": outcome.seed, "violation": outcome.violation, "story": outcome.story}))
        return
    typer.echo(outcome.story)
    typer.echo(f"seed {outcome.seed}: {outcome.violation or 'nothing lost, nothing duplicated, nothing stuck'}")


def _show(console: Console, report: Report) -> None:
    from rich.markup import escape

    facts = report.as_json()
    console.print(
        f"{report.seeds} seeds, {report.steps:,} steps: {facts['checkpoints']:,} checkpoints, "
        f"{facts['aborts']:,} aborts, {facts['resumes']:,} resumes, {facts['restores']:,} restores",
        highlight=False,
    )
    console.print(
        "faults: " + ", ".join(f"{escape(name)} {count:,}" for name, count in facts["faults"].items()), highlight=False
    )
    for outcome in report.violations[:3]:
        console.print(outcome.story, highlight=False, markup=False)
        console.print(f"[bold red]seed {outcome.seed}[/]: {escape(str(outcome.violation))}", highlight=False)
    verdict = "[bold red]violations" if report.violations else "[bold green]violations"
    console.print(f"{verdict}: {len(report.violations)}[/]")
    if report.violations:
        console.print(f"Replay with: cutline simulate --seed {min(one.seed for one in report.violations)}")
