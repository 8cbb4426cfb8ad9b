"""The ``cutline`` command."""

from __future__ import annotations

import sys

import typer

from cutline import __version__
from cutline.cli.demo import demo
from cutline.cli.failures import run_command
from cutline.cli.gc import gc
from cutline.cli.restore import restore
from cutline.cli.run import end_on_signals, run
from cutline.cli.savepoint import app as savepoint_app
from cutline.cli.savepoint import clone, stop
from cutline.cli.simulate import simulate
from cutline.cli.sinks import sinks
from cutline.cli.status import status
from cutline.cli.verify import verify

app = typer.Typer(
    name="cutline",
    help="Consistent checkpoints, recovery and exactly-once output for streaming pipelines on Apache Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(status)
app.command()(demo)
app.command()(simulate)
app.command()(verify)
app.command()(gc)
app.command()(sinks)
app.command()(stop)
app.command()(restore)
app.command()(clone)
app.add_typer(savepoint_app, name="savepoint")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line, and exit with its code; no error leaves with a traceback."""
    end_on_signals()
    sys.exit(run_command(app, sys.argv[1:]))


if __name__ == "__main__":
    main()
