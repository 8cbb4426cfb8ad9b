"""``cutline doctor``: every line with a verdict, the exit code, and no secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app


@pytest.fixture(autouse=True)
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says what Java says; elsewhere, Java itself is asked."""
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'openjdk version \"17.0.9\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    return program


def test_a_machine_in_order(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["doctor", "--json", "--storage", str(tmp_path / "data")])
    found = json.loads(told.output)
    assert (told.exit_code, found["is_ok"]) == (0, True), told.output
    names = [one["check"] for one in found["checks"]]
    assert names == [
        *("Python", "PySpark", "Java", "memory", "configuration", "disk", "inodes", "permissions", "clock"),
    ]
    assert not (tmp_path / "data").exists()


def test_what_fails_says_what_to_do_and_the_rest_is_checked(tmp_path: Path, java: Path) -> None:
    java.unlink()
    (tmp_path / "own.toml").write_text("nosuch = 1\n")
    told = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path), "--config", str(tmp_path / "own.toml")])
    assert told.exit_code == 1
    lines = told.output.splitlines()
    assert next(line for line in lines if line.startswith("fail  ")).startswith("fail  Java: ")
    assert any(line.startswith("fail  configuration: ") and "nosuch" in line for line in lines)
    assert sum(line.startswith("      Next: ") for line in lines) >= 2
    assert any(line.startswith("ok    permissions: ") for line in lines)
    assert lines[-1].startswith("9 checks: 2 failures, ")


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(
        'remote = "s3://user:hunter2@bucket/x?token=hunter2"\n[remote_options]\nsecret_access_key = "hunter2"\n'
    )
    for more in ([], ["--json"]):
        told = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path), "--config", str(config), *more])
        assert told.exit_code == 1
        assert "remote" in told.output and "hunter2" not in told.output
