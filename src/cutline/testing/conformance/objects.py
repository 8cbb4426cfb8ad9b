"""The suite that every object store must pass.

class TestMyStore(ObjectStoreConformance):
    @pytest.fixture
    def store(self, tmp_path): return MyStore(...)  # empty
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutline.errors import MissingObject, NotDone
from cutline.ports.objects import ObjectStore

_LARGE = 20_000_000


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(info.path for info in store.walk(prefix))


class ObjectStoreConformance:
    """Subclasses have a fixture ``store``, which opens an empty store."""

    def test_create_stores_what_was_not_there(self, store: ObjectStore) -> None:
        assert store.create("a/one", b"first")
        assert store.read("a/one") == b"first"

    def test_create_never_changes_what_is_there_not_even_for_the_same_bytes(self, store: ObjectStore) -> None:
        store.create("a/one", b"first")
        assert not store.create("a/one", b"second")
        assert not store.create("a/one", b"first")
        assert store.read("a/one") == b"first"

    def test_an_object_that_was_deleted_can_be_created_again(self, store: ObjectStore) -> None:
        store.create("a/one", b"first")
        store.delete(["a/one"])
        assert store.create("a/one", b"second")
        assert store.read("a/one") == b"second"

    def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(self, store: ObjectStore) -> None:
        racers = 6
        with ThreadPoolExecutor(racers) as pool:
            for number in range(2):
                begin = threading.Barrier(racers)

                def race(me: int, number: int = number, begin: threading.Barrier = begin) -> bool:
                    begin.wait()
                    return store.create(f"race/{number}/record", b"%d" % me * 1_000)

                won = [me for me, created in enumerate(pool.map(race, range(racers))) if created]
                assert len(won) == 1
                assert store.read(f"race/{number}/record") == b"%d" % won[0] * 1_000

    def test_replace_stores_whatever_was_there(self, store: ObjectStore) -> None:
        store.replace("one", b"first")
        store.replace("one", b"second, longer")
        assert store.read("one") == b"second, longer"
        store.replace("one", b"")
        assert store.read("one") == b""

    def test_what_is_missing_is_said_to_be_missing(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("a/b/c", b"1")
        for path in ("nothing", "a/nothing", "a/b", "a/b/c/d"):
            assert store.find(path) is None
            with pytest.raises(MissingObject):
                store.read(path)
            with pytest.raises(MissingObject):
                store.download(path, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    def test_an_object_beyond_the_limit_is_not_read(self, store: ObjectStore) -> None:
        store.replace("large", b"12345")
        assert store.read("large", 5) == b"12345"
        with pytest.raises(NotDone):
            store.read("large", 4)

    def test_find_tells_size_and_time(self, store: ObjectStore) -> None:
        store.create("a/one", b"12345")
        info = store.find("a/one")
        assert info is not None
        assert (info.path, info.size_bytes) == ("a/one", 5)
        assert abs(info.modified_ms - time.time() * 1_000) < 60_000
        assert list(store.walk()) == [info]

    def test_walk_goes_by_whole_folders(self, store: ObjectStore) -> None:
        everything = ["a/b/c/1", "a/b/2", "a/bc/3", "ab/x", "top"]
        for path in everything:
            store.create(path, b"1")
        assert paths(store) == sorted(everything)
        assert paths(store, "a") == ["a/b/2", "a/b/c/1", "a/bc/3"]
        assert paths(store, "a/b") == ["a/b/2", "a/b/c/1"]
        assert paths(store, "a/b/c") == ["a/b/c/1"]
        assert paths(store, "nothing") == []
        assert paths(store, "top") == []

    def test_walk_finds_more_than_one_page(self, store: ObjectStore) -> None:
        names = [f"many/{number:05}" for number in range(1_100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.replace(name, b""), names))
        assert paths(store, "many") == names
        store.delete(names)
        assert paths(store) == []

    def test_delete_removes_these_and_no_others_and_may_be_repeated(self, store: ObjectStore) -> None:
        for path in ("a/1", "a/2", "a/3"):
            store.create(path, b"1")
        for _ in range(2):
            store.delete(["a/1", "never/there", "a/3"])
            assert paths(store) == ["a/2"]
        store.delete([])
        store.delete(["a"])
        assert paths(store) == ["a/2"]

    @pytest.mark.parametrize("size", [0, 1_000, _LARGE])
    def test_a_file_comes_back_as_it_was(self, store: ObjectStore, tmp_path: Path, size: int) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(os.urandom(size))
        store.upload("files/one", source)
        info = store.find("files/one")
        assert info is not None and info.size_bytes == size
        store.download("files/one", target)
        assert target.read_bytes() == source.read_bytes()
        assert store.read("files/one") == source.read_bytes()
        # No other file is left beside it.
        assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"source", "target"}

    def test_an_upload_replaces(self, store: ObjectStore, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(b"second")
        store.create("one", b"first")
        store.upload("one", tmp_path / "source")
        assert store.read("one") == b"second"

    def test_a_file_that_is_not_there_cannot_be_uploaded(self, store: ObjectStore, tmp_path: Path) -> None:
        with pytest.raises(NotDone):
            store.upload("one", tmp_path / "nothing")
        assert store.find("one") is None

    def test_a_download_needs_its_folder(self, store: ObjectStore, tmp_path: Path) -> None:
        store.create("one", b"1")
        with pytest.raises(NotDone) as refused:
            store.download("one", tmp_path / "nowhere" / "target")
        assert not isinstance(refused.value, MissingObject)

    @pytest.mark.parametrize(
        "path",
        [
            "grün/日本 語.json",
            "day=2026-11-16/part",
            "a%20b%2Fc",
            "a+b&c=d?e#f",
            "[x]{y}^`~'\"<>|*",
            "e\u0301",
            ".hidden",
        ],
    )
    def test_names_stay_as_they_are(self, store: ObjectStore, path: str) -> None:
        assert store.create(path, b"content")
        assert store.read(path) == b"content"
        assert paths(store) == [path]
        assert store.find(path) is not None
        store.delete([path])
        assert paths(store) == []

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/./b", "a\\b", "a\nb", ".tmp-a"])
    def test_names_that_stores_understand_differently_are_refused(self, store: ObjectStore, path: str) -> None:
        with pytest.raises(NotDone):
            store.create(path, b"1")
        with pytest.raises(NotDone):
            store.delete([path])

    def test_readers_see_one_whole_content_or_the_other(self, store: ObjectStore) -> None:
        contents = [bytes([byte]) * 200_000 for byte in b"ab"]
        store.replace("one", contents[0])
        done = threading.Event()

        def write() -> None:
            for turn in range(30):
                store.replace("one", contents[turn % 2])
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not done.is_set() and not writing.done():
                assert store.read("one") in contents
            writing.result()

    def test_a_download_never_mixes_two_contents(self, store: ObjectStore, tmp_path: Path) -> None:
        contents = [bytes([byte]) * 11_000_000 for byte in b"ab"]
        store.replace("one", contents[0])

        def write() -> None:
            for turn in (1, 2):
                store.replace("one", contents[turn % 2])

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not writing.done():
                store.download("one", tmp_path / "target")
                assert (tmp_path / "target").read_bytes() in contents
            writing.result()

    def test_nothing_is_left_over_after_writes_that_ended(self, store: ObjectStore) -> None:
        store.create("a/one", b"1")
        store.create("a/one", b"2")
        assert store.collect_leftovers(0) == 0
        assert store.read("a/one") == b"1"
