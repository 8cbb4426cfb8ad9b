"""The pictures of the live view in the documentation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live_screens", ROOT / "tools" / "live_screens.py")
    assert spec is not None and spec.loader is not None
    before = list(sys.path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("columns", [80, 160])
def test_a_picture_is_what_the_code_draws(tool: ModuleType, columns: int) -> None:
    assert tool.PICTURES[columns].read_text() == tool.drawn(columns), "run make docs"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_picture_asks_no_server_for_anything(tool: ModuleType, columns: int) -> None:
    picture = tool.drawn(columns).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "://" not in picture and "@font-face" not in picture and "@import" not in picture
