"""``cutline verify``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutline.cli import failures
from cutline.cli.completion import complete_target
from cutline.cli.failures import ExitCode, UsageError
from cutline.cli.flows_here import flow_here, flows_in, no_flow
from cutline.cli.options import Config, FlowName, Json, Storage
from cutline.cli.words import counted
from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError, CutlineError
from cutline.model.ids import Epoch
from cutline.model.layout import Layout

if TYPE_CHECKING:
    from rich.console import Console

    from cutline.maintenance.findings import EpochReport, Finding

_COLOURS = {"good": "green", "damaged": "bold red", "left": "yellow"}
_LEFT = "left: belongs to a history that a restore abandoned; nothing is restored from it"


def verify(
    flow: FlowName = None,
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="EPOCH|NAME",
            help="Which checkpoint or savepoint; default: the newest checkpoint. Alone, it is one of the only flow.",
            autocompletion=complete_target,
            show_default=False,
        ),
    ] = None,
    storage: Storage = None,
    config: Config = None,
    every: Annotated[bool, typer.Option("--all", help="Every complete checkpoint.")] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="Checkpoints in the remote tier; downloads every byte.")
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, not only sizes.")] = False,
    as_json: Json = False,
) -> None:
    """Check that checkpoints are whole. Reads only, also while the flow runs. Exit code 1: damage, 2: cannot check."""
    from rich.console import Console

    from cutline.cli.places import epoch_number

    try:
        if which is not None and every:
            raise UsageError("EPOCH and --all exclude one another", next_step="give one of them")
        flow, which = _flow_and_which(flow, which, load_options({"storage": storage}, config_file=config))
        here = flow_here(flow, storage, config, must_have_run=False)
        layout, options = here.layout, here.options
        roots = (layout.identity, layout.generations, layout.checkpoints, layout.savepoints)
        if not remote and not any(path.exists() for path in roots):
            raise no_flow(here.flow, options)
        with _progress(Console(stderr=True), is_shown=not as_json) as on_read:
            problems, reports = _look(layout, options, which, every=every, remote=remote, deep=deep, on_read=on_read)
    except (CutlineError, OSError) as error:
        raise typer.Exit(failures.report(error, as_json=as_json, code=ExitCode.WRONG_USE)) from error
    count = len(problems) + sum(len(report.problems) for report in reports)
    if as_json:
        typer.echo(json.dumps(_as_json(here.flow, problems, reports, count)))
    else:
        is_copy = remote or (which is not None and epoch_number(which) is None)  # of a copy every byte is read
        _print(Console(), here.flow, problems, reports, count, deep=deep or is_copy)
    if count:
        raise typer.Exit(ExitCode.FAILED)


def _flow_and_which(flow: str | None, which: str | None, options: Options) -> tuple[str | None, str | None]:
    """One word alone is a flow if there is one of that name; otherwise a checkpoint or savepoint of the only flow."""
    from cutline.cli.places import epoch_number

    if flow is None or which is not None:
        return flow, which
    names = [one.flow for one in flows_in(options)]
    if flow not in names and len(names) > 1 and epoch_number(flow) is not None:
        raise UsageError(
            f"epoch {flow} of which flow? {options.storage} has {len(names)} flows: {', '.join(names)}",
            next_step=f"write cutline verify FLOW {flow}",
        )
    return (None, flow) if flow not in names and len(names) == 1 else (flow, None)


def _look(
    layout: Layout,
    options: Options,
    which: str | None,
    *,
    every: bool,
    remote: bool,
    deep: bool,
    on_read: Callable[[int], None],
) -> tuple[list[Finding], list[EpochReport]]:
    """Problems of the flow as a whole, and of each requested checkpoint."""
    from cutline.cli.places import epoch_number
    from cutline.connectors.replay_guard import ReplayGuard
    from cutline.maintenance.verify import Verifier
    from cutline.maintenance.verify_copies import verify_copies
    from cutline.ports.inspection import CoordinatorRecords
    from cutline.runtime.stores import store_at
    from cutline.savepoints.store import Savepoints
    from cutline.storage.inspector import LocalInspector
    from cutline.storage.metadata.inspector import inspect_coordinator
    from cutline.tiers.remote_tier import RemoteTier

    def look(folder: Layout, epoch: Epoch) -> EpochReport:
        no_records = CoordinatorRecords()  # the coordinator's records are not copied
        return Verifier(
            folder, LocalInspector(folder, ReplayGuard()), lambda: no_records, deep=True, on_read=on_read
        ).one(epoch)

    flow, epoch = layout.root.name, epoch_number(which)
    if remote:
        if not options.remote:
            raise ConfigError("there is no remote tier", next_step="set remote in cutline.toml or CUTLINE_REMOTE")
        store = store_at(f"{options.remote.rstrip('/')}/{flow}", options.remote_options, creates=False)
        known = RemoteTier.open(store, layout).checkpoints.epochs()
        wanted = None if every else [epoch] if epoch is not None else known[-1:]
        return [], verify_copies(lambda folder: RemoteTier.open(store, folder), flow, look, wanted)
    if which is not None and epoch is None:
        savepoints = Savepoints(layout, store_at)
        card = savepoints.load(which)
        return [], verify_copies(lambda folder: savepoints.tier(which, folder), flow, look, [card.epoch])
    verifier = Verifier(
        layout,
        LocalInspector(layout, ReplayGuard()),
        lambda: inspect_coordinator(layout.metadata),
        deep=deep,
        on_read=on_read,
    )
    if epoch is not None:
        reports = [verifier.one(epoch)]
    else:
        reports = list(verifier.every() if every else verifier.newest())
    return verifier.flow_problems(), reports


@contextmanager
def _progress(console: Console, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show how many files and bytes have been read; the total is not known in advance."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as view:
        task = view.add_task("looking", total=None)
        files = size_bytes = 0

        def on_read(size: int) -> None:
            nonlocal files, size_bytes
            files, size_bytes = files + 1, size_bytes + size
            view.update(task, description=f"{files:,} files, {size_bytes / 1e6:,.1f} MB")

        yield on_read


def _as_json(flow: str, problems: list[Finding], reports: list[EpochReport], count: int) -> dict[str, Any]:
    return {
        "flow": flow,
        "epochs": [
            {
                "epoch": report.epoch,
                "verdict": report.verdict,
                "problems": [_finding(finding) for finding in report.problems],
                "notes": report.notes,
                "checked_files": report.checked_files,
                "checked_bytes": report.checked_bytes,
            }
            for report in reports
        ],
        "flow_problems": [_finding(finding) for finding in problems],
        "problems": count,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "epoch": finding.epoch,
        "operator": finding.operator,
        "path": finding.path,
        "problem": finding.problem,
    }


def _print(
    console: Console, flow: str, problems: list[Finding], reports: list[EpochReport], count: int, *, deep: bool
) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"checkpoints of {escape(flow)}", title_justify="left")
    for name, justify in (("epoch", "right"), ("verdict", "left"), ("files", "right"), ("bytes", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal, which a loop hides
    for report in reports:
        verdict = f"[{_COLOURS[report.verdict]}]{report.verdict}[/]"
        table.add_row(str(report.epoch), verdict, f"{report.checked_files:,}", f"{report.checked_bytes:,}")
    console.print(table if reports else "There is no complete checkpoint yet.")
    if any(report.verdict == "left" for report in reports):
        console.print(_LEFT)
    for finding in [*problems, *(finding for report in reports for finding in report.problems)]:
        _print_finding(console, finding)
    for note in sorted({note for report in reports for note in report.notes}):
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if count:
        console.print(f"[bold red]{counted(count, 'problem')}[/]", highlight=False)
    else:
        console.print(f"No damage. {'Every byte was read.' if deep else 'Contents of large files: --deep.'}")


def _print_finding(console: Console, finding: Finding) -> None:
    """Printed outside of the table: paths are long and must not be broken across lines."""
    from rich.markup import escape

    where = "the flow" if finding.epoch is None else f"epoch {finding.epoch}"
    who = f", {finding.operator}" if finding.operator else ""
    console.print(f"[bold red]{where}{escape(who)}[/]: {escape(finding.path)}", highlight=False, soft_wrap=True)
    console.print(f"    {escape(finding.problem)}", highlight=False, soft_wrap=True)
    console.print(f"    Next: {escape(finding.next_step)}", highlight=False, soft_wrap=True)
