"""ARCHITECTURE.md says what is so: its picture of the layers, and every file, folder and test it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.layer_picture import PAGE, with_picture

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cutline"
TEXT = PAGE.read_text()
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(test_[a-z0-9_]+)`", TEXT)))


def test_the_picture_of_the_layers_is_drawn_from_the_contract() -> None:
    assert with_picture(TEXT) == TEXT, "make docs draws it anew"


@pytest.mark.parametrize("name", NAMED)
def test_every_module_and_folder_it_names_exists(name: str) -> None:
    places = [SOURCE / name, (SOURCE / name).with_suffix(".py"), ROOT / name]
    assert any(place.exists() for place in places), f"{name} is neither a room nor a module"


@pytest.mark.parametrize("name", TESTS)
def test_every_test_it_names_exists(name: str) -> None:
    assert any((ROOT / "tests").rglob(f"{name}.py")), f"there is no test module {name}"
