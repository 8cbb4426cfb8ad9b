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
    ("code", "what"),
    [
        (sqlite3.SQLITE_FULL, "the file system is full"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, "the file system is full"),
        (sqlite3.SQLITE_READONLY_DBMOVED, "the file system is read-only"),
        (sqlite3.SQLITE_IOERR_WRITE, "the disk reports an error"),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, "the database cannot be opened"),
        (sqlite3.SQLITE_BUSY, "another process holds the database"),
        (sqlite3.SQLITE_ERROR, "SQLite: it says"),
    ],
)
def test_sqlite_is_put_into_the_same_words(code: int, what: str) -> None:
    error = sqlite3.OperationalError("it says")
    error.sqlite_errorcode = code
    found = storage_error(error, path="/data")
    assert found is not None and found.what == what and found.next_step


def test_real_refusals_are_raised_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a file is where a folder is needed"), in_words(flow="payments"):
        (tmp_path / "file" / "below").mkdir()
    with pytest.raises(StorageError, match="cannot be opened"), in_words(path=tmp_path):
        sqlite3.connect(tmp_path / "no" / "db")


@pytest.mark.parametrize("error", [ValueError("x"), ConnectionResetError(104, "reset"), OSError("no number")])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, in_words(path="x"):
        raise error
    assert caught.value is error
