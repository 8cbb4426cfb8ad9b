"""Crash points: the list, the code and the environment variable say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cutline
from cutline.crashpoints import ENVIRONMENT_VARIABLE, POINTS, crashpoint
from tests.support.killing import is_killed_at

SOURCES = Path(cutline.__file__).parent


def points_in_code() -> set[str]:
    pattern = re.compile(r"""\bcrashpoint\(\s*["']([^"']+)["']""")
    return {name for path in SOURCES.rglob("*.py") for name in pattern.findall(path.read_text())}


def test_every_point_of_the_list_is_in_the_code() -> None:
    assert set(POINTS) - points_in_code() == set()


def test_every_point_in_the_code_is_on_the_list() -> None:
    assert points_in_code() - set(POINTS) == set()


def test_no_point_is_on_the_list_twice() -> None:
    assert len(set(POINTS)) == len(POINTS)


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
