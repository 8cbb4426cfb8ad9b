"""Runs the commands of a documentation page as they are written, in one shell and one folder.

A page holds two kinds of blocks that count here:

- a block with a title (``python title="shop.py"``), or behind ``<!-- file: shop.py -->``, is a file; it is written when
  its turn comes.
- a ``console`` block: lines with ``$`` are commands, ``>`` continues one, the lines after it are what it prints. ``…``
  in them stands for any text, a line with only ``…`` for any number of lines. A command without such lines may print
  anything. Every command must end with exit code 0. ``<!-- exit code 1 -->`` before a block names another one for its
  last command; ``<!-- keeps running -->``: this command does not end, and runs in the background until the page ends.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import cutline

_FENCE = re.compile(
    r"(?:^<!-- (?:exit code (?P<code>\d+)|(?P<running>keeps running)) -->\n+)?(?:^<!-- file: (?P<file>\S+) -->\n+)?"
    r"^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """A file that the page tells its reader to write."""

    name: str
    text: str
    section: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, what the page shows of its output, and the exit code that it says."""

    text: str
    shown: tuple[str, ...]
    code: int
    keeps_running: bool
    section: str
    line: int


Step = PageFile | Command


def read_steps(page: Path, *, section: str | None = None) -> list[Step]:
    """All files and commands of a page, or of one section, in order."""
    text = page.read_text(encoding="utf-8")
    headings = [(match.start(), match.group(1)) for match in _HEADING.finditer(text)]
    found: list[Step] = []
    for match in _FENCE.finditer(text):
        within = next((name for at, name in reversed(headings) if at < match.start()), "")
        if section is not None and within != section:
            continue
        first_line = text.count("\n", 0, match.start("body")) + 1
        if name := match["title"] or match["file"]:
            found.append(PageFile(name=name, text=match["body"], section=within))
        elif match["kind"] == "console":
            commands = _commands(match["body"].splitlines(), within, first_line)
            last = replace(commands[-1], code=int(match["code"] or 0), keeps_running=match["running"] is not None)
            found += [*commands[:-1], last]
    return found


def _commands(lines: list[str], section: str, first_line: int) -> list[Command]:
    found: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(lines, start=first_line):
        if line.startswith("$ "):
            found.append((number, [line[2:]], []))
        elif line.startswith("> ") and found and not found[-1][2]:
            found[-1][1].append(line[2:])
        elif found:
            found[-1][2].append(line)
        else:
            raise AssertionError(f"line {number}: output before a command: {line}")
    return [
        Command(text="\n".join(texts), shown=tuple(shown), code=0, keeps_running=False, section=section, line=number)
        for number, texts, shown in found
    ]


def matches(shown: Iterable[str], output: str) -> bool:
    """Whether a command printed what the page shows; spaces at the ends of lines do not count."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else ".*?".join(map(re.escape, line.rstrip().split("…"))) + r"\n"
        for line in shown
    )
    printed = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    return re.fullmatch(pattern, printed) is not None


@dataclass
class Shell:
    """One bash for a whole page: variables, background jobs and the folder stay from command to command."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 120.0

    def __enter__(self) -> Shell:
        self.folder.mkdir(parents=True, exist_ok=True)
        # The exit codes come on a pipe of their own: nothing that a command prints gets there.
        self._answers, self._told = os.pipe()
        self._outputs = 0
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={**os.environ, **self._paths(), "COLUMNS": "100", **self.environment},
            text=True,
            pass_fds=(self._told,),
            start_new_session=True,
        )
        os.close(self._told)  # the number is the shell's
        return self

    def _paths(self) -> dict[str, str]:
        """``cutline`` and ``python`` are those of the tests, whatever is installed."""
        tools = self.folder.with_name(f"{self.folder.name}-bin")
        tools.mkdir(exist_ok=True)
        for name, command in {"python": "", "cutline": " -m cutline"}.items():
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{command} "$@"\n')
            (tools / name).chmod(0o755)
        package = str(Path(cutline.__file__).parents[1])
        return {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": f"{package}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
        }

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        # What a page left running in the background ends with it; the session is the shell's own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._shell.pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.2)
        self._shell.wait(timeout=10)
        os.close(self._answers)

    def run(self, command: str) -> tuple[int, str]:
        """The exit code and all that the command printed until it ended."""
        assert self._shell.stdin is not None
        self._outputs += 1
        output = self.folder.with_name(f"{self.folder.name}-bin") / f"output-{self._outputs}"
        self._shell.stdin.write(f"{{ {command}\n}} >'{output}' 2>&1 {self._told}>&-\necho $? >&{self._told}\n")
        self._shell.stdin.flush()
        code = self._answer(command)
        return code, output.read_text(encoding="utf-8", errors="replace")

    def _answer(self, command: str) -> int:
        answer, deadline = b"", time.monotonic() + self.timeout_seconds
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise AssertionError(f"not done after {self.timeout_seconds} s: {command}")
            piece = os.read(self._answers, 100)
            assert piece, f"the shell has ended: {command}"
            answer += piece
        return int(answer)


def perform(steps: Iterable[Step], shell: Shell, *, not_run: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Write the files and run the commands; each must print and end as the page says. ``not_run``: why not."""
    for step in steps:
        if isinstance(step, PageFile):
            path = shell.folder / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text, encoding="utf-8")
        elif step.text not in (not_run or {}):
            code, output = shell.run(f"{step.text} &" if step.keeps_running else step.text)
            told = f"line {step.line}: $ {step.text}\nexit code {code}, output:\n{output}"
            assert code == step.code, told
            is_told = step.keeps_running or not step.shown or matches(step.shown, output)
            assert is_told, f"the page shows other output\n{told}"
            yield step
