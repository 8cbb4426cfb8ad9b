"""``cutline run``."""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from cutline.base.storage_errors import in_words
from cutline.base.traces import cause_of
from cutline.cli.failures import UsageError, as_wrong_use, store_command_trace
from cutline.cli.flows_here import FlowHere, layout_in
from cutline.cli.options import Config, Settings, Storage, parse_renames
from cutline.cli.running.run_options import (
    AllowDropped,
    AsJson,
    CheckpointInterval,
    Conf,
    Files,
    Http,
    LogFileName,
    LogFormat,
    LoggedStream,
    Logging,
    LogKeep,
    LogSize,
    Master,
    Mode,
    OneFlow,
    Rejoin,
    Rename,
    RestoreTo,
    UntilDone,
)
from cutline.cli.signals import interrupted_by, is_command, is_starting, on_signals
from cutline.config.addresses import parse_address
from cutline.config.loading import load_options
from cutline.config.options import build_options
from cutline.config.spark_settings import SparkStart, flag_settings
from cutline.errors import CutlineError, FlowDefinitionError, RecoveryError
from cutline.model.ids import FlowName

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from cutline.flow import Flow
    from cutline.runtime.handle import RunningFlow
    from cutline.runtime.process.flows import Flows

#: How often to look for a signal, or for the end of the flow.
_LOOK_SECONDS = 0.25
#: A flow that has run no batch for so long after its start waits for input.
_FIRST_BATCH_SECONDS = 20.0


def load_flow(path: Path, name: str | None) -> Flow:
    """The flow that a Python file defines. Raises FlowDefinitionError, with file and line, for whatever is wrong."""
    from cutline.flow import Flow

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
    defined = f"{path} defines {'these flows: ' + ', '.join(sorted(flows)) if flows else 'no flow'}"
    raise FlowDefinitionError(
        f"{defined}; {name} is not among them" if flows and name is not None else defined,
        next_step="choose one with --flow" if flows else 'define one at the top level: flow = cutline.Flow("name")',
    )


#: What PySpark raises if a UDF or a column is made before there is a session.
_NO_SESSION = "SESSION_OR_CONTEXT_NOT_EXISTS"


def _run_file(path: Path) -> dict[str, Any]:
    try:
        return runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        if (interrupted := interrupted_by(error)) is not None:
            raise interrupted from None  # the file is not to blame, whatever it made of the signal
        if isinstance(error, CutlineError):
            error.add_where(at=cause_of(error).at or path)
            raise
        # The user's exception and line come first; what it raised is complete with the file that failed.
        cause = cause_of(error)
        raise FlowDefinitionError(
            _told(str(cause), path), next_step=_next_step(error), trace=_stored_trace(error)
        ) from error


def _told(cause: str, path: Path) -> str:
    """The cause, and the file unless the cause names it."""
    return cause if path.name in cause else f"{cause}, while {path} was loaded"


