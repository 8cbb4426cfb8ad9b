"""How commands end that fail."""

from __future__ import annotations

import ast
import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
import typer

import cutline
from cutline import errors
from cutline.cli.failures import ExitCode, UsageError, as_wrong_use, report, run_command, wants_json
from cutline.errors import (
    ConfigError,
    CutlineError,
    DamagedRecordError,
    FlowFailedError,
    InvariantViolation,
    MissingObject,
    NotDone,
    RecoveryError,
    Refused,
)

FAILURES: dict[str, tuple[BaseException, ExitCode]] = {
    "refused": (RecoveryError("no checkpoint [/]", next_step="restore it", flow="payments"), ExitCode.FAILED),
    "option": (ConfigError("bad value"), ExitCode.FAILED),
    "full": (OSError(errno.ENOSPC, "No space left on device", "/data"), ExitCode.FAILED),
    "broken": (InvariantViolation("a bug"), ExitCode.UNEXPECTED),
    "bug": (KeyError("x"), ExitCode.UNEXPECTED),
    "exit": (typer.Exit(1), ExitCode.FAILED),
    "interrupt": (KeyboardInterrupt(), ExitCode.INTERRUPTED),
    "abort": (typer.Abort(), ExitCode.INTERRUPTED),
}


def failing(error: BaseException) -> Callable[[bool], None]:
    def fail(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        raise error

    return fail


@pytest.fixture
def app() -> typer.Typer:
    """Each command raises one of the failures."""
    commands = typer.Typer()
    for name, (error, _) in FAILURES.items():
        commands.command(name)(failing(error))
    return commands


@pytest.mark.parametrize("name", FAILURES)
def test_every_failure_has_its_exit_code_and_few_lines(
    app: typer.Typer, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command(app, [name]) == FAILURES[name][1]
    told = capsys.readouterr()
    assert told.out == "" and "Traceback" not in told.err
    assert len(told.err.strip().splitlines()) == (0 if name == "exit" else 2 if name == "bug" else 1)
    traces = list((tmp_path / "cutline-traces").glob("*"))
    assert len(traces) == (FAILURES[name][1] == ExitCode.UNEXPECTED)
    assert all(str(one) in told.err for one in traces)


def test_a_question_ends_with_its_mark(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(app, ["refuse"]) == ExitCode.WRONG_USE
    assert "'refused'? Next: see" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in FAILURES if name != "exit"])
def test_with_json_every_failure_is_one_object(
    app: typer.Typer, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command(app, [name, "--json"]) == FAILURES[name][1]
    told = capsys.readouterr()
    assert told.err.strip() == ""
    answer = json.loads(told.out)
    assert answer["error"] and set(answer) == {"error", "kind", "where", "next_step"}


def test_the_fields_of_an_error_are_fields_of_the_object(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(app, ["refused", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "error": "no checkpoint [/]",
        "kind": "RecoveryError",
        "where": {"flow": "payments"},
        "next_step": "restore it",
    }


def test_json_is_an_option_only_before_the_end_of_options() -> None:
    assert wants_json(["status", "--json"])
    assert not wants_json(["status", "--", "--json"]) and not wants_json([])


ROOMS = [Path(cutline.__file__).parent / room for room in ("cli", "savepoints")]
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CutlineError)}


def test_every_error_of_the_commands_has_a_next_step() -> None:
    found = [
        f"{path.relative_to(ROOMS[0].parent)}:{node.lineno}"
        for room in ROOMS
        for path in sorted(room.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in ERRORS
        if "next_step" not in [one.arg for one in node.exc.keywords]
        if "it has just stopped" not in ast.unparse(node.exc)  # its catcher makes a note of it
    ]
    assert found == [], "say what to do next"


@pytest.mark.parametrize(
    "error",
    [NotDone("a"), Refused("a", why="status 403"), MissingObject("a"), DamagedRecordError("a"), FlowFailedError("a")],
)
def test_an_error_without_a_next_step_gets_the_usual_one(
    error: CutlineError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error, as_json=False) == ExitCode.FAILED
    assert re.search(r"Next: \w+", capsys.readouterr().err)
    report(error, as_json=True)
    assert json.loads(capsys.readouterr().out)["next_step"]


def test_a_wrong_value_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as refused, as_wrong_use():
        raise ConfigError("--grace: no", next_step="write 1h", option="--grace")
    assert report(refused.value, as_json=False) == ExitCode.WRONG_USE
    assert "--grace: no (option=--grace). Next: write 1h" in capsys.readouterr().err
