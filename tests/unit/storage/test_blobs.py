"""Content-addressed files."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from cutline.base import durable
from cutline.base.outages import is_disk_failure
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import SnapshotFile
from cutline.model.layout import Layout
from cutline.storage.blobs import BlobStore, sha256_of


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "storage", "flow")


@pytest.fixture
def blobs(layout: Layout) -> BlobStore:
    return BlobStore(layout)


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def sweep(blobs: BlobStore, *reachable: SnapshotFile) -> int:
    return blobs.collect(lambda: ({file.sha256 for file in reachable}, ()), is_whole=True)


def stored(layout: Layout) -> set[str]:
    return {path.name for path in layout.blobs.glob("*/*")}


def test_a_file_is_kept_under_the_hash_of_its_content(tmp_path: Path, layout: Layout, blobs: BlobStore) -> None:
    file, new_bytes = blobs.store(written(tmp_path, "a", b"content"), "state/1.delta")
    assert file == SnapshotFile(path="state/1.delta", sha256=hashlib.sha256(b"content").hexdigest(), size_bytes=7)
    assert new_bytes == 7
    assert layout.blob(file.sha256).read_bytes() == b"content"
    assert blobs.damage(file) is None


def test_equal_content_is_stored_once(tmp_path: Path, layout: Layout, blobs: BlobStore) -> None:
    first, _ = blobs.store(written(tmp_path, "a", b"content"), "one")
    second, new_bytes = blobs.store(written(tmp_path, "b", b"content"), "two")
    assert (first.sha256, new_bytes) == (second.sha256, 0)
    assert stored(layout) == {first.sha256}


def test_a_stored_file_outlives_the_one_it_came_from(tmp_path: Path, blobs: BlobStore) -> None:
    source = written(tmp_path, "a", b"content")
    file, _ = blobs.store(source, "a")
    source.unlink()
    assert blobs.damage(file) is None


def test_a_file_replaced_under_the_same_name_is_new_content(tmp_path: Path, blobs: BlobStore) -> None:
    """Spark writes a file anew and renames it: same name, same size, other content."""
    first, _ = blobs.store(written(tmp_path, "a", b"one"), "a")
    os.replace(written(tmp_path, "b", b"two"), tmp_path / "a")
    second, _ = blobs.store(tmp_path / "a", "a")
    assert first.sha256 != second.sha256
    assert blobs.damage(first) is None
    assert blobs.damage(second) is None


def test_an_empty_file_is_content_too(tmp_path: Path, blobs: BlobStore) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b""), "a")
    assert blobs.damage(file) is None


def test_large_files_are_hashed_whole(tmp_path: Path) -> None:
    content = os.urandom((2 << 20) + 5)
    assert sha256_of(written(tmp_path, "a", content)) == hashlib.sha256(content).hexdigest()


def test_a_file_system_without_links_gets_copies(
    tmp_path: Path, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    file, new_bytes = blobs.store(written(tmp_path, "a", b"content"), "a")
    assert new_bytes == 7
    assert blobs.damage(file) is None
    blobs.place(file, tmp_path / "restored" / "a")
    assert (tmp_path / "restored" / "a").read_bytes() == b"content"


# ------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("content", "said"), [(b"contenT", "does not match its hash"), (b"cont", "4 bytes instead of 7"), (b"", "0 bytes")]
)
def test_damage_is_found(tmp_path: Path, layout: Layout, blobs: BlobStore, content: bytes, said: str) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b"content"), "state/1.delta")
    blob = layout.blob(file.sha256)
    blob.unlink()
    blob.write_bytes(content)
    assert said in (blobs.damage(file) or "")
    assert "state/1.delta" in (blobs.damage(file) or "")


def test_a_missing_blob_is_found(tmp_path: Path, layout: Layout, blobs: BlobStore) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b"content"), "a")
    layout.blob(file.sha256).unlink()
    assert "is missing" in (blobs.damage(file) or "")
    with pytest.raises(DamagedRecordError):
        blobs.place(file, tmp_path / "restored")


@pytest.mark.parametrize("damage", [b"con", b"contenT", b""])
def test_a_damaged_blob_is_mended_when_its_content_comes_again(
    tmp_path: Path, layout: Layout, blobs: BlobStore, damage: bytes
) -> None:
    """Otherwise one bad block would spoil every later checkpoint, although each had the right content at hand."""
    file, _ = blobs.store(written(tmp_path, "a", b"content"), "a")
    blob = layout.blob(file.sha256)
    blob.unlink()
    blob.write_bytes(damage)
    _, new_bytes = blobs.store(written(tmp_path, "b", b"content"), "b")
    assert new_bytes == 7
    assert blobs.damage(file) is None


# ------------------------------------------------------------------------------------------------- sweeping


def test_a_sweep_deletes_what_nothing_reaches(tmp_path: Path, layout: Layout, blobs: BlobStore) -> None:
    kept, _ = blobs.store(written(tmp_path, "a", b"kept"), "a")
    gone, _ = blobs.store(written(tmp_path, "b", b"gone"), "b")
    blobs.drop_references([kept.sha256, gone.sha256])
    assert sweep(blobs, kept) == 1
    assert stored(layout) == {kept.sha256}


def test_claimed_content_survives_a_sweep(tmp_path: Path, layout: Layout, blobs: BlobStore) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b"pending"), "a")
    assert sweep(blobs) == 0
    blobs.drop_references([file.sha256])
    assert sweep(blobs) == 1
    assert stored(layout) == set()


def test_content_claimed_twice_is_let_go_when_both_let_go(tmp_path: Path, blobs: BlobStore) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b"shared"), "a")
    blobs.store(written(tmp_path, "b", b"shared"), "b")
    blobs.drop_references([file.sha256])
    assert sweep(blobs) == 0
    blobs.drop_references([file.sha256])
    blobs.drop_references([file.sha256])
    assert sweep(blobs) == 1


def test_content_that_comes_again_after_a_sweep_is_stored_again(tmp_path: Path, blobs: BlobStore) -> None:
    source = written(tmp_path, "a", b"content")
    first, _ = blobs.store(source, "a")
    blobs.drop_references([first.sha256])
    sweep(blobs)
    second, new_bytes = blobs.store(source, "a")
    assert (second, new_bytes) == (first, 7)
    assert blobs.damage(second) is None


def test_an_inode_used_again_after_a_sweep_is_hashed_again(tmp_path: Path, blobs: BlobStore) -> None:
    """Same inode, size and time, other content: only what still exists may be remembered."""
    source = written(tmp_path, "a", b"one")
    os.utime(source, ns=(0, 0))
    first, _ = blobs.store(source, "a")
    blobs.drop_references([first.sha256])
    sweep(blobs)
    with open(source, "r+b") as file:
        file.write(b"two")
    os.utime(source, ns=(0, 0))
    second, _ = blobs.store(source, "a")
    assert second.sha256 == hashlib.sha256(b"two").hexdigest()


def test_content_that_a_manifest_takes_over_during_a_sweep_survives_it(
    tmp_path: Path, layout: Layout, blobs: BlobStore
) -> None:
    """The sweep has looked for manifests; the manifest is stored and its claims released; only then it deletes."""
    file, _ = blobs.store(written(tmp_path, "a", b"content"), "a")

    def look_and_be_overtaken() -> tuple[set[str], set[str]]:
        blobs.drop_references([file.sha256])
        return set(), set()

    assert blobs.collect(look_and_be_overtaken) == 0
    assert blobs.damage(file) is None
    assert sweep(blobs) == 1


def test_content_stored_and_taken_over_during_a_sweep_survives_it(tmp_path: Path, blobs: BlobStore) -> None:
    taken: list[SnapshotFile] = []

    def look_and_be_overtaken() -> tuple[set[str], set[str]]:
        file, _ = blobs.store(written(tmp_path, "a", b"content"), "a")
        blobs.drop_references([file.sha256])
        taken.append(file)
        return set(), set()

    blobs.collect(look_and_be_overtaken)
    assert blobs.damage(taken[0]) is None


def test_a_sweep_that_fails_leaves_claims_as_they_are(tmp_path: Path, blobs: BlobStore) -> None:
    file, _ = blobs.store(written(tmp_path, "a", b"content"), "a")

    def fail() -> tuple[set[str], set[str]]:
        blobs.drop_references([file.sha256])
        raise DamagedRecordError("a manifest cannot be read")

    with pytest.raises(DamagedRecordError):
        blobs.collect(fail)
    assert blobs.damage(file) is None
    assert sweep(blobs) == 1


def test_storing_and_sweeping_at_once_loses_nothing(tmp_path: Path, blobs: BlobStore) -> None:
    done = threading.Event()

    def sweep_on() -> None:
        while not done.is_set():
            sweep(blobs)

    sweeper = threading.Thread(target=sweep_on)
    sweeper.start()
    try:
        for number in range(100):
            claimed, _ = blobs.store(written(tmp_path, f"f{number}", str(number % 7).encode()), "f")
            assert blobs.damage(claimed) is None
            blobs.drop_references([claimed.sha256])
    finally:
        done.set()
        sweeper.join()


def test_a_restore_never_writes_into_an_existing_file(tmp_path: Path, blobs: BlobStore) -> None:
    """It may be a link to a blob: two files of one path would otherwise change the content of the first."""
    first, second = written(tmp_path, "a", b"first"), written(tmp_path, "b", b"second")
    files = [blobs.store(first, "x")[0], blobs.store(second, "x")[0]]
    target = tmp_path / "restored" / "x"
    blobs.place(files[0], target)
    inline = SnapshotFile(path="x", sha256="0" * 64, size_bytes=5, content=b"owned")
    for file in (files[1], inline):
        with pytest.raises(DamagedRecordError, match="the same path"):
            blobs.place(file, target)
    assert target.read_bytes() == b"first"
    with pytest.raises(DamagedRecordError, match="the same path"):
        blobs.place(inline, target / "below")


@pytest.mark.parametrize("is_lost", [False, True])
def test_content_whose_sync_failed_is_written_again_or_known_to_be_lost(
    tmp_path: Path, layout: Layout, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The disk may have dropped it, from the blob and from Spark's file: they are the same file."""
    held, syncs = written(tmp_path, "a", b"content"), list[Path]()
    before = held.stat()

    def fails(path: Path) -> None:
        syncs.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "fsync_file", fails)
    with pytest.raises(OSError, match="No space"):
        blobs.store(held, "x")
    blobs.drop_references([sha256_of(held)])
    sweep(blobs)
    if is_lost:
        held.write_bytes(bytes(7))
        os.utime(held, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(OSError, match="content was lost") as caught:
            blobs.store(held, "x")
        assert is_disk_failure(caught.value)
        return
    file, _ = blobs.store(held, "x")
    assert len(syncs) == 1, "the same file is not synced again"
    assert not layout.blob(file.sha256).samefile(held)
    assert layout.blob(file.sha256).read_bytes() == b"content"
