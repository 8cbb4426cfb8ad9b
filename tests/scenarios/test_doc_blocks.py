"""Whatever the pages show of commands and of code exists: every command line is one that ``cutline`` takes, all Python
can be compiled, and every flow that is shown as a whole file can be declared."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from cutline.cli.main import app
from cutline.flow import Flow
from tests.support.doc_commands import PageFile, read_steps

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    if path.name != "cli.md"  # it is written from the commands
]
TOP = typer.main.get_command(app)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

_BLOCK = re.compile(r"^ *```(sh|console|python)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(cutline [a-z][^`\n]+)`")
#: Where a text stops being a command line: a comment, another command, a redirection.
_END = re.compile(r"\s+(#|&&|\|\||\||>|2>|&|;)(\s|$)|;|\)")
#: Not a command line but its shape, or a part that the reader fills in.
_SHAPE = re.compile(r"[\[\]…]|\b(NAME|PLACE|EPOCH|FILE)\b.*\|")


def command_lines(text: str) -> list[str]:
    blocks = [body for kind, body in _BLOCK.findall(text) if kind != "python"]
    lines = [line for body in blocks for line in re.sub(r" *\\\n *", " ", body).splitlines()]
    found = [match.group() for line in lines if (match := re.search(r"(?<![\w/.-])cutline [a-z].*", line)) is not None]
    found += _INLINE.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [_END.split(line, maxsplit=1)[0] for line in found if not _SHAPE.search(line)]


def refusal(line: str) -> str | None:
    """Why ``cutline`` would not take the line; it is only parsed."""
    command: Any = TOP
    try:
        words = shlex.split(line)[1:]
        context = command.make_context("cutline", [], resilient_parsing=True)
        while words and hasattr(command, "commands"):
            command = command.get_command(context, words[0])
            if command is None:
                return f"there is no command {words[0]}"
            context, words = type(context)(command, info_name=words[0], parent=context), words[1:]
        if not hasattr(command, "commands"):
            command.make_parser(context).parse_args(list(words))
    except Exception as error:  # noqa: BLE001 (whatever the parser raises is the answer)
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_every_command_line_of_a_page_is_one_that_cutline_takes(name: str) -> None:
    refused = {line: refusal(line) for line in command_lines((ROOT / name).read_text(encoding="utf-8"))}
    assert {line: why for line, why in refused.items() if why is not None} == {}


def test_there_are_such_lines_and_wrong_ones_are_noticed() -> None:
    assert sum(len(command_lines(path.read_text(encoding="utf-8"))) for path in PAGES) > 80
    assert refusal("cutline restore payments --to 3 --dry-run") is None
    assert refusal("cutline savepoint create payments name") is None
    for wrong in ("cutline restore payments --too 3", "cutline savepont list", "cutline savepoint lst"):
        assert refusal(wrong) is not None, wrong


@pytest.mark.parametrize("name", NAMES)
def test_all_python_of_a_page_can_be_compiled(name: str) -> None:
    for kind, body in _BLOCK.findall((ROOT / name).read_text(encoding="utf-8")):
        if kind == "python":
            compile(re.sub(r"^  (?=\S)", "", body, flags=re.MULTILINE) if body.startswith("  ") else body, name, "exec")


FLOWS = [
    (name, step)
    for name in NAMES
    for step in read_steps(ROOT / name)
    if isinstance(step, PageFile) and step.name.endswith(".py") and "flow.sink" in step.text
]


@pytest.mark.parametrize(("page", "file"), FLOWS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_a_flow_that_a_page_shows_can_be_declared(page: str, file: PageFile) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(file.text, f"{page}: {file.name}", "exec"), names)
    (flow,) = [value for value in names.values() if isinstance(value, Flow)]
    assert flow.graph().names
