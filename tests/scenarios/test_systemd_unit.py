"""The systemd unit in docs/deploying.md is one that systemd takes, with a command line that ``cutline`` takes."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from cutline.cli.failures import ExitCode
from cutline.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "deploying.md"
PROGRAM = "/srv/payments/.venv/bin/cutline"


@pytest.fixture
def text() -> str:
    (found,) = re.findall(r"^```ini\n(# /etc/systemd/.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(found)


def test_the_unit_runs_a_command_that_there_is(text: str) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd have capitals
    unit.read_string(text)
    assert list(unit) == ["DEFAULT", "Unit", "Service", "Install"]
    service = unit["Service"]
    program, name, *words = shlex.split(service["ExecStart"])
    assert (program, name) == (PROGRAM, "run")
    top = typer.main.get_command(app)
    command = top.get_command(typer.Context(top), name)  # type: ignore[attr-defined]
    given = command.make_context("run", words).params
    assert [str(file) for file in given["files"]] == ["flow.py"] and given["log_format"] == "json"
    assert int(service["RestartPreventExitStatus"]) == ExitCode.WRONG_USE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(text: str, tmp_path: Path) -> None:
    """With a program and a folder that exist here: it looks for them."""
    program = tmp_path / "cutline"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "cutline-payments.service"

    def verify(written: str) -> str:
        unit.write_text(written)
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return "".join(line for line in told.stderr.splitlines(keepends=True) if unit.name in line)

    right = text.replace(PROGRAM, str(program))
    assert verify(right) == ""
    assert "Bogus" in verify(right.replace("KillMode=mixed", "KillMode=mixed\nBogus=1")), "it would be noticed"
