"""An entry survives a power cut only if all entries before it do; batches are gap-free like the entries."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.base import durable
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.errors import DamagedRecordError, InvariantViolation
from cutline.model.ids import BatchId, Generation, Position
from tests.support.channels import append_barrier, append_batch, open_log


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the entries whose content was synced after they were created."""
    names: list[str] = []
    original = durable.fsync_file

    def remember(path: Path) -> None:
        names.append(path.name)
        original(path)

    monkeypatch.setattr(durable, "fsync_file", remember)
    return names


def test_a_barrier_is_not_synced_before_its_cut_is_acknowledged(tmp_path: Path, synced: list[str]) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    assert synced == []
    log.sync_barriers()
    assert synced == [codec.entry_name(Position(1))]
    log.sync_barriers()
    assert len(synced) == 1


def test_barriers_of_aborted_epochs_are_synced_with_the_next_one(tmp_path: Path, synced: list[str]) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    for epoch in (1, 2, 3):
        append_barrier(log, epoch)
    log.sync_barriers()
    assert synced == [codec.entry_name(Position(seq)) for seq in (1, 2, 3)]


def test_a_data_entry_makes_the_barriers_before_it_durable_first(tmp_path: Path, synced: list[str]) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log)
    assert synced == [codec.entry_name(Position(1))]


def test_what_a_dead_process_left_unsynced_is_synced_before_anything_rests_on_it(
    tmp_path: Path, synced: list[str]
) -> None:
    """Found by the simulator: seeds 46, 94 and 107 lost a barrier that a complete checkpoint needed."""
    first = open_log(tmp_path)
    append_batch(first)
    append_barrier(first, 1)
    log = open_log(tmp_path)
    assert synced == []
    log.sync_barriers()
    # The data entry too: its process may have died before the folder was synced.
    assert synced == [codec.entry_name(Position(seq)) for seq in (0, 1)]


def test_a_batch_that_does_not_follow_the_newest_one_is_not_written(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    entry = append_batch(log)
    with pytest.raises(InvariantViolation, match="of batch 2"):
        log.append(replace(entry, seq=Position(1), batch=BatchId(2), segments=[]))
    assert not codec.entry_path(tmp_path, entry.generation, Position(1)).exists()


def test_a_log_with_a_missing_batch_is_damaged(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    entry = append_batch(log)
    wrong = replace(entry, seq=Position(1), batch=BatchId(2), segments=[])
    durable.create(codec.entry_path(tmp_path, entry.generation, Position(1)), codec.encode(wrong))
    with pytest.raises(DamagedRecordError, match="is of batch 2"):
        open_log(tmp_path)


def test_a_power_cut_brings_no_older_entry_back_without_its_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder is synced once, before later entries and the segments are deleted."""
    log = open_log(tmp_path)
    for _ in range(3):
        append_batch(log)
    log.fork(Generation(2))
    for _ in range(3):
        append_batch(log)
    unlink, fsync_dir, steps = Path.unlink, durable.fsync_dir, list[str]()

    def deleted(path: Path, *, missing_ok: bool = False) -> None:
        steps.append(path.suffix)
        unlink(path, missing_ok=missing_ok)

    def synced_folder(folder: Path) -> None:
        steps.append(folder.name)
        fsync_dir(folder)

    monkeypatch.setattr(Path, "unlink", deleted)
    monkeypatch.setattr(durable, "fsync_dir", synced_folder)
    log.truncate(Position(5))
    assert steps == [".json"] * 3 + ["g000001"] + [".json"] * 2 + ["g000002"] + [".arrow"] * 5


def torn(log: ChannelLog, seq: int, content: bytes = b"") -> None:
    codec.entry_path(log.folder, log.lineage.owner(Position(seq)), Position(seq)).write_bytes(content)


@pytest.mark.parametrize("kept", [0, 40, 90, 160])
@pytest.mark.parametrize("filled", [False, True])
def test_a_barrier_that_a_power_cut_has_torn_was_never_written(tmp_path: Path, kept: int, filled: bool) -> None:
    """On ext4 another file's sync leaves it with its name and 0 bytes; others leave zeros."""
    log = open_log(tmp_path)
    batch = append_batch(log)
    barrier = codec.encode(append_barrier(log, 1))
    append_barrier(log, 2)
    torn(log, 1, barrier[:kept] + bytes(len(barrier) - kept if filled else 0))
    again = open_log(tmp_path)
    assert again.entries() == [batch]
    assert again.end == 1
    continued = open_log(tmp_path, (2, again.end))
    assert append_batch(continued).seq == 1
    assert [entry.seq for entry in open_log(tmp_path, (2, 1)).entries()] == [0, 1]


def test_a_torn_barrier_is_damage_if_something_rests_on_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log)
    torn(log, 1)
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path)


