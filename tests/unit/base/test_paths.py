"""Paths from outside: none leaves its folder, and only plain files are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cutline.base.names import are_relative, is_name, is_relative, shown
from cutline.base.paths import NotPlainError, TooLargeError, inside, link_on, open_plain, read_plain
from cutline.errors import DamagedRecordError

GOOD = ["a", "a/b", ".a", "a/.b", "a/..b", "a b", "..." + "x", "état/0", "x" * 255, "state/0/1/SSTs/000012-6f1d.sst"]
BAD = [
    *("", ".", "..", "/", "/a", "a/", "a//b", "./a", "a/.", "a/..", "../a", "a/../b", "a\\b", "a\0", "a\n", "\x1b[2J"),
    *("a\u202eb", "\u200b", "\ud800", "．．/a", "․․/a", "a／..／b", "x" * 256, "é" * 128, "a/" * 600 + "b"),
]


@pytest.mark.parametrize("path", GOOD)
def test_paths_that_stay(path: str, tmp_path: Path) -> None:
    assert is_relative(path)
    assert inside(tmp_path, path) == tmp_path / path


@pytest.mark.parametrize("path", BAD, ids=ascii)
def test_paths_that_may_not_stay(path: str, tmp_path: Path) -> None:
    assert not is_relative(path)
    assert not are_relative([*GOOD, path, *GOOD]), "one is enough"
    with pytest.raises(DamagedRecordError) as refused:
        inside(tmp_path, path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1_000


@given(st.lists(st.text(st.sampled_from("ab./\\\0é．"), max_size=6), max_size=4))
@example(["a/", "/b"])
@example(["a", ""])
def test_many_at_once_are_as_good_as_the_worst(paths: list[str]) -> None:
    assert are_relative(paths) == all(map(is_relative, paths))
    for path in filter(is_relative, paths):
        assert os.path.normpath(f"/root/{path}") == f"/root/{path}"


def test_a_name_has_no_folder() -> None:
    assert is_name("a.arrow") and not is_name("a/b") and not is_name("..")


def test_a_link_leads_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "plain").mkdir(parents=True)
    outside.mkdir()
    (root / "plain" / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    assert link_on(root, "plain/new/file") is None
    for path in ("plain/link", "plain/link/file", "dangling", "dangling/x"):
        with pytest.raises(DamagedRecordError, match="symbolic link"):
            inside(root, path)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    plain.write_bytes(b"content")
    link.symlink_to(plain)
    os.mkfifo(pipe)
    assert read_plain(plain) == read_plain(plain, 7) == b"content"
    with pytest.raises(TooLargeError):
        read_plain(plain, 6)
    for path, error in ((link, NotPlainError), (pipe, NotPlainError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error), open_plain(path):
            pass
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nothing")


def test_what_an_error_shows_is_short_and_plain() -> None:
    assert shown("a\x1b[2J\u202e") == "'a\\x1b[2J\\u202e'"
    assert len(shown("x" * 10_000)) < 200
