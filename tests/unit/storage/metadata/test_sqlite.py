"""The coordinator's own records in SQLite: what the suite of the port does not say (tests/unit/testing/conformance)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cutline.errors import FencedError, InvariantViolation, NotDone, UnknownFormatError
from cutline.model.cut import BarrierTerms
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId
from cutline.ports.metadata import EpochOutcome, PendingRecord
from cutline.storage.metadata.sqlite import SqliteMetadata, _explained

TABLE = SinkId("table")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteMetadata]:
    """An open store that has taken generation 1."""
    with closing(SqliteMetadata(path)) as opened:
        opened.next_generation(Generation(0))
        yield opened


def pending(epoch: int, *, started_ms: int = 5, limit_ms: int | None = 50, is_binding: bool = False) -> PendingRecord:
    return PendingRecord(
        epoch=Epoch(epoch),
        generation=Generation(1),
        terms=BarrierTerms(alignment_limit_ms=limit_ms, is_binding=is_binding, started_ms=started_ms),
    )


def completed(epoch: int, *, reason: str = "") -> EpochOutcome:
    return EpochOutcome(
        epoch=Epoch(epoch),
        generation=Generation(1),
        started_ms=5,
        ended_ms=9,
        outcome="aborted" if reason else "completed",
        reason=reason,
        details={"size_bytes": 7, "unaligned_operators": ["a"]},
    )


# ------------------------------------------------------------------------------------------------- fencing


def test_a_fenced_store_holds_nobody_up(path: Path, store: SqliteMetadata) -> None:
    with closing(SqliteMetadata(path)) as newer:
        newer.next_generation(Generation(0))
        with pytest.raises(FencedError):
            store.store_pending(pending(1))
        newer.store_pending(pending(1))
        assert store.pending() == [pending(1)]


# ------------------------------------------------------------------------------------------------- epochs


def test_an_epoch_is_begun_once_and_the_store_goes_on(store: SqliteMetadata) -> None:
    store.store_pending(pending(1))
    with pytest.raises(InvariantViolation):
        store.store_pending(pending(1, started_ms=99))
    store.store_pending(pending(2))
    assert [record.terms.started_ms for record in store.pending()] == [5, 5]


def test_an_epoch_that_ended_is_not_begun_again(store: SqliteMetadata) -> None:
    store.store_pending(pending(1))
    store.store_outcome(completed(1, reason="timed out"))
    with pytest.raises(InvariantViolation):
        store.store_pending(pending(1))
    assert store.pending() == []


def test_epochs_count_on_after_aborted_ones(store: SqliteMetadata) -> None:
    store.store_pending(pending(3))
    store.store_outcome(completed(3, reason="timed out"))
    assert store.last_epoch() == 3


# ------------------------------------------------------------------------------------------------- the rest


def test_published_epochs_are_remembered_per_sink(path: Path, store: SqliteMetadata) -> None:
    store.store_published(TABLE, Epoch(1))
    store.store_published(TABLE, Epoch(2))
    store.store_published(SinkId("raw"), Epoch(1))
    store.close()
    with closing(SqliteMetadata(path)) as again:
        assert again.published() == {TABLE: 2, "raw": 1}


def test_a_rewound_sink_is_remembered_as_such(store: SqliteMetadata) -> None:
    store.store_published(TABLE, Epoch(7))
    store.store_published(TABLE, Epoch(5))
    assert store.published() == {TABLE: 5}


def test_pins_are_remembered_until_they_are_taken_back(path: Path, store: SqliteMetadata) -> None:
    for epoch in (3, 5, 3):
        store.store_pin(Epoch(epoch), is_pinned=True)
    store.store_pin(Epoch(5), is_pinned=False)
    store.store_pin(Epoch(9), is_pinned=False)
    store.close()
    with closing(SqliteMetadata(path)) as again:
        assert again.pins() == {3}


def test_a_file_of_a_newer_version_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(UnknownFormatError):
        SqliteMetadata(path)


@pytest.mark.parametrize("version", [1, 0])  # the number was written last: killed before it, it is 0
def test_a_file_of_format_1_is_taken_over(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, generation INTEGER NOT NULL, started_ms INTEGER NOT NULL, "
            "alignment_limit_ms INTEGER, is_binding INTEGER NOT NULL DEFAULT 0, ended_ms INTEGER, outcome TEXT, "
            "reason TEXT, details BLOB)"
        )
        db.execute("INSERT INTO epochs (epoch, generation, started_ms, alignment_limit_ms) VALUES (1, 1, 5, 50)")
        db.execute(f"PRAGMA user_version={version}")
        db.commit()
    for _ in range(2):
        with closing(SqliteMetadata(path)) as store:
            assert store.pending() == [pending(1)]


def test_the_one_operator_of_an_epoch_is_remembered(store: SqliteMetadata) -> None:
    record = msgspec.structs.replace(pending(1), terms=replace(pending(1).terms, alone=OperatorId("totals")))
    store.store_pending(record)
    assert store.pending() == [record]


def test_what_was_written_survives_a_process_that_does_not_close(path: Path, store: SqliteMetadata) -> None:
    store.store_pending(pending(1))
    copy = path.with_name("copy.sqlite")
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    with closing(SqliteMetadata(copy)) as again:
        assert again.pending() == [pending(1)]


def test_a_region_takes_a_generation_only_while_its_process_runs_the_flow(tmp_path: Path) -> None:
    with closing(SqliteMetadata(tmp_path / "m")) as old, closing(SqliteMetadata(tmp_path / "m")) as new:
        first = old.next_generation(Generation(1))
        assert old.advance_generation() == first + 1
        old.check_fence()
        assert new.next_generation(Generation(1)) == first + 2
        with pytest.raises(FencedError, match="has taken over"):
            old.advance_generation()
        with pytest.raises(FencedError, match="has taken over"):
            old.check_fence()
        new.check_fence()


def test_a_full_disk_is_an_outage_that_leaves_the_records_as_they_were(store: SqliteMetadata) -> None:
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")
    big = EpochOutcome(
        epoch=Epoch(1),
        generation=Generation(1),
        started_ms=1,
        ended_ms=2,
        outcome="aborted",
        reason="x" * 100_000,
        details={},
    )
    with pytest.raises(NotDone, match="no room on the disk of the coordinator's records"):
        store.store_outcome(big)
    assert store.history(10) == []
    store._db.execute("PRAGMA max_page_count=1000000")
    store.store_outcome(big)
    assert [one.epoch for one in store.history(10)] == [1]


def test_records_that_another_process_has_locked_are_an_outage(store: SqliteMetadata, path: Path) -> None:
    store._db.execute("PRAGMA busy_timeout=10")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(NotDone, match="another process has locked"):
            store.store_published(TABLE, Epoch(1))
        other.execute("ROLLBACK")
    store.store_published(TABLE, Epoch(1))
    assert store.published() == {TABLE: 1}


@pytest.mark.parametrize(
    ("code", "is_outage"),
    [
        (sqlite3.SQLITE_IOERR_SHMSIZE, True),
        (sqlite3.SQLITE_CANTOPEN_ISDIR, True),
        (sqlite3.SQLITE_IOERR_FSYNC, False),
        (sqlite3.SQLITE_IOERR_WRITE, False),
        (None, False),
    ],
)
def test_only_a_lack_of_room_is_waited_for_not_a_disk_that_fails(code: int | None, is_outage: bool) -> None:
    """After a failed sync it is unknown what the disk holds. Errors of the Python module itself have no code."""
    error = sqlite3.OperationalError("disk I/O error")
    if code is not None:
        error.sqlite_errorcode = code
    with pytest.raises(NotDone if is_outage else sqlite3.OperationalError, match="disk I/O error"), _explained():
        raise error


def test_a_copy_holds_what_is_stored_now_and_changes_nothing(store: SqliteMetadata, path: Path) -> None:
    store.store_published(TABLE, Epoch(3))
    with closing(SqliteMetadata(path, is_copy=True)) as copy:
        assert copy.published() == {TABLE: 3}
        store.store_published(TABLE, Epoch(4))
        assert copy.next_generation(Generation(0)) == 2
        assert copy.published() == {TABLE: 3}
    assert (store.published(), store.issued()) == ({TABLE: 4}, 1), "it is not fenced"


def test_a_copy_of_nothing_is_empty_and_creates_no_file(tmp_path: Path) -> None:
    with closing(SqliteMetadata(tmp_path / "nothing.sqlite", is_copy=True)) as copy:
        assert (copy.last_epoch(), copy.pins()) == (0, frozenset())
    assert list(tmp_path.iterdir()) == []
