"""Which versions of Spark are taken, and that the package demands the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cutline.config.spark_versions import NEWEST, OLDEST, REQUIREMENT, parse_version, why_unsupported

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.mark.parametrize("version", ["4.1.0", "4.2.1", "4.3.0", "4.3.0.dev1", "4.1.4-amzn-0"])
def test_these_are_supported(version: str) -> None:
    assert why_unsupported(version) is None


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("4.0.5", "4.0"),
        ("3.5.9", "in Python"),
        ("4.4.0", "newer"),
        ("5.0.0", "newer"),
        ("unknown", "in Python"),
    ],
)
def test_these_are_not(version: str, why: str) -> None:
    assert why in str(why_unsupported(version))


def test_the_package_demands_the_same_versions() -> None:
    demanded = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert REQUIREMENT in demanded
    lowest, _, limit = REQUIREMENT.removeprefix("pyspark>=").partition(",<")
    assert parse_version(lowest) == OLDEST
    assert parse_version(limit) == (NEWEST[0], NEWEST[1] + 1)