def _next_step(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that has {error.name}, or correct the import"
    if isinstance(error, SystemExit):
        return 'keep what ends the process below: if __name__ == "__main__"'
    if _NO_SESSION in str(error):
        return "there is no session while the file is loaded: do this inside of the operator's function"
    return "correct the file"


def _stored_trace(error: BaseException) -> Path | None:
    """Of an error that has more than the line which the message names."""
    is_whole = isinstance(error, SyntaxError | ImportError | SystemExit)
    return None if is_whole else store_command_trace(error)


def run(
    files: Files,
    flow: OneFlow = None,
    config: Config = None,
    storage: Storage = None,
    checkpoint_interval: CheckpointInterval = None,
    mode: Mode = None,
    option: Settings = None,
    restore_to: RestoreTo = None,
    rename: Rename = None,
    allow_dropped: AllowDropped = False,
    rejoin: Rejoin = False,
    until_done: UntilDone = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
    http: Http = None,
    log_format: LogFormat = None,
    log_file: LogFileName = None,
    log_size: LogSize = "50MB",
    log_keep: LogKeep = 5,
) -> None:
    """Run flows until they are interrupted. Ctrl-C and SIGTERM stop them at a batch boundary; the next run resumes.

    A second Ctrl-C or SIGTERM does not wait for that boundary. Of several flows each fails by itself: the others go on,
    and the exit code at the end is 1.
    """
    from rich.console import Console

    is_starting.set()
    console = Console(file=sys.stderr)
    shown = console if (show_view := console.is_terminal and not as_json) else None
    logs = Logging(format=log_format, file=log_file, size=log_size, keep=log_keep, as_json=as_json, show_view=show_view)
    settings = _settings({"storage": storage, "checkpoint_interval": checkpoint_interval, "mode": mode}, option or [])
    restore = {
        "restore_to": restore_to,
        "rename": parse_renames(rename or []),
        "allow_dropped": allow_dropped,
        "rejoin": rejoin,
    }
    spark = logs.spark_start(_check_line(settings, config, master, conf or [], http))
    _check_number(files, flow, is_restored=any(restore.values()))
    line = _Line(files=files, flow=flow, settings=settings, config=config, restore=restore, spark=spark, http=http)
    with contextlib.ExitStack() as running:
        flows, log = _started(line, logs, shown, running)
        _follow(flows, shown, log, until_done=until_done, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A command line without mistakes."""

    files: Sequence[Path]
    flow: str | None
    settings: dict[str, Any]
    config: Path | None
    #: The arguments of a start that restores.
    restore: Mapping[str, Any]
    spark: SparkStart
    http: str | None


def _started(line: _Line, logs: Logging, shown: Console | None, running: contextlib.ExitStack) -> tuple[Flows, str]:
    """The flows, and where the log is. ``running``: ends what runs beside them."""
    from cutline.cli.steps import Steps
    from cutline.ports.progress import Step

    with Steps("starting", list(Step), console=shown, say=logs.say) as steps:
        steps.begin(Step.FLOW, ", ".join(map(str, line.files)))
        restore_to = line.restore["restore_to"]
        # What is restored is checked first: that needs the flow's name, and no Java.
        spark = _with_jvm(line.spark, line.files, is_wanted=restore_to is None)
        from cutline.runtime.launch import start_flow
        from cutline.runtime.process.flows import Flows
        from cutline.runtime.process.http import serving

        loaded = _load_flows(line.files, line.flow)
        if restore_to is not None:
            _check_restored(next(iter(loaded)), line.settings, line.config, restore_to)
        written = logs.configure(list(loaded), line.settings, line.config)
        log = f"log: {written[0]}" if written else ""
        steps.name(log)
        flows = Flows(list(loaded))
        launch = functools.partial(
            start_flow,
            spark=None,
            settings=line.settings,
            config_file=line.config,
            spark_start=spark,
            progress=steps,
            **line.restore,
        )
        running.enter_context(_logged_stderr(is_wanted=shown is not None))
        running.enter_context(serving(flows, line.http))
        _start_all(flows, {name: functools.partial(launch, one) for name, one in loaded.items()})
    return flows, log


def _check_line(
    settings: Mapping[str, Any], config: Path | None, master: str | None, conf: Sequence[str], http: str | None
) -> dict[str, str]:
    """Refuse what is wrong before a file is read and Java started; returns the settings for Spark."""
    with as_wrong_use():
        build_options(settings)
        if http is not None:
            parse_address(http)
        found = flag_settings(master, conf)
    load_options(settings, config_file=config)  # with the configuration file and the environment
    return found


def _check_restored(name: FlowName, settings: Mapping[str, Any], config: Path | None, to: str) -> None:
    """Raise if there is nothing of that name to restore. What is in the remote tier only, the start itself finds."""
    from cutline.cli.history.restore import target_of
    from cutline.cli.places import savepoints_of

    options = load_options(settings, config_file=config)
    here = FlowHere(layout=layout_in(options, name), options=options)
    try:
        target_of(here, savepoints_of(here), to, None)
    except RecoveryError as error:
        if not options.remote:
            error.add_where(flow=name)
            raise


def _with_jvm(start: SparkStart, files: Sequence[Path], *, is_wanted: bool) -> SparkStart:
    """Java starts while modules are imported and the flow's file is read."""
    if not is_wanted or not is_command.is_set() or not all(map(Path.is_file, files)):
        return start
    from cutline.spark.session import begin_early

    return begin_early(start)


def _logged_stderr(*, is_wanted: bool) -> contextlib.AbstractContextManager[object]:
    """While a view is shown, what libraries print must not come between its lines."""
    return contextlib.redirect_stderr(LoggedStream(sys.stderr)) if is_wanted else contextlib.nullcontext()


def _settings(settings: dict[str, Any], items: Sequence[str]) -> dict[str, Any]:
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise UsageError(f"--set {item}: there is no value", next_step="write name=value")
        settings[key] = value
    return settings


def _check_number(files: Sequence[Path], name: str | None, *, is_restored: bool) -> None:
    if len(files) > 1 and (name is not None or is_restored):
        raise UsageError(
            "--flow, --restore-to, --rename, --allow-dropped and --rejoin are for one flow",
            next_step="run that flow with a command of its own first",
        )


def _load_flows(files: Sequence[Path], name: str | None) -> dict[FlowName, Flow]:
    """The flow of each file. Nothing is started if one of the files is wrong."""
    found: dict[FlowName, Flow] = {}
    for file in files:
        one = load_flow(file, name)
        if one.name in found:
            raise FlowDefinitionError(
                f"two files define the flow {one.name}", next_step="give one of them another name", path=file
            )
        found[one.name] = one
    return found


def _start_all(flows: Flows, launches: Mapping[FlowName, Callable[[], RunningFlow]]) -> None:
    try:
        for name, launch in launches.items():
            flows.start(name, launch)
    except BaseException:
        flows.stop()
        raise


class _View:
    """The live view of all flows; without a console it shows nothing."""

    def __init__(self, flows: Flows, console: Console | None, footer: str) -> None:
        from rich.live import Live

        self._flows = flows
        self._footer = footer
        self._live = None
        if console is not None:
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> _View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, note: str = "") -> None:
        """``note``: what a person can do; empty: the flows have ended. The reason is told after the view."""
        from rich.console import Group
        from rich.text import Text

        from cutline.cli.running.live import flow_view

        if self._live is None:
            return
        statuses = self._flows.statuses()
        if not note:
            statuses = [msgspec.structs.replace(status, failure="") for status in statuses]
        views: list[RenderableType] = []
        for status in statuses:
            views += [Text()] if views else []
            views.append(flow_view(status, note))
        self._live.update(Group(*views, Text(self._footer, style="dim", overflow="fold")), refresh=True)


def _has_run(flows: Flows) -> bool:
    """Whether a batch has ended. The first one takes Spark seconds: a person who interrupts it need not wait."""
    return any(one.batches for status in flows.statuses() for one in status.operators.values())


def _follow(flows: Flows, console: Console | None, log: str, *, until_done: bool, as_json: bool) -> None:
    """Wait until the flows are done, end or are interrupted; ``console``: for a live view; None: no live view."""
    from cutline.cli.running.status import as_json_line

    interrupted = threading.Event()
    on_signals(lambda _: interrupted.set())
    begun = time.monotonic()
    with _View(flows, console, log) as view:
        try:
            # On threads: what they wait for hears no signal.
            is_done = flows.process_all() if until_done else flows.are_over
            while not interrupted.wait(_LOOK_SECONDS) and not is_done():
                view.show("Ctrl-C stops")
                if is_starting.is_set() and (_has_run(flows) or time.monotonic() - begun > _FIRST_BATCH_SECONDS):
                    is_starting.clear()  # from now on a signal waits for the batches of a flow
            statuses = flows.statuses()
        finally:
            if not interrupted.is_set():
                is_starting.clear()
            view.show("stops after the batches under way; Ctrl-C again: at once")
            flows.stop()
            view.show()
    flows.raise_failures()  # also of a flow that had failed and stayed
    if as_json:
        for status in statuses:
            typer.echo(as_json_line(msgspec.structs.replace(status, state="stopped")))
