"""The Parquet sink: the suite, and what is special about a folder of epochs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from cutline.errors import DamagedRecordError, InvariantViolation, SinkError
from cutline.model.ids import NO_EPOCH, Generation, SinkId
from cutline.sinks import Parquet
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkBehaviour, rows
from tests.support.sink_targets import ParquetTarget

KEYED = pa.schema([("id", pa.int64()), ("key", pa.string())])


class TestParquet(ParquetTarget, SinkBehaviour):
    pass


def epochs_seen(path: Path) -> Counter[int]:
    """Rows per epoch, as a reader sees them."""
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    return Counter(table["cutline_epoch"].to_pylist() if table.num_rows else [])


def start(tmp_path: Path, **options: Any) -> Case:
    """A case over ``tmp_path/out``, with options of the sink."""
    sink = Parquet(tmp_path / "out", **options)
    context = TestParquet().context(KEYED if options.get("partition_by") else SIMPLE)
    sink.open(context)
    return Case(sink=sink, context=context)


def staged_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out" / "_cutline" / "staged").rglob("*.parquet"))


def test_a_reader_polling_during_commits_never_sees_half_an_epoch(tmp_path: Path) -> None:
    case = start(tmp_path)
    seen: list[Counter[int]] = []
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            seen.append(epochs_seen(tmp_path / "out"))

    reader = threading.Thread(target=poll)
    reader.start()
    for epoch in range(1, 200):
        case.publish(epoch, epoch, rows(1), rows(2), rows(3), rows(4))
        if len({len(counts) for counts in seen}) >= 8:  # enough commits were watched, however slow the reader is
            break
    is_over.set()
    reader.join()
    assert all(count == 4 for counts in seen for count in counts.values())
    assert all(set(counts) == set(range(1, len(counts) + 1)) for counts in seen)
    assert len({len(counts) for counts in seen}) > 1, "the reader saw no commit happen"


def test_partitions_become_folders_inside_the_epoch(tmp_path: Path) -> None:
    case = start(tmp_path, partition_by=["key"])
    values = ["a/b", "ü %", None, "plain"]
    case.publish(1, 0, [{"id": number, "key": value} for number, value in enumerate(values)])
    found = ds.dataset(tmp_path / "out", partitioning="hive").to_table().to_pylist()
    assert sorted(found, key=lambda row: int(row["id"])) == [
        {"id": number, "key": value, "cutline_epoch": 1} for number, value in enumerate(values)
    ]


def test_staged_files_go_when_published_and_so_do_those_of_failed_attempts(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.stage(0, rows(1))  # a task whose report was lost
    first = case.stage(0, rows(1))
    later = case.stage(1, rows(2))
    case.commit(1, first)
    assert staged_files(tmp_path) == [Path(piece["path"]).name for piece in later.pieces]
    case.sink.abort([later])
    assert list((tmp_path / "out" / "_cutline" / "staged").iterdir()) == []


def test_an_old_commit_does_not_sweep_what_a_newer_generation_stages(tmp_path: Path) -> None:
    case = start(tmp_path)
    old = [case.stage(batch, rows(batch)) for batch in (0, 1)]
    case.generation = Generation(2)
    new = case.stage(1, rows(11))
    case.commit(1, *old)
    assert staged_files(tmp_path) == [Path(piece["path"]).name for piece in new.pieces]


def test_an_epoch_without_rows_makes_no_folder(tmp_path: Path) -> None:
    case = start(tmp_path)
    case.publish(1, 0, [])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_cutline"]


def test_leftovers_of_a_crash_are_cleared_at_start(tmp_path: Path) -> None:
    start(tmp_path)
    for leftover in ("prepared/3-abc", "discarded/2-def"):
        (tmp_path / "out" / "_cutline" / leftover).mkdir(parents=True)
    case = start(tmp_path)
    assert sorted(path.name for path in (tmp_path / "out" / "_cutline").iterdir()) == ["ledger.json"]
    assert case.sink.published() is None


def test_whoever_opens_the_folder_never_halves_an_epoch_that_another_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was thought dead publishes while its successor clears away what it takes for leftovers."""
    zombie = start(tmp_path)
    staged = zombie.stage(0, *(rows(number) for number in range(4)))
    permit = zombie.permit(1, [staged])
    assert isinstance(zombie.sink, Parquet)
    prepared = zombie.sink._prepare_folder(permit, staged.pieces)
    rmtree = shutil.rmtree

    def half_way(path: Path, **options: Any) -> None:
        for file in sorted(path.rglob("*.parquet"))[:2]:
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            zombie.sink._publish(permit, prepared)  # type: ignore[attr-defined]
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", half_way)
    start(tmp_path)
    assert TestParquet().ids(tmp_path) in ([], [0, 1, 2, 3])


