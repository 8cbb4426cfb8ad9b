"""The coordinator's own records in SQLite."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cutline.errors import FencedError, InvariantViolation, UnknownFormatError
from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.ports.metadata import EpochOutcome, PendingRecord
from cutline.storage.metadata.sqlite import SqliteMetadata

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


# ------------------------------------------------------------------------------------------------- generations


def test_every_generation_is_handed_out_once(store: SqliteMetadata) -> None:
    taken = [store.next_generation(Generation(0)) for _ in range(5)]
    assert taken == [2, 3, 4, 5, 6]


def test_a_generation_is_no_smaller_than_asked_for(store: SqliteMetadata) -> None:
    """The records of generations may know more than this file, when it was lost."""
    assert store.next_generation(Generation(40)) == 40
    assert store.next_generation(Generation(3)) == 41


def test_generations_go_on_after_a_restart(path: Path) -> None:
    for expected in (1, 2, 3):
        with closing(SqliteMetadata(path)) as store:
            assert store.next_generation(Generation(0)) == expected


def test_two_connections_never_get_the_same_generation(path: Path) -> None:
    taken: list[int] = []

    def take() -> None:
        with closing(SqliteMetadata(path)) as store:
            taken.extend(store.next_generation(Generation(0)) for _ in range(10))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 41))


# ------------------------------------------------------------------------------------------------- fencing


def test_an_older_incarnation_changes_nothing(path: Path, store: SqliteMetadata) -> None:
    store.store_pending(pending(1))
    with closing(SqliteMetadata(path)) as newer:
        newer.next_generation(Generation(0))
        for write in (
            lambda: store.store_pending(pending(2)),
            lambda: store.store_outcome(completed(1)),
            lambda: store.store_published(TABLE, Epoch(1)),
            lambda: store.count_recovery("resume"),
            lambda: store.store_pin(Epoch(1), is_pinned=True),
        ):
            with pytest.raises(FencedError):
                write()
        assert newer.pending() == [pending(1)]
        assert newer.history(10) == []
        assert newer.published() == {}
        assert newer.recoveries() == {}
        assert newer.pins() == frozenset()


def test_a_fenced_store_holds_nobody_up(path: Path, store: SqliteMetadata) -> None:
    with closing(SqliteMetadata(path)) as newer:
        newer.next_generation(Generation(0))
        with pytest.raises(FencedError):
            store.store_pending(pending(1))
        newer.store_pending(pending(1))
        assert store.pending() == [pending(1)]


def test_whoever_has_taken_no_generation_cannot_write(path: Path, store: SqliteMetadata) -> None:
    with closing(SqliteMetadata(path)) as reader:
        assert reader.last_epoch() == NO_EPOCH
        with pytest.raises(FencedError):
            reader.store_pending(pending(1))


# ------------------------------------------------------------------------------------------------- epochs


def test_a_pending_epoch_is_found_again(path: Path, store: SqliteMetadata) -> None:
    first, second = pending(1, limit_ms=0), pending(2, limit_ms=None, is_binding=True)
    for record in (second, first):
        store.store_pending(record)
    store.close()
    with closing(SqliteMetadata(path)) as again:
        assert again.pending() == [first, second]
        assert again.last_epoch() == 2


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


def test_the_first_outcome_stays(store: SqliteMetadata) -> None:
    store.store_pending(pending(1))
    store.store_outcome(completed(1))
    store.store_outcome(completed(1, reason="timed out"))
    store.store_outcome(completed(1))
    assert store.history(10) == [completed(1)]
    assert store.pending() == []


def test_an_outcome_of_an_unknown_epoch_is_kept(store: SqliteMetadata) -> None:
    """Its manifest may be all that is left of it."""
    store.store_outcome(completed(7))
    assert store.last_epoch() == 7
    assert store.history(10) == [completed(7)]


def test_the_history_shows_the_newest_first_and_no_more_than_asked_for(store: SqliteMetadata) -> None:
    for epoch in range(1, 6):
        store.store_pending(pending(epoch))
        if epoch < 5:
            store.store_outcome(completed(epoch))
    assert [outcome.epoch for outcome in store.history(2)] == [4, 3]
    assert len(store.history(100)) == 4


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


def test_recoveries_are_counted_per_path(path: Path, store: SqliteMetadata) -> None:
    for recovery in ("fresh", "resume", "resume"):
        store.count_recovery(recovery)
    store.close()
    with closing(SqliteMetadata(path)) as again:
        assert again.recoveries() == {"fresh": 1, "resume": 2}


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


def test_threads_may_share_a_store(store: SqliteMetadata) -> None:
    def work(first: int) -> None:
        for epoch in range(first, first + 20):
            store.store_pending(pending(epoch))
            store.pending()

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 101, 201)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.pending()) == 60


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
