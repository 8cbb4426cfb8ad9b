"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from cutline.base import durable
from tests.support.small_disk import small_disk


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_create_makes_a_file_with_its_content(tmp_path: Path) -> None:
    assert durable.create(tmp_path / "one", b"content")
    assert (tmp_path / "one").read_bytes() == b"content"
    assert names(tmp_path) == ["one"]


def test_create_never_changes_a_file_that_is_there(tmp_path: Path) -> None:
    durable.create(tmp_path / "one", b"first")
    assert not durable.create(tmp_path / "one", b"second")
    assert (tmp_path / "one").read_bytes() == b"first"
    assert names(tmp_path) == ["one"]


def test_of_racing_creators_exactly_one_wins_and_its_content_stays(tmp_path: Path) -> None:
    for number in range(10):
        target, racers = tmp_path / str(number), 8
        begin = threading.Barrier(racers)
        won: list[int] = []

        def race(me: int, target: Path = target, begin: threading.Barrier = begin, won: list[int] = won) -> None:
            begin.wait()
            if durable.create(target, str(me).encode() * 1_000):
                won.append(me)

        threads = [threading.Thread(target=race, args=(me,)) for me in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert target.read_bytes() == str(won[0]).encode() * 1_000
    assert len(names(tmp_path)) == 10


def test_create_takes_content_of_any_size(tmp_path: Path) -> None:
    for size in (0, 1, 3 << 20):
        durable.create(tmp_path / str(size), os.urandom(size))
        assert (tmp_path / str(size)).stat().st_size == size


def test_create_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", no_space)
    with pytest.raises(OSError, match="No space"):
        durable.create(tmp_path / "one", b"content")
    assert names(tmp_path) == []


def test_replace_gives_a_file_new_content(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        durable.replace(tmp_path / "one", content)
        assert (tmp_path / "one").read_bytes() == content
    assert names(tmp_path) == ["one"]


def test_readers_see_the_old_or_the_new_content_and_nothing_between(tmp_path: Path) -> None:
    path, contents = tmp_path / "one", [bytes([65 + i]) * 200_000 for i in range(2)]
    durable.replace(path, contents[0])
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        durable.replace(path, contents[number % 2], sync=False)
    done.set()
    reader.join()
    assert seen <= set(contents)


def test_a_replacement_that_is_interrupted_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable.replace(tmp_path / "one", b"old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        durable.replace(tmp_path / "one", b"new")
    assert (tmp_path / "one").read_bytes() == b"old"
    leftovers = [name for name in names(tmp_path) if name != "one"]
    assert leftovers
    assert all(durable.is_temporary(name) for name in leftovers)


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    link, fsync = os.link, os.fsync

    def watch_link(source: Path, target: Path) -> None:
        steps.append("name")
        link(source, target)

    def watch_fsync(handle: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    monkeypatch.setattr(os, "link", watch_link)
    monkeypatch.setattr(os, "fsync", watch_fsync)
    durable.create(tmp_path / "one", b"content")
    assert steps == ["file", "name", "folder"]


def test_only_leftovers_are_temporary() -> None:
    assert durable.is_temporary(".tmp-one-1234")
    assert not durable.is_temporary("000000000001.json")


def test_folders_are_made_with_their_parents_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        durable.make_dir(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_racing_makers_of_a_folder_all_find_it(tmp_path: Path) -> None:
    begin, failures = threading.Barrier(8), []

    def make() -> None:
        begin.wait()
        try:
            durable.make_dir(tmp_path / "a" / "b")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_files_of_others_can_be_made_durable(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(b"content")
    durable.fsync_file(tmp_path / "theirs")
    with pytest.raises(FileNotFoundError):
        durable.fsync_file(tmp_path / "nothing")


def test_a_tree_is_synced_with_all_its_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/file").write_bytes(b"content")
    (tmp_path / "tree/other").write_bytes(b"content")
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.readlink(f"/proc/self/fd/{handle}")))
    durable.sync_tree(tmp_path / "tree")
    assert synced == {str(tmp_path / name) for name in ("tree", "tree/deep", "tree/deep/file", "tree/other")}


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, every retry would leave another part of a file."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for write in (durable.create, durable.replace):
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / "record", b"content")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- parents


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EROFS, errno.EACCES])
def test_a_parent_that_cannot_be_synced_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "storage").mkdir()
    synced = unsyncable(tmp_path, monkeypatch, number)
    durable.settle_dir(tmp_path / "storage" / "flow", depth=1)
    assert tmp_path / "storage" in synced
    assert tmp_path.parent not in synced


def test_a_parent_whose_disk_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "storage").mkdir()
    unsyncable(tmp_path, monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="it fails"):
        durable.settle_dir(tmp_path / "storage" / "flow")


def unsyncable(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> list[Path]:
    synced: list[Path] = []

    def fsync_dir(path: Path) -> None:
        if path == folder:
            raise OSError(number, "it fails")
        synced.append(path)

    monkeypatch.setattr(durable, "fsync_dir", fsync_dir)
    return synced


def test_the_name_of_a_mount_point_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    with small_disk(tmp_path / "disk", 1_000) as disk:
        monkeypatch.setattr(durable, "fsync_dir", synced.append)
        durable.settle_dir(disk.folder / "storage" / "flow")
    assert disk.folder in synced
    assert tmp_path not in synced
