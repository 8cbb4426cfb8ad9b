"""What file systems and SQLite refuse, in words."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from cutline.base.storage_errors import in_words, storage_error
from cutline.errors import StorageError


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_a_file_system_has_words_and_a_next_step(number: int) -> None:
    error = OSError(number, os.strerror(number), "/data/flow")
    if isinstance(error, ConnectionError | TimeoutError):
        assert storage_error(error) is None
        return
    found = storage_error(error, flow="payments")
    assert found is not None and found.what and found.next_step
    assert found.where == {"flow": "payments", "path": "/data/flow"}


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("database or disk is full", "the file system is full"),
        ("attempt to write a readonly database", "the file system is read-only"),
        ("disk I/O error", "the disk reports an error"),
        ("no such table: x", "SQLite: no such table: x"),
    ],
)
def test_sqlite_is_put_into_the_same_words(message: str, what: str) -> None:
    found = storage_error(sqlite3.OperationalError(message), path="/data")
    assert found is not None and found.what == what and found.next_step


def test_real_refusals_are_raised_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file is where a folder is needed"), in_words(flow="payments"):
        (tmp_path / "file" / "below").mkdir()
    with pytest.raises(StorageError, match="may not use"), in_words(path=tmp_path):
        sqlite3.connect(tmp_path / "no" / "db")


@pytest.mark.parametrize("error", [ValueError("x"), ConnectionResetError(104, "reset"), OSError("no number")])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, in_words(path="x"):
        raise error
    assert caught.value is error
