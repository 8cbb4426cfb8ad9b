"""Writes docs/cli.md, the reference of the command line, from the commands themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from cutline.cli.failures import MEANINGS
from cutline.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

_INTRODUCTION = """# The command line

<!-- `make docs` writes this page from the commands: change their texts in src/cutline/cli -->

- FLOW is the first argument of every command that is about a flow. It may be left out if the storage has only one.
- `--storage` and `--config` say where the flow is; without them, `cutline.toml`, the environment and the defaults do.
  See [the options](guide.md#options).
- `--json` prints one JSON object or list, for programs: the keys stay the same from version to version.
- `demo`, `simulate` and `version` are about no flow of yours: they take neither FLOW nor `--storage` nor `--config`.
- `cutline --install-completion` sets up the shell that runs it: Tab then completes commands, options, flows, epochs,
  savepoints.

A command that fails prints one to three lines on standard error: what happened, to which flow and operator, what to do
next. With `--json` it prints one object on standard output instead: `error`, `kind` (the class), `where` (flow,
operator, epoch, path, line, trace … as far as known) and `next_step`.
"""


def page() -> str:
    """The whole page."""
    top: Any = typer.main.get_command(app)
    context = typer.Context(top, info_name="cutline")
    commands = list(_commands(top, context, "cutline"))
    lines = [_INTRODUCTION, "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += ["", "## Commands", "", "| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {_first(command.help)} |" for name, command, _ in commands]
    for name, command, own in commands:
        lines += ["", f"## {name}", "", *_command(name, command, own)]
    return "\n".join(lines) + "\n"


def command_names(app: typer.Typer) -> list[str]:
    """Every command as a person writes it: "status", "savepoint create"."""
    top: Any = typer.main.get_command(app)
    context = typer.Context(top, info_name="cutline")
    return [name.partition(" ")[2] for name, *_ in _commands(top, context, "cutline")]


def _commands(group: Any, context: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in group.list_commands(context):
        command, path = group.get_command(context, name), f"{prefix} {name}"
        own = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _commands(command, own, path)
        else:
            yield path, command, own


def _command(name: str, command: Any, context: Any) -> Iterator[str]:
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False) and one.name != "help"]
    words = [one for one in shown if one.param_type_name == "argument"]
    usage = [one.metavar if one.required else f"[{one.metavar}]" for one in words]
    yield f"`{' '.join([name, *usage])}`"
    for paragraph in (command.help or "").split("\n\n"):
        yield ""
        yield " ".join(paragraph.split())
    if shown:
        yield from ("", "| argument or option | default | meaning |", "|---|---|---|")
    for one in words:
        yield f"| `{_cell(one.metavar)}` | | {_cell(one.help)} |"
    for one in shown:
        if one.param_type_name == "option":
            yield f"| {_option(one)} | {_default(one)} | {_cell(one.help)} |"


def _option(one: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))


def _default(one: Any) -> str:
    value = one.default
    if value is None or value == "" or one.is_flag:
        names = one.secondary_opts if value is False else one.opts
        return f"`{names[0]}`" if one.is_flag and one.secondary_opts and names else ""
    return f"`{value}`"


def _first(text: str | None) -> str:
    return _cell(" ".join((text or "").split("\n\n", maxsplit=1)[0].split()))


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
