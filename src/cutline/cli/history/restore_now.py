"""``cutline restore --now``: the flow is stopped, and a start restores it.

The request is stored before the flow is stopped. So whichever process starts the flow next restores it, wherever this
one is killed, and also if a service manager is faster.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cutline.base.crashpoints import crashpoint
from cutline.cli.asking import ask_running
from cutline.cli.flows_here import FlowHere
from cutline.cli.history.report import RestoreReport
from cutline.cli.running.former import context_of_run, former_run
from cutline.cli.running.run import load_flow
from cutline.cli.running.status import load_status
from cutline.cli.words import size
from cutline.config.compatibility import check_options
from cutline.config.loading import load_options
from cutline.errors import ConfigError, CutlineError, FlowDefinitionError, RequestFailedError
from cutline.fingerprint.definition import code_of
from cutline.flow import Flow
from cutline.model.ids import Generation
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest
from cutline.protocol.deploys import newest_code
from cutline.runtime.launch import store_request, stored_request
from cutline.runtime.lock import running_pid
from cutline.storage.local import LocalStore

_LOOK_SECONDS = 0.05
_WATCH_SECONDS = 0.5
#: A batch that runs longer may still end; but the person is told, and decides.
_STOP_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """What runs after the restore, and how."""

    here: FlowHere
    file: Path
    flow: Flow
    #: The parsed ``cutline run``.
    context: Any
    #: Where the stopped process ran: its options may name files there.
    folder: Path

    @classmethod
    def of(cls, here: FlowHere, run: Path | None, settings: Sequence[str], config: Path | None) -> Successor:
        """``run``: the file; None: the one that the running process was started with. Its options stay."""
        pid = running_pid(here.layout.lock)
        former = former_run(pid) if pid is not None else None
        if run is None and former is None:
            why = f"pid {pid} is no cutline run of this user" if pid is not None else "the flow does not run"
            raise ConfigError(
                f"which file to run is not known: {why}",
                next_step="name it: --run FILE; or add --no-start, and start the flow yourself",
                flow=here.flow,
            )
        folder = former.folder if former is not None else Path.cwd()
        context = context_of_run(former.arguments if former is not None else [str(run)])
        files = [run.resolve()] if run is not None else [folder / one for one in context.params["files"]]
        file, flow = _defining(files, here.flow)
        _adapt(context.params, here, file, settings, config, is_alone=len(context.params["files"]) == 1)
        with contextlib.chdir(folder):
            _check(context.params, flow)
        return cls(here=here, file=file, flow=flow, context=context, folder=folder)

    def refuse_what_runs(self, code: str) -> None:
        """Refuse to run again, unasked, what made the state that is given up. ``code``: that made the checkpoint."""
        runs = newest_code(LocalStore.reading(self.here.layout).generations.load_all())
        own = code_of(self.flow.graph(), self.flow.functions, self.flow.sinks).hash
        if not code or own != runs or own == code:
            return
        raise ConfigError(
            f"{self.file} is the code that runs now ({own}); other code ({code}) made the checkpoint",
            next_step="roll the file back first, or name the file to run: --run FILE",
            flow=self.here.flow,
        )

    def start(self, *, as_json: bool) -> None:
        self.context.params["as_json"] |= as_json
        os.chdir(self.folder)
        with self.context.scope():
            self.context.command.invoke(self.context)


def _defining(files: Sequence[Path], name: str) -> tuple[Path, Flow]:
    """The file that defines the flow."""
    problem: FlowDefinitionError | None = None
    for file in files:
        try:
            return file, load_flow(file, name)
        except FlowDefinitionError as error:
            problem = problem or error
    raise problem or FlowDefinitionError(f"no file defines the flow {name}", next_step="name it: --run FILE")


def _adapt(
    params: dict[str, Any],
    here: FlowHere,
    file: Path,
    settings: Sequence[str],
    config: Path | None,
    *,
    is_alone: bool,
) -> None:
    """The options of the former run, for this file. The stored request says what is restored."""
    params |= {"files": [file], "flow": here.flow, "storage": str(here.layout.root.parent)}
    params |= {"restore_to": None, "rename": None, "allow_dropped": False, "rejoin": False, "until_done": False}
    params["option"] = [*(params.get("option") or []), *settings]
    if config is not None:
        params["config"] = config.resolve()
    if not is_alone:
        params["http"] = None  # the other flows of that process still use it


def _check(params: Mapping[str, Any], flow: Flow) -> None:
    """Raise ConfigError for options that the start would refuse: then nothing is stopped."""
    own = {name: params[name] for name in ("storage", "checkpoint_interval", "mode")}
    given = dict(item.partition("=")[::2] for item in params["option"])
    options, graph = load_options(own | given, config_file=params["config"]), flow.graph()
    check_options(options, flow=graph.flow, own=graph.own_options(options))


def restore_now(
    here: FlowHere, request: RestoreRequest, report: RestoreReport, successor: Successor | None, *, as_json: bool
) -> None:
    """``successor``: None: another process starts the flow."""
    console, layout = Console(stderr=True, quiet=as_json), here.layout
    store_request(layout, request)
    crashpoint("restore-requested")
    pid = running_pid(layout.lock)
    if pid is not None:
        _stop(here, request, console, pid)
    other = running_pid(layout.lock)
    if other is None and stored_request(layout) != request:
        store_request(layout, request)  # a flow that was just starting has removed it
    crashpoint("restore-stopped")
    if other is not None and successor is not None:
        raise ConfigError(
            f"pid {other} has started the flow meanwhile, perhaps as a service: it restores epoch {report.epoch}, with "
            "its own code",
            next_step="if that is not the right code: stop the service, then repeat this; or use --no-start",
            flow=here.flow,
        )
    if successor is None:
        now = f"pid {other} has started flow {here.flow} again and" if other else f"the next start of flow {here.flow}"
        console.print(Text(f"{now} restores epoch {report.epoch}"), soft_wrap=True)
        return
    console.print(
        Text(f"restoring epoch {report.epoch}, {size(report.size_bytes)}, and running {successor.file}"), soft_wrap=True
    )
    if not console.is_terminal and not as_json:  # on a terminal, the view of the flow shows it
        watch = (layout, _generation(layout), console)
        threading.Thread(target=_watch, args=watch, name="cutline-restore", daemon=True).start()
    successor.start(as_json=as_json)


def _stop(here: FlowHere, request: RestoreRequest, console: Console, pid: int) -> None:
    """Stop the flow as ``cutline stop`` does. If that fails, it runs on as if nothing had been requested."""
    layout, begun = here.layout, time.monotonic()
    console.print(Text(f"stopping flow {here.flow} (pid {pid})"))
    try:
        ask_running(layout, "stop", {"drain": False, "savepoint": None}, "asking the flow to stop")
        with console.status("waiting until it has stopped"):
            while running_pid(layout.lock) == pid:
                if time.monotonic() - begun > _STOP_SECONDS:
                    raise RequestFailedError(
                        f"the flow has not stopped within {_STOP_SECONDS:.0f} s; nothing is restored",
                        next_step=f"see cutline status {here.flow}; if it hangs, end pid {pid} and repeat this",
                        flow=here.flow,
                    )
                time.sleep(_LOOK_SECONDS)
    except BaseException as error:
        is_up = running_pid(layout.lock) == pid
        if is_up and stored_request(layout) == request:
            layout.restore_request.unlink(missing_ok=True)  # no later start may restore it unexpectedly
        if is_up or not isinstance(error, CutlineError):
            raise
        # It has ended by itself meanwhile, which is as good.
    console.print(Text(f"stopped after {time.monotonic() - begun:.1f} s"))


def _generation(layout: Layout) -> Generation:
    return max((one.generation for one in LocalStore.reading(layout).generations.load_all()), default=Generation(0))


def _watch(layout: Layout, before: Generation, console: Console) -> None:
    """Tell when the start has restored the flow, and when its first checkpoint is complete."""
    begun, is_told = time.monotonic(), False
    while True:
        time.sleep(_WATCH_SECONDS)
        try:
            status = load_status(layout)
        except (CutlineError, OSError):
            continue
        if status is None or status.generation <= before:
            continue
        passed = time.monotonic() - begun
        if not is_told:
            found = f"restored epoch {status.recovery.epoch} (path {status.recovery.path})"
            console.print(Text(f"{found} and started after {passed:.0f} s"), soft_wrap=True)
            is_told = True
        own = [one for one in status.history if one.outcome == "completed" and one.generation >= status.generation]
        if own:
            console.print(
                Text(f"first checkpoint complete after {passed:.0f} s: epoch {own[-1].epoch}"), soft_wrap=True
            )
            return
