from __future__ import annotations

import ast
from typing import Any

import pytest

from cutline.fingerprint import sources
from cutline.fingerprint.sources import SourceFile


def test_another_thread_that_parses_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython 3.11 fails if two threads parse at the same time."""
    monkeypatch.setattr(sources, "_PARSE_PAUSE_SECONDS", 0.0)
    real, tries = ast.parse, iter(range(3))

    def parse(text: str) -> Any:
        if next(tries, None) is not None:
            raise SystemError("AST constructor recursion depth mismatch (before=180, after=62)")
        return real(text)

    monkeypatch.setattr(ast, "parse", parse)
    assert SourceFile.load(__file__, {}) is not None
    monkeypatch.setattr(ast, "parse", lambda _: real("1 +"))
    assert SourceFile.load(__file__, {}) is None, "no Python"
