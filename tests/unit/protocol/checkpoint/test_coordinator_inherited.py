"""Epochs that an earlier coordinator began: it may be alive still, and about to store their manifest."""

from __future__ import annotations

import pytest

from cutline.errors import InvariantViolation
from cutline.model.ids import Epoch
from cutline.protocol.checkpoint.pending_epoch import EpochState
from cutline.protocol.messages.coordinator import InjectBarrier, RequestAck, StoreAborted, StoreManifest
from tests.support.driven_coordinator import DrivenCoordinator, complete_epoch, found_manifest, stored_pending


def successor(*pending: int, **options: object) -> DrivenCoordinator:
    """A coordinator of generation 2 that finds these epochs pending."""
    return DrivenCoordinator(
        generation=2,
        last_epoch=max(pending),
        pending=[stored_pending(epoch) for epoch in pending],
        max_concurrent=3,
        **options,  # type: ignore[arg-type]
    )


def test_everybody_is_asked_because_they_may_have_acknowledged_to_the_one_before() -> None:
    it = successor(4)
    assert it.injected == [("left", 4), ("right", 4)]
    assert it.questions == [("left", 4), ("right", 4), ("totals", 4)]


def test_barriers_go_out_again_with_the_terms_they_had() -> None:
    it = successor(4)
    (first, *_) = it.asked(InjectBarrier)
    assert first.terms == stored_pending(4).terms


def test_those_who_stay_silent_are_asked_again_later() -> None:
    it = successor(4, ask_again_ms=100)
    it.ack("left", 4)
    it.ack("right", 4)
    assert it.pass_ms(100) == [RequestAck(operator=it.asked(RequestAck)[-1].operator, epoch=Epoch(4))]
    assert it.questions[-1] == ("totals", 4)


def test_a_clock_that_was_set_back_does_not_make_an_epoch_begin_in_the_future() -> None:
    it = DrivenCoordinator(pending=[stored_pending(4, started_ms=50_000)], now_ms=1_000, timeout_ms=1_000)
    assert it.next_deadline_ms() == 2_000


def test_an_abort_of_an_inherited_epoch_says_so_and_of_an_own_one_does_not() -> None:
    it = successor(4)
    it.snapshot_failed("left", 4)
    it.begin(5)
    it.snapshot_failed("left", 5)
    assert [(action.epoch, action.is_inherited) for action in it.asked(StoreAborted)] == [(4, True), (5, False)]


# ------------------------------------------------------------------------------------------------- barred first


def test_an_inherited_epoch_is_barred_before_the_manifest_of_a_later_one_is_stored() -> None:
    """Its old coordinator may complete it at any moment: then the later one would name the wrong one before it."""
    it = successor(4)
    it.begin(5)
    it.ack_all(5, batch=9)
    assert it.manifests == []
    assert it.asked(StoreAborted) == [
        StoreAborted(epoch=Epoch(4), reason="subsumed by epoch 5", is_inherited=True),
    ]
    it.abort_stored(4)
    assert it.manifests == [5]
    assert it.asked(StoreManifest)[0].previous_epoch == 0


def test_it_is_barred_once() -> None:
    it = successor(4)
    it.begin(5)
    it.begin(6)
    it.ack_all(5)
    it.ack_all(6)
    assert len(it.asked(StoreAborted)) == 1


def test_all_inherited_ones_before_it_are_barred() -> None:
    it = successor(3, 4)
    it.begin(5)
    it.ack_all(5)
    assert sorted(it.aborted) == [3, 4]
    it.abort_stored(4)
    assert it.manifests == []
    it.abort_stored(3)
    assert it.manifests == [5]


def test_an_inherited_epoch_itself_waits_for_the_ones_before_it() -> None:
    it = successor(3, 4)
    it.ack_all(4)
    assert it.manifests == []
    it.abort_stored(3)
    assert it.manifests == [4]


def test_an_inherited_epoch_that_is_complete_first_goes_first() -> None:
    it = successor(3, 4)
    it.ack_all(3, batch=1)
    it.ack_all(4, batch=2)
    assert it.manifests == [3]
    it.manifest_stored(3)
    assert it.manifests == [3, 4]
    assert it.aborted == {}


