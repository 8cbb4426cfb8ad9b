"""How a flow that runs was started: command line, folder and variables of its process, by /proc. Nothing is stored."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutline.cli.declaring import loaded

_PROGRAMS = ("cutline", "cutline.py")
_OWN_VARIABLES = "CUTLINE_"
_OF_TESTS = "CUTLINE_CRASH_"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerRun:
    """A process that ``cutline run`` is."""

    folder: Path
    #: What stands behind ``run``.
    arguments: tuple[str, ...]
    #: The variables of Cutline that it was started with. May hold secrets: only the names are ever shown.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def former_run(pid: int) -> FormerRun | None:
    """None: the process is another program, or may not be looked at."""
    try:
        words = [os.fsdecode(one) for one in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
        folder = Path(os.readlink(f"/proc/{pid}/cwd"))
        settings = [os.fsdecode(one) for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    except OSError:
        return None
    arguments = arguments_of_run(words)
    if arguments is None or not folder.is_dir():
        return None
    environment = own_variables(dict(one.partition("=")[::2] for one in settings))
    return FormerRun(folder=folder, arguments=arguments, environment=environment)


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of Cutline, without those of tests that kill a process."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_OWN_VARIABLES) and not name.startswith(_OF_TESTS)
    }


@contextlib.contextmanager
def environment_of(former: FormerRun | None) -> Iterator[None]:
    """Cutline's variables are those of the former process for a while; None: those of this one."""
    before = own_variables(os.environ)
    if former is not None:
        _set_variables(former.environment)
    try:
        yield
    finally:
        if former is not None:
            _set_variables(before)


def _set_variables(wanted: Mapping[str, str]) -> None:
    for name in set(own_variables(os.environ)).difference(wanted):
        del os.environ[name]
    os.environ.update(wanted)


def arguments_of_run(words: Sequence[str]) -> tuple[str, ...] | None:
    """What stands behind ``cutline run`` in a command line; None: it is no such command."""
    for at, word in enumerate(words[:-1]):
        path = Path(word)
        is_program = path.name in _PROGRAMS or (path.name == "__main__.py" and path.parent.name == "cutline")
        if is_program and words[at + 1] == "run":
            return tuple(words[at + 2 :])
    return None


def context_of_run(arguments: Sequence[str]) -> Any:
    """The parsed command ``cutline run``; ``invoke`` runs it. Raises what the command line raises for wrong use."""
    from cutline.cli.running.run import run

    command = loaded("run", run)
    return command.make_context("cutline run", list(arguments))
