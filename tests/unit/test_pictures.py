"""The pictures and lists of the documentation are those that the tools write."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.indexes import PAGES
from tools.pictures import FOLDER, PICTURES, STYLE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PICTURES[name]().svg() + "\n", "run: make docs"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_loads_nothing_and_is_legible_by_day_and_night(name: str) -> None:
    text = PICTURES[name]().svg()
    ET.fromstring(text)
    assert re.findall(r"https?://[^\"']+", text) == ["http://www.w3.org/2000/svg"]
    assert "@font-face" not in text and "@import" not in text and "<image" not in text
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark)")
    used = {one for classes in re.findall(r'class="([^"]+)"', text) for one in classes.split()}
    colours = {one for one in used if re.search(rf"\.{one} \{{[^}}]*#", light)}
    assert {one for one in colours if f".{one} {{" not in dark} == set(), "a colour for the day only"


@pytest.mark.parametrize("name", PICTURES)
def test_a_page_shows_the_picture(name: str) -> None:
    assert f"pictures/{name})" in (ROOT / "docs" / "concepts.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_list_is_current(page: Path) -> None:
    assert page.read_text() == PAGES[page](), "run: make docs"
