"""``cutline run``."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from cutline.base.logs import configure_logging
from cutline.base.storage_errors import in_words
from cutline.base.traces import cause_of
from cutline.cli.failures import store_command_trace
from cutline.cli.live import flow_view
from cutline.cli.options import Settings, parse_renames
from cutline.cli.status import as_json_line
from cutline.config.options import doc_of
from cutline.errors import ConfigError, CutlineError, FlowDefinitionError
from cutline.flow import Flow
from cutline.runtime.handle import RunningFlow
from cutline.runtime.launch import start_flow

#: How often to look for a signal, or for the end of the flow.
_LOOK_SECONDS = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: How long a command may take to hear a signal.
_HEARING_SECONDS = 3.0
#: Within this time a signal counts as the same one again: a shell and a wrapper may both pass on one Ctrl-C.
_SAME_SECONDS = 1.0
_heard = threading.Event()


class _Interrupted(SystemExit):
    """A signal ends the command."""


def _interrupted_by(error: BaseException) -> _Interrupted | None:
    one: BaseException | None = error
    while one is not None and not isinstance(one, _Interrupted):
        one = one.__context__
    return one


def load_flow(path: Path, name: str | None) -> Flow:
    """The flow that a Python file defines. Raises FlowDefinitionError, with file and line, for whatever is wrong."""
    with in_words(path=path):
        if not path.exists():
            raise FlowDefinitionError(
                f"there is no file {path}", next_step="name the Python file that defines the flow"
            )
        if not path.is_file():
            raise FlowDefinitionError(f"{path} is not a file", next_step="name the Python file that defines the flow")
        path.open("rb").close()
    sys.path.insert(0, str(path.resolve().parent))
    found = [value for value in _run_file(path).values() if isinstance(value, Flow)]
    flows: dict[str, Flow] = {flow.name: flow for flow in found}
    if name is not None and name in flows:
        return flows[name]
    if name is None and len(flows) == 1:
        return next(iter(flows.values()))
    raise FlowDefinitionError(
        f"{path} defines {'these flows: ' + ', '.join(sorted(flows)) if flows else 'no flow'}",
        next_step="choose one with --flow" if flows else 'define one at the top level: flow = cutline.Flow("name")',
    )


def _run_file(path: Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        if (interrupted := _interrupted_by(error)) is not None:
            raise interrupted from None  # the file is not to blame, whatever it made of the signal
        if isinstance(error, CutlineError):
            error.add_where(at=cause_of(error).at or path)
            raise
        # The user's exception and line come first; what it raised is complete with the file that failed.
        cause = cause_of(error)
        raise FlowDefinitionError(
            f"{cause}, while {path} was loaded", next_step=_next_step(error), path=path, trace=_stored_trace(error)
        ) from error


def _next_step(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that has {error.name}, or correct the import"
    if isinstance(error, SystemExit):
        return 'keep what ends the process below: if __name__ == "__main__"'
    return "correct the file"


def _stored_trace(error: BaseException) -> Path | None:
    """Of an error that has more than the line which the message names."""
    is_whole = isinstance(error, SyntaxError | ImportError | SystemExit)
    return None if is_whole else store_command_trace(error)


def run(
    file: Annotated[Path, typer.Argument(help="Python file that defines a flow.")],
    flow: Annotated[str | None, typer.Option(help="Which flow, if the file defines several.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; default: cutline.toml, if it exists.")
    ] = None,
    storage: Annotated[str | None, typer.Option(help=doc_of("storage"))] = None,
    checkpoint_interval: Annotated[str | None, typer.Option(help=doc_of("checkpoint_interval"))] = None,
    mode: Annotated[str | None, typer.Option(help=doc_of("mode"))] = None,
    option: Settings = None,
    restore_to: Annotated[
        str | None,
        typer.Option(help="Restore the whole flow to this checkpoint or savepoint first; later work is discarded."),
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(help="With --restore-to, old=new: an operator that was renamed since.")
    ] = None,
    allow_dropped: Annotated[
        bool, typer.Option(help="With --restore-to: leave behind operators that the flow no longer has.")
    ] = False,
    rejoin: Annotated[
        bool,
        typer.Option(
            help="If another host has taken the flow over: keep what this one did alone as a savepoint, and continue "
            "from the newest checkpoint of the remote tier."
        ),
    ] = False,
    until_done: Annotated[bool, typer.Option(help="Process the present input, publish it, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Log as JSON lines; end with the status as JSON.")] = False,
) -> None:
    """Run a flow until it is interrupted. Ctrl-C and SIGTERM stop it at a batch boundary; the next run resumes.

    A second Ctrl-C or SIGTERM does not wait for that boundary.
    """
    console = Console(stderr=True)
    show_view = console.is_terminal and not as_json
    configure_logging(as_json=as_json, level=logging.WARNING if show_view else logging.INFO)
    settings: dict[str, Any] = {"storage": storage, "checkpoint_interval": checkpoint_interval, "mode": mode}
    for item in option or []:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: no value", next_step="write name=value")
        settings[key] = value
    loaded = load_flow(file, flow)
    running = start_flow(
        loaded,
        spark=None,
        settings=settings,
        config_file=config,
        restore_to=restore_to,
        rename=parse_renames(rename or []),
        allow_dropped=allow_dropped,
        rejoin=rejoin,
    )
    _follow(running, console if show_view else None, until_done=until_done, as_json=as_json)


def end_on_signals() -> None:
    """Let SIGTERM and Ctrl-C end any command: what it holds is released, and a request to a flow is withdrawn.

    Python hears a signal only between two of its own steps. A command that does not hear it, because it waits inside a
    library for a store that does not answer, ends without that: every step of every command may be its last one. So
    does a command that is told a second time while it still releases what it holds.
    """
    heard = _on_signals(_interrupt)
    ringing, bell = socket.socketpair()
    bell.setblocking(False)
    signal.set_wakeup_fd(bell.fileno())

    def watch(ringing: socket.socket, _: socket.socket) -> None:
        first_s: float | None = None
        while number := ringing.recv(1):
            if number[0] not in _SIGNALS:
                continue
            is_second = first_s is not None and time.monotonic() - first_s > _SAME_SECONDS
            first_s = time.monotonic() if first_s is None else first_s
            if is_second or not heard.wait(_HEARING_SECONDS):
                os._exit(128 + number[0])

    # The thread keeps both ends open.
    threading.Thread(target=watch, args=(ringing, bell), name="cutline-signals", daemon=True).start()


def _interrupt(number: int) -> None:
    raise _Interrupted(128 + number)


def _on_signals(act: Callable[[int], object]) -> threading.Event:
    """Act when a signal is heard; the returned event is set then."""

    def hear(number: int, _: object) -> None:
        _heard.set()
        act(number)

    for number in _SIGNALS:
        signal.signal(number, hear)
    return _heard


def _process_all(running: RunningFlow, interrupted: threading.Event) -> None:
    """Process the present input, unless that is interrupted. On a thread: what it waits for hears no signal."""
    done: Future[None] = Future()

    def process() -> None:
        try:
            running.process_all_available()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 (handed to the main thread)
            done.set_exception(error)

    threading.Thread(target=process, name="cutline-until-done", daemon=True).start()
    while not done.done():
        if interrupted.wait(_LOOK_SECONDS):
            return
    done.result()


def _follow(running: RunningFlow, console: Console | None, *, until_done: bool, as_json: bool) -> None:
    """Wait until the flow is done, ends or is interrupted; ``console``: for its live view; None: no live view."""
    interrupted = threading.Event()
    _on_signals(lambda _: interrupted.set())
    try:
        if until_done:
            _process_all(running, interrupted)
        elif console is not None:
            with Live(console=console, refresh_per_second=4) as live:
                while not interrupted.wait(_LOOK_SECONDS) and not running.await_termination(0):
                    live.update(flow_view(running.status(), "Ctrl-C stops"))
        else:
            while not interrupted.wait(_LOOK_SECONDS) and not running.await_termination(0):
                pass
        status = running.status()
    finally:
        running.stop()
    running.await_termination(0)  # raises the error of a flow that had failed and stayed
    if as_json:
        typer.echo(as_json_line(msgspec.structs.replace(status, state="stopped")))
