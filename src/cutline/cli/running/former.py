"""How a flow that runs was started: the command line and the folder of its process, by /proc. Nothing is stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutline.cli.declaring import loaded

_PROGRAMS = ("cutline", "cutline.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerRun:
    """A process that ``cutline run`` is."""

    folder: Path
    #: What stands behind ``run``.
    arguments: tuple[str, ...]


def former_run(pid: int) -> FormerRun | None:
    """None: the process is another program, or may not be looked at."""
    try:
        words = [os.fsdecode(one) for one in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
        folder = Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None
    arguments = arguments_of_run(words)
    return FormerRun(folder=folder, arguments=arguments) if arguments is not None and folder.is_dir() else None


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