def test_a_folder_with_strange_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-0.parquet").write_bytes(b"")
    with pytest.raises(SinkError, match=r"not empty.*Next: give the sink"):
        start(tmp_path)


def test_another_partitioning_is_refused(tmp_path: Path) -> None:
    Parquet(tmp_path / "out").open(TestParquet().context(KEYED))
    with pytest.raises(SinkError, match="partitioned by"):
        start(tmp_path, partition_by=["key"])


def test_the_epoch_column_belongs_to_the_sink(tmp_path: Path) -> None:
    schema = pa.schema([("cutline_epoch", pa.int64())])
    with pytest.raises(SinkError, match="cutline_epoch"):
        Parquet(tmp_path / "out").open(TestParquet().context(schema))


def test_a_damaged_ledger_is_noticed(tmp_path: Path) -> None:
    start(tmp_path)
    ledger = tmp_path / "out" / "_cutline" / "ledger.json"
    ledger.write_bytes(ledger.read_bytes().replace(b"orders", b"strays"))
    with pytest.raises(DamagedRecordError):
        start(tmp_path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_a_staged_file_that_is_gone_or_cut_short_is_not_published(tmp_path: Path, damage: Any) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    damage(tmp_path / "out" / staged.pieces[0]["path"])
    with pytest.raises(SinkError, match="staged file"):
        case.commit(1, staged)
    assert case.sink.published() is None


def test_a_file_system_without_hard_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = start(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    staged = case.stage(0, rows(1), rows(2))
    monkeypatch.setattr(os, "link", refuse)
    case.commit(1, staged)
    assert epochs_seen(tmp_path / "out") == {1: 2}


def test_a_commit_lists_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table has a folder for each epoch, and may have many thousands."""
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    listed, listdir = list[str](), os.listdir

    def noted(path: Any = ".") -> list[str]:
        listed.append(str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", noted)
    case.commit(1, staged)
    assert listed.count(str(tmp_path / "out")) == 1


def test_two_that_hold_the_same_permit_publish_once(tmp_path: Path) -> None:
    case, other = start(tmp_path), start(tmp_path)
    staged = case.stage(0, rows(1), rows(2))
    permit = case.permit(1, [staged])
    prepared = other.sink._prepare_folder(permit, staged.pieces)  # type: ignore[attr-defined]
    case.commit(1, staged)
    other.sink._publish(permit, prepared)  # type: ignore[attr-defined]
    assert epochs_seen(tmp_path / "out") == {1: 2}
    assert not prepared.exists()


def test_the_highest_epoch_is_remembered_through_a_rewind(tmp_path: Path) -> None:
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    case.sink.rewind(NO_EPOCH)
    assert Parquet(tmp_path / "out").published() is None
    sink = Parquet(tmp_path / "out")
    sink.open(case.context)
    assert sink.highest() == 3


def test_a_permit_of_another_sink_or_for_other_batches_is_a_bug(tmp_path: Path) -> None:
    case = start(tmp_path)
    staged = case.stage(5, rows(1))
    with pytest.raises(InvariantViolation):
        case.sink.commit(case.permit(1, []), [staged], {})
    with pytest.raises(InvariantViolation):
        case.sink.commit(replace(case.permit(1, [staged]), sink=SinkId("other")), [staged], {})


def test_an_object_store_is_refused_for_now() -> None:
    with pytest.raises(SinkError, match="mounted"):
        Parquet("s3://bucket/path")
