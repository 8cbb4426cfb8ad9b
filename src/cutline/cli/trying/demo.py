"""``cutline demo``."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutline.cli.failures import as_wrong_use
from cutline.cli.words import counted
from cutline.config.options import build_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from cutline.testing.servers.s3 import S3Server

#: The input lasts this long, plus a fixed time per kill, so that every kill interrupts work.
_INPUT_SECONDS = 20.0
_SECONDS_PER_KILL = 4.0


def demo(
    rows: Annotated[int, typer.Option(help="Payments to process.", min=1)] = 400_000,
    keys: Annotated[int, typer.Option(help="Merchants.", min=1)] = 10_000,
    kill: Annotated[int, typer.Option(help="How many times to kill -9 the worker, at random moments.", min=0)] = 1,
    interval: Annotated[str, typer.Option(help="Time between checkpoints.")] = "1s",
    mode: Annotated[str, typer.Option(help="auto, aligned or unaligned.")] = "auto",
    seed: Annotated[int, typer.Option(help="Decides the payments and the moments of the kills.")] = 1,
    lose_host: Annotated[
        bool,
        typer.Option("--lose-host", help="Each kill also deletes the worker's storage; it recovers from --remote."),
    ] = False,
    remote: Annotated[
        str, typer.Option(help="Remote tier; default with --lose-host: a real S3 server, or a folder without one.")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with everything the demo wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """Run a payments pipeline, kill it, let it recover, and check every payment against the truth."""
    from rich.console import Console

    from cutline.cli.running.live import flow_view
    from cutline.demo.run import run_demo
    from cutline.demo.settings import DemoSettings

    with as_wrong_use():
        build_options({"checkpoint_interval": interval, "mode": mode})
    folder = tempfile.mkdtemp(prefix="cutline-demo-")
    server = _server() if lose_host and not remote else None
    if lose_host and not remote:
        remote = f"{server.url}/demo" if server is not None else f"{folder}/remote"
    settings = DemoSettings(
        folder=folder,
        rows=rows,
        keys=keys,
        seed=seed,
        interval=interval,
        mode=mode,
        seconds=_INPUT_SECONDS + _SECONDS_PER_KILL * kill,
        remote=remote,
        remote_options=server.options if server is not None else {},
    )
    console = Console(stderr=as_json)
    began = time.monotonic()
    try:
        with _announced(console, rows, kill) if not as_json else _Silent() as live:
            report = run_demo(
                settings, kill, lambda status, note: live.update(flow_view(status, note)), loses_host=lose_host
            )
    finally:
        if server is not None:
            server.remove()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    report |= {"seconds": round(time.monotonic() - began, 1), **({"folder": folder} if keep else {})}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _verdict(console, report)
    if not report["ok"]:
        raise typer.Exit(1)


def _server() -> S3Server | None:
    """A real S3 server, if it is installed."""
    from cutline.testing.servers.s3 import S3Server

    server = S3Server() if S3Server.is_installed() else None
    if server is not None:
        server.start()
    return server


def _announced(console: Console, rows: int, kills: int) -> Live:
    """The live view. Where there is no terminal, only this line is shown until the end."""
    from rich.live import Live

    console.print(f"demo: {counted(rows, 'payment')}, {counted(kills, 'kill')}; Spark starts, which takes a while")
    return Live(console=console, refresh_per_second=4, transient=True)


class _Silent:
    """Replaces the live view when only JSON is printed."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def update(self, view: Any) -> None:
        return


def _verdict(console: Console, report: dict[str, Any]) -> None:
    console.print()
    console.print(f"payments in            {report['rows_in']:>12,}")
    console.print(f"payments in the ledger {report['ledger_rows']:>12,}")
    console.print(f"payments in the totals {report['rows_counted']:>12,}")
    console.print(f"lost                   {report['lost']:>12,}")
    console.print(f"counted twice          {report['duplicated']:>12,}")
    console.print(
        f"checkpoints            {report['checkpoints_completed']:>12,}   {report['checkpoint_ms']['p50']} ms each"
    )
    for number, item in enumerate(report["recoveries"], 1):
        console.print(f"kill -9 number {number}: recovery path {item['path']}, first batch after {item['seconds']} s")
    if report["ok"]:
        console.print("\n[bold green]Every payment was published exactly once.[/]")
        if report["kills"]:
            console.print(
                "The worker and its JVM were killed in the middle of their work; "
                "the sinks hold exactly what a run without kills publishes."
            )
    else:
        console.print("\n[bold red]The published tables differ from the truth.[/] Please report this with the seed.")
