"""The ``cutline`` command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from cutline import __version__
from cutline.cli.declaring import Declared, LazyCommands
from cutline.cli.failures import run_command
from cutline.cli.signals import end_on_signals, end_spark, is_starting

_RUNNING, _HISTORY, _UPKEEP, _TRYING = (f"cutline.cli.{room}" for room in ("running", "history", "upkeep", "trying"))


class _Commands(LazyCommands):
    """Every command, in the order of the help."""

    declared: ClassVar[Mapping[str, Declared]] = {
        "run": Declared(
            target=f"{_RUNNING}.run:run",
            help="Run flows until they are interrupted. Ctrl-C and SIGTERM stop them at a batch boundary; the next run "
            "resumes.",
        ),
        "stop": Declared(target=f"{_RUNNING}.stop:stop", help="Stop a running flow at a batch boundary."),
        "status": Declared(
            target=f"{_RUNNING}.status:status",
            help="Show the status of a flow: operators, channels, sinks, checkpoints. Only reads files.",
        ),
        "flows": Declared(
            target=f"{_RUNNING}.flows:flows",
            help="Show all flows of a storage: their state, last checkpoint, lag and problems. Only reads files.",
        ),
        "checkpoints": Declared(
            target=f"{_HISTORY}.checkpoints:checkpoints",
            help="Show the checkpoints a flow can be restored to, and until when. Reads only, also while it runs.",
        ),
        "pin": Declared(target=f"{_HISTORY}.pins:pin", help="Keep a checkpoint until it is unpinned."),
        "unpin": Declared(target=f"{_HISTORY}.pins:unpin", help="Return a pinned checkpoint to normal retention."),
        "savepoint": Declared(
            target=f"{_HISTORY}.savepoint:app", help="Named checkpoints: take, list, move and delete them."
        ),
        "restore": Declared(
            target=f"{_HISTORY}.restore:restore",
            help="Restore the whole flow at its next start: state and positions; its sinks are rewound.",
        ),
        "clone": Declared(
            target=f"{_HISTORY}.savepoint:clone",
            help="Create a second flow that begins at a savepoint, shares nothing with the first, and has empty sinks.",
        ),
        "verify": Declared(
            target=f"{_UPKEEP}.verify:verify",
            help="Check that checkpoints are whole. Reads only, also while the flow runs. Exit code 1: damage, 2: "
            "cannot check.",
        ),
        "gc": Declared(
            target=f"{_UPKEEP}.gc:gc",
            help="Collect what interrupted work has left and no checkpoint needs. A running flow does this itself, on "
            "request.",
        ),
        "sinks": Declared(
            target=f"{_UPKEEP}.sinks:sinks",
            help="Show how far each sink is: what it has published, what waits, what is staged.",
        ),
        "doctor": Declared(
            target=f"{_UPKEEP}.doctor:doctor",
            help="Check what Cutline needs on this machine, and say what to do about what is missing.",
        ),
        "demo": Declared(
            target=f"{_TRYING}.demo:demo",
            help="Run a payments pipeline, kill it, let it recover, and check every payment against the truth.",
        ),
        "simulate": Declared(
            target=f"{_TRYING}.simulate:simulate",
            help="Run the protocol under simulated faults and check that nothing is lost, duplicated or stuck.",
        ),
        "version": Declared(target="cutline.cli.main:version", help="Print the version."),
    }


app = typer.Typer(
    name="cutline",
    cls=_Commands,
    help="Consistent checkpoints, recovery and exactly-once output for streaming pipelines on Apache Spark.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def _top(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line, and exit with its code; no error leaves with a traceback."""
    end_on_signals()
    code = run_command(app, sys.argv[1:])
    if is_starting.is_set():
        end_spark()
    sys.exit(code)


if __name__ == "__main__":
    main()
