"""The suite that every metadata store must pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from cutline.errors import FencedError, InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.ports.metadata import EpochOutcome, MetadataStore, PendingRecord

TABLE = SinkId("table")

#: Opens the same records, as another process would.
Reopen = Callable[[], MetadataStore]


def pending(epoch: int, *, started_ms: int = 5, limit_ms: int | None = 50, is_binding: bool = False) -> PendingRecord:
    return PendingRecord(
        epoch=Epoch(epoch),
        generation=Generation(1),
        terms=BarrierTerms(alignment_limit_ms=limit_ms, is_binding=is_binding, started_ms=started_ms),
    )


def ended(epoch: int, *, reason: str = "") -> EpochOutcome:
    return EpochOutcome(
        epoch=Epoch(epoch),
        generation=Generation(1),
        started_ms=5,
        ended_ms=9,
        outcome="aborted" if reason else "completed",
        reason=reason,
        details={"size_bytes": 7, "unaligned_operators": ["a"]},
    )


class MetadataConformance:
    """Subclasses have a fixture ``reopen``: a function that opens the records, empty at first."""

    @pytest.fixture
    def store(self, reopen: Reopen) -> MetadataStore:
        """A store that has claimed generation 1."""
        store = reopen()
        store.next_generation(Generation(0))
        return store

    # ------------------------------------------------------------------ generations and fencing

    def test_every_generation_is_handed_out_once(self, reopen: Reopen) -> None:
        for expected in (1, 2, 3):
            with closing(reopen()) as store:
                assert store.next_generation(Generation(0)) == expected

    def test_a_generation_is_no_smaller_than_asked_for(self, store: MetadataStore) -> None:
        assert store.next_generation(Generation(40)) == 40
        assert store.next_generation(Generation(3)) == 41

    def test_two_processes_never_get_the_same_generation(self, reopen: Reopen) -> None:
        taken: list[int] = []

        def take() -> None:
            with closing(reopen()) as store:
                taken.extend(store.next_generation(Generation(0)) for _ in range(10))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == list(range(1, 41))

    def test_a_process_that_was_replaced_changes_nothing(self, reopen: Reopen, store: MetadataStore) -> None:
        store.store_pending(pending(1))
        with closing(reopen()) as newer:
            newer.next_generation(Generation(0))
            for write in (
                store.check_fence,
                store.advance_generation,
                lambda: store.store_pending(pending(2)),
                lambda: store.store_outcome(ended(1)),
                lambda: store.store_published(TABLE, Epoch(1)),
                lambda: store.store_seen(TABLE, Epoch(1)),
                lambda: store.count_recovery("resume"),
                lambda: store.store_pin(Epoch(1), is_pinned=True),
            ):
                with pytest.raises(FencedError):
                    write()
            assert newer.pending() == [pending(1)]
            assert (newer.history(10), newer.published(), newer.seen()) == ([], {}, {})
            assert (newer.recoveries(), newer.pins()) == ({}, frozenset())
            newer.check_fence()

    def test_without_a_generation_of_its_own_a_process_reads_only(self, reopen: Reopen, store: MetadataStore) -> None:
        with closing(reopen()) as reader:
            assert reader.last_epoch() == NO_EPOCH
            with pytest.raises(FencedError):
                reader.store_pending(pending(1))

    def test_a_region_advances_the_generation_of_its_own_process(self, store: MetadataStore) -> None:
        assert store.advance_generation() == 2
        store.check_fence()
        store.store_pending(pending(1))

    # ------------------------------------------------------------------ epochs

    def test_a_pending_epoch_is_found_again(self, reopen: Reopen, store: MetadataStore) -> None:
        alone = replace(pending(3).terms, alone=OperatorId("totals"))
        found = [pending(1, limit_ms=0), pending(2, limit_ms=None, is_binding=True)]
        found.append(msgspec.structs.replace(pending(3), terms=alone))
        for record in reversed(found):
            store.store_pending(record)
        store.close()
        with closing(reopen()) as again:
            assert again.pending() == found
            assert again.last_epoch() == 3

    def test_an_epoch_is_begun_once(self, store: MetadataStore) -> None:
        store.store_pending(pending(1))
        with pytest.raises(InvariantViolation):
            store.store_pending(pending(1, started_ms=99))
        store.store_outcome(ended(1, reason="timed out"))
        with pytest.raises(InvariantViolation):
            store.store_pending(pending(1))
        assert store.pending() == []

    def test_the_first_outcome_stays(self, store: MetadataStore) -> None:
        store.store_pending(pending(1))
        store.store_outcome(ended(1))
        store.store_outcome(ended(1, reason="timed out"))
        assert store.history(10) == [ended(1)]
        assert store.pending() == []

    def test_an_outcome_of_an_unknown_epoch_is_kept(self, store: MetadataStore) -> None:
        store.store_outcome(ended(7))
        assert store.last_epoch() == 7
        assert store.history(10) == [ended(7)]

    def test_the_history_shows_the_newest_first_and_no_more_than_asked_for(self, store: MetadataStore) -> None:
        for epoch in range(1, 6):
            store.store_pending(pending(epoch))
            if epoch < 5:
                store.store_outcome(ended(epoch))
        assert [outcome.epoch for outcome in store.history(2)] == [4, 3]
        assert len(store.history(100)) == 4

    # ------------------------------------------------------------------ the rest

    def test_progress_of_sinks_is_kept_per_sink_and_may_go_back(self, reopen: Reopen, store: MetadataStore) -> None:
        for epoch in (7, 5):
            store.store_published(TABLE, Epoch(epoch))
            store.store_seen(SinkId("raw"), Epoch(epoch))
        store.close()
        with closing(reopen()) as again:
            assert again.published() == {TABLE: 5}
            assert again.seen() == {"raw": 5}

    def test_pins_are_kept_until_they_are_taken_back(self, reopen: Reopen, store: MetadataStore) -> None:
        for epoch in (3, 5, 3):
            store.store_pin(Epoch(epoch), is_pinned=True)
        for epoch in (5, 9):
            store.store_pin(Epoch(epoch), is_pinned=False)
        store.close()
        with closing(reopen()) as again:
            assert again.pins() == {3}

    def test_recoveries_are_counted_per_path(self, reopen: Reopen, store: MetadataStore) -> None:
        for recovery in ("fresh", "resume", "resume"):
            store.count_recovery(recovery)
        store.close()
        with closing(reopen()) as again:
            assert again.recoveries() == {"fresh": 1, "resume": 2}

    def test_an_epoch_without_an_outcome_has_not_completed(self, store: MetadataStore) -> None:
        assert store.last_completed() == 0
        for epoch in (1, 2, 3):
            store.store_pending(pending(epoch))
        store.store_outcome(ended(2))
        store.store_outcome(ended(1))
        assert (store.last_completed(), store.last_epoch()) == (2, 3)

    def test_a_run_is_remembered(self, reopen: Reopen, store: MetadataStore) -> None:
        assert not store.has_run()
        issued = store.issued()
        store.note_run()
        store.close()
        with closing(reopen()) as again:
            assert again.has_run()
            assert again.issued() == issued
            assert again.next_generation(Generation(7)) == again.issued() >= 7

    def test_announced_generations_are_remembered(self, reopen: Reopen, store: MetadataStore) -> None:
        for identity in ("0" * 32, "1" * 32, "0" * 32):
            store.store_announced(identity)
        store.close()
        with closing(reopen()) as again:
            assert again.announced() == {"0" * 32, "1" * 32}

    def test_threads_may_share_a_store(self, store: MetadataStore) -> None:
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