def test_an_own_epoch_is_not_barred_by_a_later_one() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack_all(2)
    assert it.manifests == [2]
    assert it.aborted == {}


def test_whoever_waits_for_a_barred_epoch_is_answered_by_the_later_one() -> None:
    it = successor(4)
    it.core.pending[Epoch(4)].requests.append("waits")
    it.begin(5)
    it.ack_all(5)
    it.abort_stored(4)
    it.manifest_stored(5)
    it.publish(5)
    assert it.answers["waits"].completed
    assert it.answers["waits"].epoch == 5


# ------------------------------------------------------------------------------------------------- found


def test_a_manifest_that_is_there_already_is_taken_over_with_its_own_cuts() -> None:
    """Its acknowledgements may tell of later snapshots; what counts is what is stored."""
    it = successor(4)
    it.ack_all(4, batch=9)
    it.manifest_stored(4, found=found_manifest(batch=7, generation=1))
    assert it.closed == [(4, True)]
    (item,) = it.core.complete
    assert (item.generation, set(item.batches.values())) == (1, {7})
    assert {(permit.generation, permit.through_batch) for permit in it.permits("table")} == {(1, 7)}


def test_an_abort_that_comes_too_late_gives_in_to_the_manifest() -> None:
    it = successor(4)
    it.snapshot_failed("left", 4)
    it.manifest_stored(4, found=found_manifest(batch=7, generation=1))
    assert it.closed == [(4, True)]
    assert [permit.epoch for permit in it.permits("table")] == [4]
    assert it.abort_stored(4) == []
    assert it.core.failures_in_a_row == 0


def test_an_epoch_that_was_to_be_subsumed_but_is_complete_comes_before_the_later_one() -> None:
    it = successor(4)
    it.begin(5)
    it.ack_all(5, batch=9)
    it.manifest_stored(4, found=found_manifest(batch=7, generation=1))
    assert it.manifests == [5]
    assert it.asked(StoreManifest)[0].previous_epoch == 4
    it.manifest_stored(5)
    it.publish(4)
    it.publish(5)
    assert [(permit.after_batch, permit.through_batch) for permit in it.permits("table")] == [(-1, 7), (7, 9)]


def test_an_abort_under_way_does_not_give_in_to_a_manifest_of_ones_own() -> None:
    """A late answer to something that was refused is no proof that the manifest is there."""
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    it.manifest_refused(1)
    assert it.manifest_stored(1) == []
    assert it.core.pending[Epoch(1)].state is EpochState.ABORTING


def test_a_found_manifest_of_an_epoch_that_still_collects_is_no_answer_to_anything() -> None:
    it = successor(4)
    assert it.manifest_stored(4, found=found_manifest(batch=7)) == []


def test_a_found_manifest_may_not_know_of_the_epoch_that_was_completed_here_before_it() -> None:
    """The old coordinator was about to store epoch 5 while epoch 4 was pending; this one completed 4 first."""
    it = successor(4, 5)
    it.ack_all(4, batch=3)
    it.manifest_stored(4)
    it.ack_all(5, batch=8)
    it.manifest_stored(5, found=found_manifest(batch=7, previous=0, generation=1))
    it.publish(4)
    it.publish(5)
    assert [(permit.after_batch, permit.through_batch) for permit in it.permits("table")] == [(-1, 3), (3, 7)]
    assert it.core.is_settled()


def test_a_manifest_that_follows_an_unknown_epoch_is_a_bug() -> None:
    it = successor(4, complete=[complete_epoch(1, batch=1)], published={"table": 1, "raw": 1})
    it.ack_all(4)
    with pytest.raises(InvariantViolation, match="beside"):
        it.manifest_stored(4, found=found_manifest(batch=7, previous=3))


def test_a_manifest_before_the_newest_complete_one_is_a_bug() -> None:
    it = successor(4, complete=[complete_epoch(5, batch=1)], published={"table": 5, "raw": 5})
    assert it.aborted == {4: "a later epoch completed"}
    with pytest.raises(InvariantViolation, match="beside"):
        it.manifest_stored(4, found=found_manifest(batch=7))
