"""``cutline restore``."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cutline.base import durable
from cutline.cli.completion import complete_target
from cutline.cli.failures import ExitCode, UsageError
from cutline.cli.flows_here import FlowHere, flow_here
from cutline.cli.history.moments import EXAMPLES, parse_moment, shown_moment
from cutline.cli.options import Config, FlowName, Json, Settings, Storage, parse_renames
from cutline.cli.words import local
from cutline.config.loading import load_options
from cutline.errors import ConfigError, RecoveryError
from cutline.model.ids import Epoch
from cutline.model.restore_request import RestoreRequest

if TYPE_CHECKING:
    from rich.table import Table

    from cutline.cli.history.preview import Previewed, Target
    from cutline.cli.history.report import RestoreReport
    from cutline.cli.history.restore_now import RestoreNow, Successor
    from cutline.config.options import Options
    from cutline.flow import Flow
    from cutline.model.status import OperatorFate
    from cutline.savepoints.store import Savepoints


#: How many available checkpoints an error names; there may be hundreds.
_EPOCHS_NAMED = 10

To = Annotated[
    str | None,
    typer.Option(help="Checkpoint number, name of a savepoint, or before-last-deploy.", autocompletion=complete_target),
]
At = Annotated[str | None, typer.Option(help=f"The newest checkpoint at this time: {EXAMPLES}.")]
Rename = Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="old=new: an operator that was renamed.")]
AllowDropped = Annotated[
    bool, typer.Option("--allow-dropped", help="Leave behind operators that the flow no longer has, with their state.")
]
Code = Annotated[Path | None, typer.Option(help="Python file that defines the flow, to compare its operators now.")]
Now = Annotated[
    bool, typer.Option("--now", help="Stop the flow if it runs, then restore and run it, as cutline run does.")
]
Run = Annotated[
    Path | None,
    typer.Option(help="With --now, the Python file to run; default: the file that the stopped process ran."),
]
NoStart = Annotated[
    bool, typer.Option("--no-start", help="With --now, only stop it: a service manager or a person starts it.")
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="Withdraw a request that is stored: the next start continues where it was.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, also while the flow runs, and change nothing.")
]


def restore(
    flow: FlowName = None,
    to: To = None,
    at: At = None,
    rename: Rename = None,
    allow_dropped: AllowDropped = False,
    code: Code = None,
    now: Now = False,
    run: Run = None,
    no_start: NoStart = False,
    storage: Storage = None,
    config: Config = None,
    option: Settings = None,
    dry_run: DryRun = False,
    cancel: Cancel = False,
    as_json: Json = False,
) -> None:
    """Restore the whole flow at its next start: state and positions; its sinks are rewound.

    The sources are asked whether their input can be read again; the sinks of a running flow, whether they can be
    rewound so far; of a stopped flow, what they said last counts. If the start would refuse, nothing is changed and the
    exit code is 1. Operators are matched by name and by --rename. New ones start without state; operators that the flow
    no longer has are left behind only with --allow-dropped.
    """
    from cutline.cli.places import savepoints_of

    _check_options(now=now, run=run, no_start=no_start, dry_run=dry_run, option=option)
    moment, renames = _check_target(to, at, cancel=cancel), parse_renames(rename or [])
    here = flow_here(flow, storage, config)
    restoring: RestoreNow | None = None
    with _alone(here, is_needed=not dry_run):
        if cancel:
            _withdraw(here, as_json=as_json)
            return
        if not (now or dry_run):
            _refuse_running(here)
        savepoints = savepoints_of(here)
        target = target_of(here, savepoints, to, moment)
        request = RestoreRequest(to=target.to, rename=renames, allow_dropped=allow_dropped)
        successor = _successor(here, target, run, option, config) if now and not no_start else None
        options = successor.options if successor is not None else _options(here, option, config)
        preview = partial(
            _previewed, here, savepoints, target, request, _code(successor, run or code, here), options=options
        )
        previewed = preview()
        report = _with_moment(msgspec.structs.replace(previewed.report, is_dry_run=dry_run), moment)
        if not dry_run and not now and not report.would_refuse:
            _store_request(here, request, report)
        _show(report, as_json=as_json and not (report.would_refuse and not dry_run))
        if report.would_refuse and dry_run:
            raise typer.Exit(ExitCode.FAILED)
        _check(previewed)
        if now and not dry_run:
            again = partial(preview, missing_input=previewed.missing_input)
            restoring = _prepared(here, request, report, successor, lambda: _check(again()), as_json=as_json)
    if restoring is not None and successor is not None:
        restoring.start(successor, as_json=as_json)


@contextlib.contextmanager
def _alone(here: FlowHere, *, is_needed: bool) -> Iterator[None]:
    """One command at a time requests a restore of a flow, or withdraws it."""
    if not is_needed:
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(durable.exclusive(here.layout.restore_lock, waits=False))
        except BlockingIOError as error:
            raise ConfigError(
                "another command is at work on a restore of this flow",
                next_step="wait until it has ended, or interrupt it; cutline restore --dry-run shows what it requests",
                flow=here.flow,
            ) from error
        yield


def _successor(
    here: FlowHere, target: Target, run: Path | None, option: list[str] | None, config: Path | None
) -> Successor:
    from cutline.cli.history.restore_now import Successor

    successor = Successor.of(here, run, option or [], config)
    if run is None:
        successor.refuse_what_runs(target.code)
    return successor


def _options(here: FlowHere, option: list[str] | None, config: Path | None) -> Options | None:
    """What the start is given, as far as this command is told; None: nothing, so those of the running flow count."""
    if not option:
        return None
    given = dict(item.partition("=")[::2] for item in option)
    return load_options({**given, "storage": str(here.layout.root.parent)}, config_file=config)


def _prepared(
    here: FlowHere,
    request: RestoreRequest,
    report: RestoreReport,
    successor: Successor | None,
    check_again: Callable[[], None],
    *,
    as_json: bool,
) -> RestoreNow:
    """The flow is stopped, and the request stored."""
    from rich.console import Console

    from cutline.cli.history.restore_now import RestoreNow

    restoring = RestoreNow(
        here=here,
        request=request,
        report=report,
        successor=successor,
        check_again=check_again,
        console=Console(stderr=True, quiet=as_json),
    )
    restoring.prepare()
    return restoring


def _withdraw(here: FlowHere, *, as_json: bool) -> None:
    from cutline.storage.restore_requests import remove_request, waiting_request

    request, was_there = waiting_request(here.layout), here.layout.restore_request.exists()
    remove_request(here.layout)
    if as_json:
        typer.echo(json.dumps({"flow": here.flow, "withdrawn": request.to if request is not None else None}))
    elif request is None and was_there:
        typer.echo(f"a request to restore flow {here.flow}, which could not be read, is withdrawn")
    elif request is None:
        typer.echo(f"no restore of flow {here.flow} is requested")
    else:
        typer.echo(f"the request to restore flow {here.flow} to {request.to} is withdrawn")


def _refuse_running(here: FlowHere) -> None:
    from cutline.cli.places import is_running

    if is_running(here.layout):
        raise ConfigError(
            "the flow runs",
            next_step=f"add --now to stop it, restore and run it; or stop it first: cutline stop {here.flow}",
            flow=here.flow,
        )


def _check_options(*, now: bool, run: Path | None, no_start: bool, dry_run: bool, option: list[str] | None) -> None:
    if not now and (run is not None or no_start or option) and not dry_run:
        raise UsageError("--run, --no-start and --set are for --now", next_step="add --now, or leave them out")
    if no_start and (run is not None or option):
        raise UsageError("--no-start runs nothing", next_step="leave out --run and --set")


def _check_target(to: str | None, at: str | None, *, cancel: bool) -> datetime.datetime | None:
    """The moment of --at. Exactly one target is given."""
    if not cancel and (to is None) == (at is None):
        problem = "there is no target" if to is None else "there are two targets"
        raise UsageError(f"{problem}: --to EPOCH, --to SAVEPOINT or --at TIME", next_step="give exactly one of them")
    return parse_moment(at, now=_now()) if at is not None else None


def _check(previewed: Previewed) -> None:
    """Raise what the start would raise."""
    from cutline.protocol.recovery.plan import Refusal

    if isinstance(previewed.decision, Refusal):
        raise previewed.decision.error()


def _previewed(
    here: FlowHere,
    savepoints: Savepoints,
    target: Target,
    request: RestoreRequest,
    code: Flow | None,
    *,
    options: Options | None,
    missing_input: str | None = None,
) -> Previewed:
    from cutline.cli.history.preview import preview_of

    return preview_of(here, savepoints, target, request, code, options, missing_input=missing_input)


def _code(successor: Successor | None, file: Path | None, here: FlowHere) -> Flow | None:
    """What will run, as far as it is known."""
    if successor is not None:
        return successor.flow
    if file is None:
        return None
    from cutline.cli.running.run import load_flow

    return load_flow(file, here.flow)


def _with_moment(report: RestoreReport, moment: datetime.datetime | None) -> RestoreReport:
    if moment is None:
        return report
    here = moment.astimezone()
    return msgspec.structs.replace(
        report, at=moment.isoformat(), at_local=here.isoformat(), zone=here.tzname() or f"{here:%z}"
    )


def _show(report: RestoreReport, *, as_json: bool) -> None:
    from rich.console import Console

    from cutline.cli.history.report import lines_of

    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(report)))
        return
    if report.at is not None:
        typer.echo(f"at {shown_moment(datetime.datetime.fromisoformat(report.at))}: epoch {report.epoch}")
    for line in lines_of(report):
        typer.echo(line)
    if report.would_refuse:
        return
    Console().print(operators_table(report.operators))
    if not report.is_compared_with_code:
        typer.echo("the start compares these with the code; to compare them now, give --code FILE")


def _store_request(here: FlowHere, request: RestoreRequest, report: RestoreReport) -> None:
    from cutline.cli.places import is_running
    from cutline.storage.restore_requests import store_request

    store_request(here.layout, request)
    if is_running(here.layout):  # its start may have looked for a request already, or not
        raise ConfigError(
            f"the flow was started meanwhile: it restores epoch {report.epoch} now, or the request waits for its next "
            "start",
            next_step=f"see cutline status {here.flow}; to withdraw the request: cutline restore {here.flow} --cancel",
            flow=here.flow,
        )


def operators_table(fates: list[OperatorFate]) -> Table:
    """What the restore does with every operator."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("operator", "now", "what happens", "note"):
        table.add_column(name, overflow="fold")  # --rename needs the names: they are never cut off
    for one in fates:
        table.add_row(*map(Text, (one.was or "–", one.now or "–", one.fate, one.note)))
    return table


