"""What only a store in a folder has to care about."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutline.errors import MissingObject, NotDone, OutcomeUnknown, Refused
from cutline.objects import open_store


def test_a_plain_path_and_a_file_url_are_the_same_place(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    open_store(str(folder)).create("one", b"1")
    assert open_store(folder.as_uri()).read("one") == b"1"
    assert open_store(str(folder)).url == folder.as_uri()


def test_leftovers_of_dead_writers_are_invisible_and_go_when_they_are_old(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.create("a/one", b"1")
    old, young = tmp_path / "a" / ".tmp-one-0a", tmp_path / "a" / ".tmp-one-0b"
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (time.time() - 100, time.time() - 100))
    assert [info.path for info in store.walk()] == ["a/one"]
    assert store.collect_leftovers(50_000) == 1
    assert not old.exists() and young.exists()
    assert store.read("a/one") == b"1"


def test_a_name_cannot_be_object_and_folder_at_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.create("a/one", b"1")
    for write in (store.create, store.replace):
        with pytest.raises(NotDone):
            write("a", b"2")
        with pytest.raises(NotDone):
            write("a/one/two", b"2")
    store.delete(["a/one"])
    assert store.create("a", b"2"), "an empty folder must not keep its name"


def test_writers_get_through_while_others_delete_the_last_object_of_their_folder(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    def come_and_go(me: int) -> None:
        for turn in range(100):
            assert store.create(f"shared/folder/{me}-{turn}", b"1")
            store.delete([f"shared/folder/{me}-{turn}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_finds_no_space_has_not_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(NotDone):
        store.create("one", b"1")
    assert list(tmp_path.iterdir()) == []


def test_a_write_whose_folder_cannot_be_synced_may_have_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))

    def broken_for_folders(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken_for_folders)
    with pytest.raises(OutcomeUnknown):
        store.replace("one", b"1")


def test_content_is_synced_before_it_has_its_name_and_every_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    target = tmp_path / "a" / "b" / "one"
    synced: list[tuple[str, bool]] = []

    def note(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), target.exists()))

    monkeypatch.setattr(os, "fsync", note)
    store.create("a/b/one", b"1")
    content = [there for name, there in synced if ".tmp-" in name]
    assert content == [False]
    assert [name for name, there in synced if there] == [str(target.parent), str(tmp_path / "a"), str(tmp_path)]


def test_a_folder_in_the_way_of_the_store_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotDone):
        open_store(str(tmp_path / "file" / "store"))


def test_a_missing_object_is_missing_even_if_its_folder_is(tmp_path: Path) -> None:
    with pytest.raises(MissingObject):
        open_store(str(tmp_path)).read("a/b/c")


def test_links_and_pipes_are_no_objects(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = open_store(str(tmp_path / "store"))
    store.create("a/one", b"1")
    (tmp_path / "store" / "link").symlink_to(outside / "secret")
    (tmp_path / "store" / "folder").symlink_to(outside)
    os.mkfifo(tmp_path / "store" / "pipe")
    assert [info.path for info in store.walk()] == ["a/one"]
    for path in ("link", "folder/secret", "pipe"):
        with pytest.raises(NotDone):
            store.read(path)
        with pytest.raises(NotDone):
            store.download(path, tmp_path / "target")
    for path in ("link", "folder/secret"):
        with pytest.raises(NotDone):
            store.replace(path, b"owned")
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (tmp_path / "target").exists()


def test_a_name_that_no_file_system_takes_is_refused_and_a_lost_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path.as_uri())
    with pytest.raises(Refused):
        store.create("x" * 300, b"")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(NotDone) as caught:
        store.create("x", b"")
    assert caught.value.may_pass
