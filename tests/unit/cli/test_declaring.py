"""FLOW may be left out in front of the other arguments; commands are loaded only when they run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cutline.cli.declaring import flow_command
from cutline.cli.main import app
from cutline.cli.options import FlowName

#: What no help needs, and what takes most of the time of an import.
HEAVY = ("deltalake", "obstore", "pandas", "prometheus_client", "psycopg", "py4j", "pyarrow", "pyspark")

_HELP = """
import io, json, sys
from contextlib import redirect_stdout
from cutline.cli.failures import run_command
from cutline.cli.main import app
codes = []
for line in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out:
        codes.append(run_command(app, line))
print(json.dumps({"codes": codes, "modules": sorted(sys.modules)}))
"""


def modules_after(*lines: list[str]) -> set[str]:
    """The modules that a new process has imported after these commands."""
    told = subprocess.run(
        [sys.executable, "-c", _HELP, json.dumps(lines)], capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(told.stdout)
    assert set(found["codes"]) == {0}
    return set(found["modules"])


def commands() -> dict[str, Any]:
    top: Any = typer.main.get_command(app)
    return {name: top.get_command(typer.Context(top), name) for name in top.list_commands(typer.Context(top))}


def savepoint_commands() -> dict[str, Any]:
    group: Any = commands()["savepoint"]
    return dict(group.commands)


def test_no_help_imports_what_takes_long() -> None:
    groups = [["savepoint", name] for name in ("create", "list", "show", "delete", "export", "import")]
    lines = [[name, "--help"] for name in commands() if name not in ("demo", "savepoint")]
    imported = modules_after(["--help"], ["--version"], *lines, *([*words, "--help"] for words in groups))
    assert imported.isdisjoint(HEAVY)


def test_the_help_that_people_read_most_loads_no_other_command() -> None:
    imported = modules_after(["--help"], ["checkpoints", "--help"])
    assert "pydantic" not in imported, "typer needs it to convert values, and a help has none"
    assert "rich.markdown" not in imported, "typer needs it to draw frames around a help"
    ours = {name for name in imported if name.startswith("cutline.")}
    rooms = {name.split(".")[1] for name in ours}
    assert rooms <= {"base", "cli", "config", "errors", "launcher", "model"}, sorted(ours)


def test_the_list_of_commands_says_what_each_command_says_of_itself() -> None:
    top: Any = typer.main.get_command(app)
    for name, command in commands().items():
        first = " ".join(command.help.split("\n\n")[0].split())
        assert top.declared[name].help == first, name


def test_commands_about_a_flow_have_the_same_arguments_and_options() -> None:
    seen = []
    for name, command in [*commands().items(), *savepoint_commands().items()]:
        words = [one.name for one in command.params if one.param_type_name == "argument"]
        options = {option for one in command.params if one.param_type_name == "option" for option in one.opts}
        if "flow" in words or name in ("flows", "doctor", "run"):
            seen.append(name)
            assert words[:1] == ["flow"] or name in ("flows", "doctor", "run"), name
            assert {"--config", "--storage", "--json"} <= options, name
    assert {"status", "checkpoints", "pin", "restore", "verify", "gc", "sinks", "stop", "create", "export"} <= set(seen)


def test_a_mistyped_command_is_told_the_nearest_one() -> None:
    told = CliRunner().invoke(app, ["checkpoint"])
    assert told.exit_code == 2
    assert "Did you mean 'checkpoints'" in " ".join(told.output.replace("│", " ").split())


# ---------------------------------------------------------------------- FLOW

trial = typer.Typer()


@flow_command(trial)
def one(flow: FlowName = None, *, name: Annotated[str, typer.Argument()], deep: bool = False) -> None:
    typer.echo(json.dumps([flow, name, deep]))


@flow_command(trial)
def two(
    flow: FlowName = None, *, name: Annotated[str, typer.Argument()], place: Annotated[str, typer.Argument()]
) -> None:
    typer.echo(json.dumps([flow, name, place]))


@flow_command(trial)
def none(flow: FlowName = None) -> None:
    typer.echo(json.dumps([flow]))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("none", [None]),
        ("none shop", ["shop"]),
        ("none --flow shop", ["shop"]),
        ("one 7", [None, "7", False]),
        ("one shop 7", ["shop", "7", False]),
        ("one --flow shop 7", ["shop", "7", False]),
        ("one 7 --flow shop --deep", ["shop", "7", True]),
        ("one --deep 7", [None, "7", True]),
        ("one -- -7", [None, "-7", False]),
        ("two a b", [None, "a", "b"]),
        ("two shop a b", ["shop", "a", "b"]),
        ("two a b --flow=shop", ["shop", "a", "b"]),
    ],
)
def test_the_flow_comes_first_or_is_left_out(line: str, values: list[Any]) -> None:
    told = CliRunner().invoke(trial, line.split())
    assert told.exit_code == 0, told.output
    assert json.loads(told.output) == values


@pytest.mark.parametrize(
    "line", ["one", "one --flow shop", "one a b c", "one shop 7 --flow shop", "two a", "none a b", "none a --flow b"]
)
def test_too_few_and_too_many_words_are_refused(line: str) -> None:
    assert CliRunner().invoke(trial, line.split()).exit_code == 2
