"""Crash points: the list, the code and the environment variable say the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import cutline
from cutline.base.crashpoints import (
    DEPLOY_POINTS,
    DETACH_POINTS,
    ENVIRONMENT_VARIABLE,
    EVOLUTION_POINTS,
    PID_VARIABLE,
    POINTS,
    REACHED,
    REMOTE_POINTS,
    RESTORE_NOW_POINTS,
    VICTIM_VARIABLE,
    crashpoint,
)
from tests.support.killing import is_killed_at

SOURCES = Path(cutline.__file__).parent


def points_in_code() -> set[str]:
    # Sinks reach theirs through OpenedSink.
    pattern = re.compile(r"""\b(?:crashpoint|reach|pass_point)\(\s*["']([^"']+)["']""")
    return {name for path in SOURCES.rglob("*.py") for name in pattern.findall(path.read_text())}


LISTS = (POINTS, REMOTE_POINTS, EVOLUTION_POINTS, DETACH_POINTS, DEPLOY_POINTS, RESTORE_NOW_POINTS)
LISTED = {point for points in LISTS for point in points}


def test_every_point_of_the_list_is_in_the_code() -> None:
    assert LISTED - points_in_code() == set()


def test_every_point_in_the_code_is_on_the_list() -> None:
    assert points_in_code() - LISTED == set()


def test_no_point_is_on_the_list_twice() -> None:
    assert len(LISTED) == sum(map(len, LISTS))


def test_without_the_variable_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    for name in POINTS:
        crashpoint(name)


@pytest.mark.parametrize("wanted", ["after-append", "after-append:totals", "after-append:totals#1", "after-append#3"])
def test_the_process_dies_at_the_point(wanted: str) -> None:
    def pass_three_times() -> None:
        for _ in range(3):
            crashpoint("after-append", "totals")

    assert is_killed_at(wanted, pass_three_times)


@pytest.mark.parametrize("wanted", ["after-barrier", "after-append:other", "after-append#4", "after"])
def test_the_process_lives_at_every_other_point(wanted: str) -> None:
    def pass_three_times() -> None:
        for _ in range(3):
            crashpoint("after-append", "totals")

    assert not is_killed_at(wanted, pass_three_times)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the JVM."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_another_process_dies_in_its_place(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], other: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(VICTIM_VARIABLE, "jvm")
    monkeypatch.setenv(PID_VARIABLE, str(other.pid))

    def pass_it() -> None:
        crashpoint("after-append", "totals")
        assert Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # not only soon

    assert not is_killed_at("after-append:totals", pass_it)
    assert other.wait(0) == -signal.SIGKILL
    assert capfd.readouterr().err == f"{REACHED}: after-append:totals kills jvm\n"


def test_another_process_lives_at_every_other_point(
    monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(VICTIM_VARIABLE, "jvm")
    monkeypatch.setenv(PID_VARIABLE, str(other.pid))
    assert not is_killed_at("after-append:totals#2", lambda: crashpoint("after-append", "totals"))
    assert other.poll() is None


def test_another_process_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may belong to somebody else by the time the point is passed again."""
    monkeypatch.setenv(VICTIM_VARIABLE, "jvm")

    def pass_three_times() -> None:
        processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
        for process in processes:
            os.environ[PID_VARIABLE] = str(process.pid)
            crashpoint("after-append")
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
        assert codes == [None, -signal.SIGKILL, None]

    assert not is_killed_at("after-append#2", pass_three_times)


@pytest.mark.parametrize("environment", [{VICTIM_VARIABLE: "jvm"}, {VICTIM_VARIABLE: "nobody"}])
def test_a_victim_that_is_not_known_is_an_error(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    monkeypatch.delenv(PID_VARIABLE, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AssertionError, match="failed before it was killed"):
        is_killed_at("after-append", lambda: crashpoint("after-append"))
