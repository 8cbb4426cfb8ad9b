"""``cutline restore --now``: the flow is stopped, and a start restores it.

The running flow is told to keep the checkpoint, then the request is stored, then the flow is stopped. So whichever
process starts the flow next restores it, wherever this one is killed, and also if a service manager is faster.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cutline.base.crashpoints import crashpoint
from cutline.cli.asking import ask_running
from cutline.cli.flows_here import FlowHere
from cutline.cli.history.report import RestoreReport
from cutline.cli.running.former import FormerRun, context_of_run, environment_of, former_run, own_variables
from cutline.cli.running.run import load_flow
from cutline.cli.running.status import load_status
from cutline.cli.words import size
from cutline.config.compatibility import check_options
from cutline.config.loading import load_options
from cutline.config.options import Options
from cutline.errors import ConfigError, CutlineError, FlowDefinitionError, RecoveryError, RequestFailedError
from cutline.fingerprint.definition import code_of
from cutline.flow import Flow
from cutline.model.ids import Generation
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest, epoch_in
from cutline.ports.progress import NoProgress
from cutline.protocol.deploys import newest_code
from cutline.runtime.lock import running_pid
from cutline.runtime.process.state import noted_start
from cutline.storage.local import LocalStore
from cutline.storage.restore_requests import store_request, waiting_request, withdraw_request
from cutline.transport.request_files import is_unknown_kind, tell

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
    #: How it was started; None: the flow does not run.
    former: FormerRun | None
    #: What it will run with.
    options: Options

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
        with environment_of(former):
            file, flow = _defining(files, here.flow)
            _adapt(context.params, here, file, settings, config, is_alone=len(context.params["files"]) == 1)
            with contextlib.chdir(folder):
                options = _checked(context.params, flow)
        return cls(here=here, file=file, flow=flow, context=context, folder=folder, former=former, options=options)

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

    def taken_over(self) -> list[str]:
        """The names of the variables that the stopped process had and this one has not, or has with other values."""
        if self.former is None:
            return []
        there, mine = self.former.environment, own_variables(os.environ)
        return sorted(name for name in {*there, *mine} if there.get(name) != mine.get(name))

    def start(self, request: RestoreRequest, *, as_json: bool) -> None:
        """The request is given to the start: what another person stores meanwhile is not taken for it."""
        self.context.params["as_json"] |= as_json
        rename = [f"{old}={new}" for old, new in request.rename.items()]
        self.context.params |= {"restore_to": request.to, "rename": rename, "allow_dropped": request.allow_dropped}
        os.chdir(self.folder)
        with environment_of(self.former), self.context.scope():
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
    """The options of the former run, for this file. The request says what is restored."""
    params |= {"files": [file], "flow": here.flow, "storage": str(here.layout.root.parent)}
    params |= {"restore_to": None, "rename": None, "allow_dropped": False, "rejoin": False, "until_done": False}
    params["option"] = [*(params.get("option") or []), *settings]
    if config is not None:
        params["config"] = config.resolve()
    if not is_alone:
        params["http"] = None  # the other flows of that process still use it


def _checked(params: Mapping[str, Any], flow: Flow) -> Options:
    """Raise ConfigError for options that the start would refuse: then nothing is stopped."""
    own = {name: params[name] for name in ("storage", "checkpoint_interval", "mode")}
    given = dict(item.partition("=")[::2] for item in params["option"])
    options, graph = load_options(own | given, config_file=params["config"]), flow.graph()
    check_options(options, flow=graph.flow, own=graph.own_options(options))
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreNow:
    """One restore of a flow that may run."""

    here: FlowHere
    request: RestoreRequest
    report: RestoreReport
    #: None: another process starts the flow.
    successor: Successor | None
    #: Raises what a start with this request would raise now.
    check_again: Callable[[], None]
    console: Console

    def prepare(self) -> bool:
        """Stop the flow, with the request stored. True: the successor is to be started now.

        Raises before anything is stopped if the restore is not possible; if it has become impossible meanwhile, the
        request is withdrawn, and the error says so.
        """
        layout = self.here.layout
        pid = running_pid(layout.lock)
        if pid is not None:
            self._hold()
        store_request(layout, self.request)
        crashpoint("restore-requested")
        if pid is not None:
            self._stop(pid)
        other = running_pid(layout.lock)
        with contextlib.ExitStack() as starting:
            if other is None and self.successor is not None:
                starting.enter_context(self._noted())
            if other is None:
                self._settle_request()
            crashpoint("restore-stopped")
            if other is None:
                self._check_again()
            starting.pop_all()  # ``start`` goes on with it
        if other is not None and self.successor is not None:
            raise ConfigError(
                f"pid {other} has started the flow meanwhile, perhaps as a service: it restores epoch "
                f"{self.report.epoch}, with its own code",
                next_step="if that is not the right code: stop the service, then repeat this; or use --no-start",
                flow=self.here.flow,
            )
        if self.successor is None:
            flow = self.here.flow
            now = f"pid {other} has started flow {flow} again and" if other else f"the next start of flow {flow}"
            self._say(f"{now} restores epoch {self.report.epoch}")
        return self.successor is not None

    def start(self, successor: Successor, *, as_json: bool) -> None:
        """Run the flow until it ends."""
        layout, restored = self.here.layout, f"epoch {self.report.epoch}, {size(self.report.size_bytes)}"
        self._say(f"restoring {restored}, and running {successor.file}")
        if names := successor.taken_over():
            self._say(f"as in the stopped process, not as in this one: {', '.join(names)}")
        before = _generation(layout)
        with self._noted():
            self._run(successor, before, as_json=as_json)

    def _run(self, successor: Successor, before: Generation, *, as_json: bool) -> None:
        layout = self.here.layout
        if not self.console.is_terminal and not as_json:  # on a terminal, the view of the flow shows it
            watch = (layout, before, self.console)
            threading.Thread(target=_watch, args=watch, name="cutline-restore", daemon=True).start()
        try:
            successor.start(self.request, as_json=as_json)
        except RecoveryError as error:
            if _generation(layout) == before and withdraw_request(layout, self.request):
                error.add_next_step("the flow is stopped, and the request is withdrawn: a start continues where it was")
            raise
        except BaseException:
            if waiting_request(layout) == self.request:
                self._say(f"not restored yet: {self._still_requested()}")
            raise

    # ------------------------------------------------------------------ steps

    def _hold(self) -> None:
        """From now on the running flow keeps the checkpoint: its timer must not release it before it is stopped."""
        epoch = epoch_in(self.request.to)
        if epoch is None:
            return  # a savepoint stays
        try:
            self._ask_to_hold(epoch, is_held=True)
        except RequestFailedError as error:
            if not is_unknown_kind(error):  # a former version runs: it does not know how to keep it
                raise

    def _ask_to_hold(self, epoch: int, *, is_held: bool) -> None:
        ask_running(self.here.layout, "hold", {"epoch": epoch, "is_held": is_held}, "asking the flow to keep it")

    def _stop(self, pid: int) -> None:
        """Stop the flow as ``cutline stop`` does. If it does not take the request to, it runs on as before."""
        layout, begun, is_stopping = self.here.layout, time.monotonic(), threading.Event()
        self._say(f"stopping flow {self.here.flow} (pid {pid})")
        try:
            arguments = {"drain": False, "savepoint": None}
            ask_running(layout, "stop", arguments, "asking the flow to stop", on_taken=is_stopping.set)
            is_stopping.set()
            self._wait_stopped(pid, begun)
        except BaseException as error:
            is_up = running_pid(layout.lock) == pid
            if is_up and not is_stopping.is_set():
                self._give_up()
                raise
            if not isinstance(error, CutlineError):
                state = "it is stopping" if is_up else "it has stopped"
                self._say(f"{state}; {self._still_requested()}")
                raise
            if is_up:
                raise
            # It has ended by itself meanwhile, which is as good.
        self._say(f"stopped after {time.monotonic() - begun:.1f} s")

    def _wait_stopped(self, pid: int, begun: float) -> None:
        with self.console.status("waiting until it has stopped"):
            while running_pid(self.here.layout.lock) == pid:
                if time.monotonic() - begun > _STOP_SECONDS:
                    raise RequestFailedError(
                        f"the flow has not stopped within {_STOP_SECONDS:.0f} s; it is stopping still, and "
                        f"{self._still_requested()}",
                        next_step=f"see cutline status {self.here.flow}; if it hangs, end pid {pid} and start it",
                        flow=self.here.flow,
                    )
                time.sleep(_LOOK_SECONDS)

    def _give_up(self) -> None:
        """The flow runs on: no later start may restore it unexpectedly, and nothing is kept for that."""
        withdraw_request(self.here.layout, self.request)
        if (epoch := epoch_in(self.request.to)) is not None:
            folder = self.here.layout.requests
            with contextlib.suppress(CutlineError, OSError):
                tell(folder, "hold", {"epoch": epoch, "is_held": False})

    def _settle_request(self) -> None:
        """The flow is stopped: exactly this request must be stored."""
        layout, found = self.here.layout, waiting_request(self.here.layout)
        if found is None:
            store_request(layout, self.request)  # a flow that was just starting has removed it
        elif found != self.request:
            raise ConfigError(
                f"the flow is stopped; a restore to {found.to} was requested meanwhile, by another command, in place "
                f"of {self.request.to}",
                next_step=f"agree on one: start the flow, which restores {found.to}; or withdraw that (cutline restore "
                f"{self.here.flow} --cancel) and repeat this",
                flow=self.here.flow,
            )

    def _check_again(self) -> None:
        try:
            self.check_again()
        except (CutlineError, OSError) as error:
            withdraw_request(self.here.layout, self.request)
            next_step = error.next_step if isinstance(error, CutlineError) else ""
            way_on = "start the flow: it continues where it was"
            raise RecoveryError(
                f"the flow is stopped, and cannot be restored to {self.request.to} any more: "
                f"{error.what if isinstance(error, CutlineError) else error}; the request is withdrawn",
                next_step=f"{next_step}; or {way_on}" if next_step else way_on,
                flow=self.here.flow,
                epoch=self.report.epoch,
            ) from error

    def _still_requested(self) -> str:
        withdraw = f"cutline restore {self.here.flow} --cancel withdraws that"
        return f"its next start restores epoch {self.report.epoch}; {withdraw}"

    def _noted(self) -> contextlib.AbstractContextManager[object]:
        """Others see that the flow is starting, and not a request that waits."""
        return noted_start(self.here.layout, NoProgress(), restores=self.request.to)

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


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