def _others(flow: str, epochs: list[Epoch], unreadable: list[Epoch]) -> str:
    """What can be restored instead of an epoch that is not available."""
    from cutline.cli.places import damage_note

    few = epochs[-_EPOCHS_NAMED:]
    shown = f"{'…, ' if len(few) < len(epochs) else ''}{', '.join(map(str, few))}"
    choice = f"choose one of {shown} (cutline checkpoints shows all), or a savepoint" if few else ""
    damage = damage_note(flow, unreadable) if unreadable else ""
    none = "no checkpoint is available; a savepoint may be: cutline savepoint list"
    return "; ".join(filter(None, (damage, choice))) or none


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)


def target_of(here: FlowHere, savepoints: Savepoints, to: str | None, moment: datetime.datetime | None) -> Target:
    """What a person names: exactly one of the two. Raises RecoveryError and UnknownSavepointError."""
    from cutline.cli.history.preview import Target
    from cutline.cli.places import damage_note, epoch_number, kept_checkpoints
    from cutline.savepoints.automatic import resolved
    from cutline.storage.local import LocalStore

    store = LocalStore.reading(here.layout)
    unreadable = list[Epoch]()
    kept = kept_checkpoints(store, unreadable)
    codes = {manifest.epoch: manifest.code for manifest in kept}
    if moment is not None:
        limit_ms = moment.timestamp() * 1000
        past = [manifest.epoch for manifest in kept if manifest.completed_ms <= limit_ms]
        if not past:
            oldest = f"the oldest is of {local(kept[0].completed_ms)}" if kept else "there is none"
            raise RecoveryError(
                f"no available checkpoint is as old as {shown_moment(moment)}: {oldest}",
                next_step=damage_note(here.flow, unreadable) if unreadable else "see cutline checkpoints",
            )
        return Target(to=str(past[-1]), epoch=past[-1], is_savepoint=False, code=codes[past[-1]])
    if to is None:
        raise TypeError("neither a name nor a moment")
    to = resolved(to, savepoints, store.generations.load_all(), flow=here.flow)
    epoch = epoch_number(to)
    if epoch is None:
        savepoint = savepoints.load(to)
        return Target(to=to, epoch=savepoint.epoch, is_savepoint=True, code=savepoint.code)
    if epoch not in codes:
        raise RecoveryError(f"epoch {epoch} is not available", next_step=_others(here.flow, list(codes), unreadable))
    return Target(to=to, epoch=epoch, is_savepoint=False, code=codes[epoch])
