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
HEAVY = (
    *(
        "asyncio",
        "deltalake",
        "multiprocessing",
        "obstore",
        "pandas",
        "prometheus_client",
        "psycopg",
        "py4j",
        "pyarrow",
    ),
    *("pyarrow", "pydantic", "pyspark", "rich", "sqlite3", "structlog"),
)
#: A help that imports about 250 modules takes 0.2 s on a quiet machine; each hundred more takes another tenth.
MOST_MODULES = 280

_HELP = """
import io, json, os, sys
from contextlib import redirect_stdout
from cutline.cli.failures import run_command
from cutline.cli.main import app
for line in json.loads(sys.argv[1]):
    if not os.fork():
        with redirect_stdout(io.StringIO()) as out:
            code = run_command(app, line)
        print(json.dumps({"line": line, "code": code, "modules": sorted(sys.modules)}), flush=True)
        os._exit(0)
    os.wait()
"""


def modules_after(*lines: list[str]) -> dict[str, set[str]]:
    """The modules that a new process has imported after each of these commands."""
    told = subprocess.run(
        [sys.executable, "-c", _HELP, json.dumps(lines)], capture_output=True, text=True, check=True, timeout=60
    )
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert [one["line"] for one in found] == list(lines) and {one["code"] for one in found} == {0}
    return {" ".join(one["line"]): set(one["modules"]) for one in found}


def commands() -> dict[str, Any]:
    top: Any = typer.main.get_command(app)
    return {name: top.get_command(typer.Context(top), name) for name in top.list_commands(typer.Context(top))}


def savepoint_commands() -> dict[str, Any]:
    group: Any = commands()["savepoint"]
    return dict(group.commands)


def test_no_help_imports_what_takes_long() -> None:
    groups = [["savepoint", name, "--help"] for name in savepoint_commands()]
    lines = [[name, "--help"] for name in commands()]
    imported = modules_after(["--help"], ["--version"], *lines, *groups)
    assert {line: found for line, modules in imported.items() if (found := modules & set(HEAVY))} == {}
    counts = {line: len(modules) for line, modules in imported.items()}
    assert {line: count for line, count in counts.items() if count > MOST_MODULES} == {}, counts


def test_the_help_that_people_read_most_loads_no_other_command() -> None:
    imported = set[str]().union(*modules_after(["--help"], ["checkpoints", "--help"]).values())
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
