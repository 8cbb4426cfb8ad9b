"""Whole traces in files: few, of limited size, without secrets."""

from __future__ import annotations

import os
from pathlib import Path

from cutline.base.traces import KEPT, MOST_BYTES, store_trace


def test_a_trace_is_stored_whole_under_the_name_of_what_failed(tmp_path: Path) -> None:
    path = store_trace(tmp_path / "traces", "totals", "Traceback …\nValueError: 7")
    assert path is not None and path.name.startswith("totals-")
    assert path.read_text() == "Traceback …\nValueError: 7"


def test_the_same_failure_again_replaces_its_trace(tmp_path: Path) -> None:
    """A query that is restarted fails with the same trace, but for numbers."""
    first = store_trace(tmp_path, "totals", "ValueError: row 7 at 0x7f10")
    second = store_trace(tmp_path, "totals", "ValueError: row 12 at 0x88aa")
    other = store_trace(tmp_path, "totals", "KeyError: 7")
    assert first == second != other
    assert second is not None and second.read_text() == "ValueError: row 12 at 0x88aa"


def test_another_run_of_a_query_that_fails_alike_replaces_its_trace(tmp_path: Path) -> None:
    text = "runId = {}, Stream@{}: position 2"
    first = store_trace(tmp_path, "totals", text.format("4afb29c0-72ec-4a96-bc02-671d44c91344", "195a3fb5"))
    assert store_trace(tmp_path, "totals", text.format("2e1dc2e7-b8a8-40cd-8b3e-a05b5305e307", "3391b626")) == first


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    stored = []
    for number in range(KEPT + 5):
        path = store_trace(tmp_path, "totals", "x" * (number + 1))
        assert path is not None
        os.utime(path, (number, number))
        stored.append(path)
    assert sorted(tmp_path.iterdir()) == sorted(stored[-KEPT:])


def test_of_a_long_trace_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    path = store_trace(tmp_path, "totals", "begin" + "ü" * MOST_BYTES + "end")
    assert path is not None
    data = path.read_bytes()
    assert len(data) < MOST_BYTES + 100
    assert data.startswith(b"begin") and data.endswith(b"end") and b"bytes are left out" in data


def test_secrets_are_hidden_and_odd_text_is_stored(tmp_path: Path) -> None:
    path = store_trace(tmp_path, "a/b [/]", "password=geheim \udcff")
    assert path is not None and path.parent == tmp_path
    assert "geheim" not in path.read_text()


def test_a_trace_that_cannot_be_stored_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert store_trace(tmp_path / "file", "totals", "x") is None