def test_a_torn_barrier_is_damage_if_the_log_was_forked_behind_it(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    append_barrier(log, 1)
    torn(log, 1)
    with pytest.raises(DamagedRecordError):
        open_log(tmp_path, (2, 2))


def test_a_batch_whose_bytes_are_wrong_is_damage_even_at_the_end(tmp_path: Path) -> None:
    """No power cut leaves it so: its content is synced before it has its name."""
    log = open_log(tmp_path)
    content = codec.encode(append_batch(log))
    for wrong in (content[:-4], content.replace(b'"rows":1', b'"rows":2'), content[:200]):
        torn(log, 0, wrong)
        with pytest.raises(DamagedRecordError):
            open_log(tmp_path)


# ------------------------------------------------------------------------------------------- a sync that failed


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """(function, file): this sync of it, or of its folder, fails once, and the disk drops the file's content."""
    planned: list[tuple[str, Path]] = []

    def failing(name: str) -> None:
        original = getattr(durable, name)

        def sync(path: Path) -> None:
            found = [one for one in planned if one[0] == name and path in (one[1], one[1].parent)]
            for one in found:
                planned.remove(one)
                os.truncate(one[1], 0)
                raise OSError(errno.ENOSPC, "No space left on device")
            original(path)

        monkeypatch.setattr(durable, name, sync)

    failing("fsync_file")
    failing("fsync_dir")
    return planned


@pytest.mark.parametrize("sync", ["fsync_file", "fsync_dir"])
def test_a_barrier_whose_sync_failed_is_written_again(
    tmp_path: Path, dropped: list[tuple[str, Path]], sync: str
) -> None:
    """The next sync of the same file would succeed without its content."""
    log = open_log(tmp_path)
    append_batch(log)
    barrier = append_barrier(log, 1)
    append_barrier(log, 2)
    dropped.append((sync, codec.entry_path(tmp_path, barrier.generation, barrier.seq)))
    with pytest.raises(OSError, match="No space"):
        log.sync_barriers()
    append_batch(log)
    assert open_log(tmp_path).entries() == log.entries()


def test_a_batch_whose_folder_sync_failed_is_written_again_and_keeps_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    entry = replace(append_batch(log), seq=Position(1), batch=BatchId(1), segments=[])
    path = codec.entry_path(tmp_path, entry.generation, entry.seq)

    def fails(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "fsync_dir", fails)
        with pytest.raises(OSError, match="No space"):
            log.append(entry)
    with pytest.raises(InvariantViolation, match="unfinished"):
        append_barrier(log, 1)
    synced = path.stat().st_ino
    log.append(entry)
    assert path.stat().st_ino != synced, "a new file: the first one is not trusted"
    assert open_log(tmp_path).entries() == log.entries()


def test_a_truncated_barrier_does_not_come_back_when_the_others_are_written_again(
    tmp_path: Path, dropped: list[tuple[str, Path]]
) -> None:
    log = open_log(tmp_path)
    append_batch(log)
    paths = [
        codec.entry_path(tmp_path, entry.generation, entry.seq)
        for entry in (append_barrier(log, 1), append_barrier(log, 2))
    ]
    dropped.append(("fsync_file", paths[0]))
    with pytest.raises(OSError, match="No space"):
        log.sync_barriers()
    log.truncate(Position(2))
    log.sync_barriers()
    assert [path.exists() for path in paths] == [False, True]
