"""How a command ends that fails: exit code, one to three lines on standard error, or an object with ``--json``.

No traceback reaches the terminal. What is not expected is a bug: its trace is stored in a file, which is named.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import typer

from cutline.base.redaction import without_secrets
from cutline.base.storage_errors import storage_error
from cutline.base.traces import cause_of, store_trace
from cutline.errors import (
    ConfigError,
    CutlineError,
    DamagedRecordError,
    InvariantViolation,
    MissingObject,
    Refused,
    StoreError,
    UnknownFormatError,
)

#: A name from outside may be as long as the command line allows.
_MOST_CHARACTERS = 2_000
#: Longer than a path may be.
_LONG_WORD = re.compile(r"\S{4097,}")
_LONG_SHOWN = 100
_TRACES = "cutline-traces"


class ExitCode(IntEnum):
    """The exit codes of every command; ``make docs`` writes the table in docs/cli.md."""

    DONE = 0
    #: The command could not be carried out, and says why; or it has found what it looks for (damage, a violation).
    FAILED = 1
    #: The command line is wrong; ``verify``: the check could not run.
    WRONG_USE = 2
    #: A bug in Cutline.
    UNEXPECTED = 3
    #: Interrupted by Ctrl-C.
    INTERRUPTED = 130
    #: Ended by SIGTERM.
    TERMINATED = 143


#: For the table in the documentation.
MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "the command could not be carried out, and says why; or it has found what it looks for: damage "
    "(`verify`), a start that would refuse (`restore --dry-run`), something that fails (`doctor`), violations "
    "(`simulate`), a difference (`demo`)",
    ExitCode.WRONG_USE: "the command line is wrong; `verify`: the check could not run",
    ExitCode.UNEXPECTED: "a bug in Cutline: the text names the file with the trace. Please report it",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C. `run` stops the flow and ends with 0",
    ExitCode.TERMINATED: "ended by SIGTERM. `run` stops the flow and ends with 0",
}


class UsageError(ConfigError):
    """The command line is wrong: exit code 2, whatever is stored."""


@contextmanager
def as_wrong_use() -> Iterator[None]:
    """What is wrong with a value here is wrong with the command line."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(error.what, next_step=error.next_step, **error.where) from error


def run_command(command: Callable[..., Any], arguments: Sequence[str]) -> int:
    """Run the command line; return its exit code. Whatever happens is reported, and nothing is raised."""
    for stream in (sys.stdout, sys.stderr):
        # Names from outside need not be valid text, and a terminal need not know every character.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    as_json = wants_json(arguments)
    try:
        code = command(args=list(arguments), prog_name="cutline", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return _tell("interrupted", ExitCode.INTERRUPTED, as_json=as_json)
    except SystemExit as ending:  # a signal, see ``cutline.cli.signals``
        if not isinstance(ending.code, int):
            raise
        code = ending.code
    except Exception as error:  # noqa: BLE001 (the outermost handler: every failure is reported here)
        return report(error, as_json=as_json)
    if code == ExitCode.INTERRUPTED:
        return _tell("interrupted", ExitCode.INTERRUPTED, as_json=as_json)
    return code if isinstance(code, int) else ExitCode.DONE


def wants_json(arguments: Sequence[str]) -> bool:
    own = list(arguments)
    return "--json" in (own[: own.index("--")] if "--" in own else own)


def report(error: Exception, *, as_json: bool, code: ExitCode = ExitCode.FAILED) -> int:
    """Print an error; return the exit code. ``code``: for errors that Cutline raises on purpose."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the command line is wrong
        return _wrong_use(error, as_json=as_json)
    expected = error if isinstance(error, CutlineError) else storage_error(error)
    if expected is None:
        return _unexpected(error, as_json=as_json)
    if isinstance(expected, UsageError):
        code = ExitCode.WRONG_USE
    if isinstance(expected, InvariantViolation):
        expected.add_where(trace=store_command_trace(error))
        code = ExitCode.UNEXPECTED
    next_step = expected.next_step or usual_next_step(expected)
    return _tell(
        expected.what,
        code,
        kind=type(expected).__name__,
        where=expected.where,
        next_step=next_step,
        as_json=as_json,
        text=f"{expected.without_next_step()}. Next: {next_step}",
    )


#: For an error whose code knows no next step: a store, for example, does not know what its caller is about.
_USUAL: Mapping[type[CutlineError], str] = {
    MissingObject: "check the place",
    Refused: "check the place, and that these credentials may use it: cutline doctor",
    StoreError: "try again; whether the store answers: cutline doctor",
    DamagedRecordError: "see what is damaged: cutline verify",
    UnknownFormatError: "use the version of Cutline that has written it, or a newer one",
    InvariantViolation: "please report this with the trace",
}


def usual_next_step(error: CutlineError) -> str:
    return next(
        (text for kind, text in _USUAL.items() if isinstance(error, kind)), "see cutline status, cutline doctor"
    )


def _wrong_use(error: Any, *, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError" and not as_json:
        error.show()  # its message is the help
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    next_step = f"see {context.command_path if context is not None else 'cutline'} --help"
    what = error.format_message() if type(error).__name__ != "NoArgsIsHelpError" else "there is no command"
    _tell(
        what,
        ExitCode.WRONG_USE,
        kind="UsageError",
        next_step=next_step,
        as_json=as_json,
        text=f"{what.rstrip('.')}{'' if what.endswith('?') else '.'} Next: {next_step}",
    )
    return int(error.exit_code)


def _unexpected(error: Exception, *, as_json: bool) -> int:
    what, trace = f"unexpected error: {cause_of(error)}", store_command_trace(error)
    stored = {"trace": trace} if trace is not None else {}
    next_step = "please report this with the trace"
    text = f"{what}\nNext: {next_step}{f': {trace}' if trace else '; it could not be stored'}"
    return _tell(
        what,
        ExitCode.UNEXPECTED,
        kind=type(error).__name__,
        where=stored,
        next_step=next_step,
        as_json=as_json,
        text=text,
    )


def store_command_trace(error: BaseException) -> Path | None:
    """Not in the storage of a flow: the command may fail because of it, or not know any."""
    folder = Path(tempfile.gettempdir()) / _TRACES
    return store_trace(folder, f"command-{type(error).__name__}", "".join(traceback.format_exception(error)))


def _tell(
    what: str,
    code: ExitCode,
    *,
    kind: str = "",
    where: Mapping[str, object] | None = None,
    next_step: str = "",
    as_json: bool,
    text: str = "",
) -> int:
    if as_json:
        answer = {
            "error": _shown(what),
            "kind": kind,
            "where": {key: _shown(str(value)) for key, value in (where or {}).items()},
            "next_step": _shown(next_step),
        }
        typer.echo(json.dumps(answer))
    else:
        # Without markup: the text may hold brackets, and names from outside.
        typer.echo(f"{typer.style('error:', fg=typer.colors.RED, bold=True)} {_shown(text or what)}", err=True)
    return code


def _shown(text: str) -> str:
    safe = without_secrets(text)
    # A name from outside may hold what moves the cursor or changes colours.
    safe = "".join(one if one.isprintable() or one == "\n" else "?" for one in safe)
    safe = _LONG_WORD.sub(lambda word: f"{word[0][:_LONG_SHOWN]}…", safe)
    return safe if len(safe) <= _MOST_CHARACTERS else f"{safe[: _MOST_CHARACTERS - 1]}…"
