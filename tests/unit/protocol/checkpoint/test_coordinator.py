"""The coordinator: what it waits for before it acts, and what it makes of everything that can go wrong."""

from __future__ import annotations

import pytest

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.checkpoint.pending_epoch import AckOutcome, EpochState
from cutline.protocol.checkpoint.requests import POSTPONED_LIMIT
from cutline.protocol.messages.coordinator import (
    AnnounceClosed,
    CommitSink,
    InjectBarrier,
    ReleaseEpochs,
    StoreAborted,
    StoreManifest,
    StorePending,
)
from cutline.protocol.messages.wire import OperatorAcked
from tests.support.driven_coordinator import (
    SUBTASKS,
    DrivenCoordinator,
    complete_epoch,
    operator_ack,
    stored_pending,
)

#: What the driven coordinator asks for unless a request says otherwise.
CONFIGURED = BarrierTerms(alignment_limit_ms=50)

# ------------------------------------------------------------------------------------------------- the good path


def test_a_checkpoint_goes_from_the_request_to_the_answer() -> None:
    it = DrivenCoordinator()
    assert it.request("mine") == [StorePending(epoch=Epoch(1), terms=CONFIGURED)]
    assert it.pending_stored(1) == [
        InjectBarrier(operator=OperatorId("left"), epoch=Epoch(1), terms=CONFIGURED),
        InjectBarrier(operator=OperatorId("right"), epoch=Epoch(1), terms=CONFIGURED),
    ]
    assert it.ack("left", 1, batch=3) == it.ack("right", 1, batch=5) == []
    (store,) = it.ack("totals", 1, batch=4)
    assert isinstance(store, StoreManifest)
    assert {name: ack.cut.batch for name, ack in store.acks.items()} == {"left": 3, "right": 5, "totals": 4}
    announced, *commits = it.manifest_stored(1)
    assert announced == AnnounceClosed(epoch=Epoch(1), completed=True)
    assert [(action.permit.sink, action.permit.through_batch) for action in commits if isinstance(action, CommitSink)]
    assert it.answers == {}
    it.publish(1)
    assert it.answers["mine"].completed
    assert it.answers["mine"].epoch == 1
    assert it.core.is_settled()


def test_nothing_is_injected_before_the_pending_epoch_is_stored() -> None:
    it = DrivenCoordinator()
    it.request()
    it.pass_ms(10)
    assert it.injected == []
    assert it.core.pending[Epoch(1)].state is EpochState.RECORDING


def test_only_sources_are_asked_to_cut() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    assert it.injected == [("left", 1), ("right", 1)]


def test_barriers_are_injected_once() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    assert it.pending_stored(1) == []


def test_the_manifest_is_stored_only_when_every_subtask_has_acknowledged() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack("left", 1)
    it.ack("right", 1)
    it.ack("totals", 1, subtasks=[1])
    assert it.manifests == []
    it.ack("totals", 1, subtasks=[0])
    assert it.manifests == [1]


def test_sinks_publish_only_after_the_manifest_is_stored() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    it.pass_ms(5)
    assert it.asked(CommitSink) == []
    it.manifest_stored(1)
    assert len(it.asked(CommitSink)) == 2


def test_the_first_thing_after_the_manifest_is_to_tell_the_operators() -> None:
    it = DrivenCoordinator()
    actions = it.complete(1)
    assert actions[0] == AnnounceClosed(epoch=Epoch(1), completed=True)


def test_a_request_may_choose_how_to_align() -> None:
    it = DrivenCoordinator()
    assert it.request("unaligned", limit_ms=0) == [
        StorePending(epoch=Epoch(1), terms=BarrierTerms(alignment_limit_ms=0, is_binding=True)),
    ]
    injected = it.pending_stored(1)
    assert len(injected) == 2
    assert all(isinstance(action, InjectBarrier) and action.terms.alignment_limit_ms == 0 for action in injected)


def test_a_manifest_names_the_complete_epoch_before_it() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.begin(2)
    it.snapshot_failed("left", 2)
    it.abort_stored(2)
    it.complete(3)
    assert [action.previous_epoch for action in it.asked(StoreManifest)] == [0, 1]


# ------------------------------------------------------------------------------------------------- acknowledgements


def test_repeated_acknowledgements_are_counted_as_such() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack("left", 1)
    it.ack("left", 1)
    assert it.core.ack_outcomes[AckOutcome.DUPLICATE] == 1
    assert it.manifests == []


def test_a_repeat_after_the_last_acknowledgement_stores_no_second_manifest() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    it.ack_all(1)
    assert it.manifests == [1]


def test_acknowledgements_of_another_generation_change_nothing() -> None:
    it = DrivenCoordinator(generation=2)
    it.begin(1)
    for operator, count in SUBTASKS.items():
        it.tell(OperatorAcked(ack=operator_ack(operator, 1, subtasks=range(count), generation=1)))
    assert it.manifests == []
    assert it.core.ack_outcomes[AckOutcome.STALE] == len(SUBTASKS)


def test_acknowledgements_of_unknown_epochs_change_nothing() -> None:
    it = DrivenCoordinator()
    assert it.ack("left", 77) == []
    assert it.core.ack_outcomes[AckOutcome.UNKNOWN] == 1


def test_a_late_acknowledgement_of_an_aborted_epoch_changes_nothing() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.snapshot_failed("left", 1)
    it.ack_all(1)
    assert it.manifests == []
    it.abort_stored(1)
    it.ack_all(1)
    assert it.manifests == []
    assert it.closed == [(1, False)]


# ------------------------------------------------------------------------------------------------- aborts


def test_an_epoch_that_takes_too_long_is_aborted_and_says_who_is_missing() -> None:
    it = DrivenCoordinator(timeout_ms=1_000)
    it.begin(1, name="mine")
    it.ack("left", 1)
    it.ack("totals", 1, subtasks=[0])
    assert it.next_deadline_ms() == 1_000
    it.pass_ms(999)
    assert it.aborted == {}
    it.pass_ms(1)
    assert it.aborted == {1: "timed out after 1000 ms waiting for right subtasks [0]; totals subtasks [1]"}
    assert it.closed == []
    it.abort_stored(1)
    assert it.closed == [(1, False)]
    assert it.answers["mine1"].reason == it.aborted[1]
    assert not it.answers["mine1"].completed


def test_operators_hear_of_an_abort_only_when_it_is_stored() -> None:
    """If they went on before, a coordinator that dies now would come back and wait for them."""
    it = DrivenCoordinator()
    it.begin(1)
    it.snapshot_failed("left", 1)
    assert it.closed == []
    it.abort_stored(1)
    assert it.closed == [(1, False)]


def test_an_epoch_whose_record_is_never_stored_is_aborted_too() -> None:
    it = DrivenCoordinator()
    it.request()
    it.pass_ms(1_000)
    assert list(it.aborted) == [1]
    assert it.pending_stored(1) == []
    assert it.injected == []


def test_an_epoch_is_not_aborted_while_its_manifest_is_being_stored() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    it.pass_ms(10_000)
    assert it.aborted == {}
    it.manifest_stored(1)
    assert it.closed == [(1, True)]


def test_an_epoch_whose_manifest_is_being_stored_asks_for_no_timer() -> None:
    """Time changes nothing about it; a deadline in the past would make the coordinator spin."""
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    assert it.next_deadline_ms() is None


def test_an_epoch_that_is_being_aborted_asks_for_no_timer() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.pass_ms(1_000)
    assert it.next_deadline_ms() is None
    assert it.pass_ms(1_000) == []


def test_a_refused_manifest_aborts_the_epoch() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    assert it.manifest_refused(1) == [StoreAborted(epoch=Epoch(1), reason="disk full")]
    it.abort_stored(1)
    assert it.asked(CommitSink) == []
    assert it.closed == [(1, False)]


def test_a_failed_snapshot_aborts_the_epoch_and_names_the_operator() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.snapshot_failed("totals", 1, reason="no space left")
    assert it.aborted == {1: "snapshot of totals failed: no space left"}


def test_a_failure_of_an_older_generation_aborts_nothing() -> None:
    it = DrivenCoordinator(generation=2)
    it.begin(1)
    it.generation = 1
    it.snapshot_failed("left", 1)
    assert it.aborted == {}


def test_a_failure_after_everybody_acknowledged_aborts_nothing() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    it.snapshot_failed("left", 1)
    assert it.aborted == {}


@pytest.mark.parametrize("late", ["pending_stored", "manifest_stored", "manifest_refused", "abort_stored"])
def test_outcomes_of_unknown_epochs_change_nothing(late: str) -> None:
    it = DrivenCoordinator()
    assert getattr(it, late)(9) == []


def test_outcomes_that_come_twice_change_nothing() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    assert it.manifest_stored(1) == []
    assert it.manifest_refused(1) == []
    it.begin(2)
    it.snapshot_failed("left", 2)
    assert it.snapshot_failed("left", 2) == []
    it.abort_stored(2)
    assert it.abort_stored(2) == []
    assert it.closed == [(1, True), (2, False)]


def test_an_abort_that_was_never_asked_for_changes_nothing() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    assert it.abort_stored(1) == []
    assert Epoch(1) in it.core.pending


# ------------------------------------------------------------------------------------------------- several at once


def test_a_later_complete_epoch_aborts_the_earlier_ones() -> None:
    it = DrivenCoordinator(max_concurrent=3)
    for epoch in (1, 2, 3):
        it.begin(epoch)
    it.ack_all(2)
    it.manifest_stored(2)
    assert it.aborted == {1: "subsumed by epoch 2"}
    assert Epoch(3) in it.core.pending


def test_manifests_are_stored_one_after_the_other() -> None:
    """Two at once could be stored in either order, and the permits of both would cover the same batches."""
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack_all(1, batch=3)
    it.ack_all(2, batch=5)
    assert it.manifests == [1]
    it.manifest_stored(1)
    assert it.manifests == [1, 2]
    assert it.asked(StoreManifest)[1].previous_epoch == 1
    it.manifest_stored(2)
    assert [item.epoch for item in it.core.complete] == [1, 2]


def test_an_epoch_that_waits_for_the_manifest_of_a_later_one_is_subsumed_by_it() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack_all(2, batch=5)
    it.ack_all(1, batch=3)
    assert it.manifests == [2]
    it.manifest_stored(2)
    assert it.manifests == [2]
    assert list(it.aborted) == [1]


def test_an_epoch_that_waits_goes_on_when_the_manifest_before_it_is_refused() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack_all(1, batch=3)
    it.ack_all(2, batch=5)
    it.manifest_refused(1)
    assert it.manifests == [1, 2]
    it.manifest_stored(2)
    it.abort_stored(1)
    assert it.closed == [(2, True), (1, False)]


def test_permits_of_epochs_at_once_cover_each_batch_once() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack_all(1, batch=3)
    it.ack_all(2, batch=5)
    it.manifest_stored(1)
    it.manifest_stored(2)
    it.publish(1)
    it.publish(2)
    assert [(permit.after_batch, permit.through_batch) for permit in it.permits("table")] == [(-1, 3), (3, 5)]


# ------------------------------------------------------------------------------------------------- requests, the timer


def test_a_request_while_another_epoch_runs_is_taken_up_after_it() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    assert it.request("later") == []
    it.ack_all(1)
    it.manifest_stored(1)
    assert it.stored_pending == [1, 2]
    it.pending_stored(2)
    it.ack_all(2)
    it.manifest_stored(2)
    it.publish(1)
    it.publish(2)
    assert it.answers["later"].epoch == 2


def test_a_postponed_request_is_taken_up_after_an_abort() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    it.request("later")
    it.snapshot_failed("left", 1)
    assert it.stored_pending == [1]
    it.abort_stored(1)
    assert it.stored_pending == [1, 2]


def test_a_request_joins_an_epoch_that_has_not_sent_its_barriers() -> None:
    it = DrivenCoordinator()
    it.request("first")
    assert it.request("second") == []
    it.pending_stored(1)
    it.ack_all(1)
    it.manifest_stored(1)
    it.publish(1)
    assert {name: answer.epoch for name, answer in it.answers.items()} == {"first": 1, "second": 1}
    assert it.stored_pending == [1]


def test_a_request_never_joins_an_epoch_whose_barriers_are_out() -> None:
    """What the caller wrote just before may lie behind those barriers."""
    it = DrivenCoordinator()
    it.begin(1)
    it.request("later")
    it.ack_all(1)
    it.manifest_stored(1)
    it.publish(1)
    assert "later" not in it.answers


def test_a_request_with_its_own_options_never_joins() -> None:
    it = DrivenCoordinator()
    it.request("first")
    it.request("aligned", limit_ms=None)
    it.pending_stored(1)
    it.ack_all(1)
    it.manifest_stored(1)
    assert it.asked(StorePending)[1].terms.alignment_limit_ms is None


def test_several_postponed_requests_share_one_epoch() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    for name in ("b", "c", "d"):
        it.request(name)
    it.ack_all(1)
    it.manifest_stored(1)
    assert it.stored_pending == [1, 2]
    it.pending_stored(2)
    it.ack_all(2)
    it.manifest_stored(2)
    it.publish(1)
    it.publish(2)
    assert {it.answers[name].epoch for name in ("b", "c", "d")} == {2}


def test_too_many_waiting_requests_are_refused() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    for number in range(POSTPONED_LIMIT):
        it.request(f"w{number}")
    it.request("one more")
    assert it.answers["one more"].reason == "too many requests"


def test_a_request_before_the_start_is_refused() -> None:
    it = DrivenCoordinator(started=False)
    it.request("early")
    assert it.answers["early"].reason == "flow is not running"
    assert it.stored_pending == []


def test_after_the_stop_no_epoch_begins_and_nobody_waits_for_one() -> None:
    it = DrivenCoordinator(interval_ms=100)
    it.begin(1)
    it.request("waiting")
    it.actions += it.core.stop_triggering(now_ms=it.now_ms)
    assert it.answers["waiting"].reason == "flow is not running"
    it.request("late")
    assert not it.answers["late"].completed
    it.ack_all(1)
    it.manifest_stored(1)
    it.pass_ms(10_000)
    assert it.stored_pending == [1]
    assert it.closed == [(1, True)]


def test_an_answer_waits_for_every_sink() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.sink_committed("table", 1)
    assert it.answers == {}
    it.sink_committed("raw", 1)
    assert it.answers["r1"].completed


def test_without_sinks_the_manifest_is_the_answer() -> None:
    it = DrivenCoordinator(sinks={})
    it.complete(1)
    assert it.answers["r1"].completed


def test_the_timer_begins_epochs() -> None:
    it = DrivenCoordinator(interval_ms=100)
    assert it.next_deadline_ms() == 100
    it.pass_ms(99)
    assert it.stored_pending == []
    it.pass_ms(1)
    assert it.stored_pending == [1]


def test_the_timer_waits_while_an_epoch_is_pending() -> None:
    it = DrivenCoordinator(interval_ms=100, timeout_ms=1_000)
    it.pass_ms(100)
    it.pass_ms(500)
    assert it.stored_pending == [1]
    assert it.next_deadline_ms() == 1_100
    it.pending_stored(1)
    it.ack_all(1)
    it.manifest_stored(1)
    it.pass_ms(0)
    assert it.stored_pending == [1, 2]


def test_a_pause_after_each_epoch_is_kept() -> None:
    it = DrivenCoordinator(interval_ms=100, min_pause_ms=80)
    it.pass_ms(100)
    it.pending_stored(1)
    it.ack_all(1)
    it.now_ms = 190
    it.manifest_stored(1)
    it.pass_ms(79)
    assert it.stored_pending == [1]
    it.pass_ms(1)
    assert it.stored_pending == [1, 2]


# ------------------------------------------------------------------------------------------------- publishing


def test_a_sink_publishes_epochs_in_order_and_one_at_a_time() -> None:
    it = DrivenCoordinator()
    for epoch in (1, 2, 3):
        it.complete(epoch, batch=epoch)
    assert [permit.epoch for permit in it.permits("table")] == [1]
    it.sink_committed("table", 1)
    it.sink_committed("table", 2)
    assert [permit.epoch for permit in it.permits("table")] == [1, 2, 3]


def test_a_failed_commit_is_tried_again_after_a_pause() -> None:
    it = DrivenCoordinator(timeout_ms=10**9)
    it.complete(1)
    it.sink_committed("raw", 1)
    assert it.sink_failed("table", 1) == []
    assert it.next_deadline_ms() == 100
    it.pass_ms(99)
    assert len(it.permits("table")) == 1
    it.pass_ms(1)
    first, second = it.permits("table")
    assert first == second
    it.sink_failed("table", 1)
    assert it.next_deadline_ms() == 300


def test_a_failed_commit_holds_up_later_epochs_of_its_sink_only() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.sink_failed("table", 1)
    it.complete(2)
    it.sink_committed("raw", 1)
    assert [permit.epoch for permit in it.permits("raw")] == [1, 2]
    assert [permit.epoch for permit in it.permits("table")] == [1]


def test_a_commit_reported_twice_publishes_nothing_twice() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.sink_committed("table", 1)
    it.sink_committed("table", 1)
    assert [permit.epoch for permit in it.permits("table")] == [1]


def test_an_aborted_epoch_leaves_its_batches_to_the_next() -> None:
    it = DrivenCoordinator()
    it.complete(1, batch=4)
    it.publish(1)
    it.begin(2)
    it.ack("totals", 2, batch=7)
    it.snapshot_failed("left", 2)
    it.abort_stored(2)
    it.complete(3, batch=9)
    permit = it.permits("table")[-1]
    assert (permit.epoch, permit.previous_epoch, permit.after_batch, permit.through_batch) == (3, 1, 4, 9)


# ------------------------------------------------------------------------------------------------- letting go


def test_the_newest_checkpoints_are_kept() -> None:
    it = DrivenCoordinator(retain=2)
    for epoch in (1, 2, 3):
        it.complete(epoch)
        it.publish(epoch)
    assert it.released == [(1,)]
    assert [item.epoch for item in it.core.complete] == [2, 3]


def test_what_a_sink_has_not_published_is_kept() -> None:
    it = DrivenCoordinator(retain=1)
    for epoch in (1, 2, 3):
        it.complete(epoch)
        it.sink_committed("raw", epoch)
    assert it.released == []
    it.sink_committed("table", 1)
    assert it.released == []
    it.sink_committed("table", 2)
    assert it.released == [(1,)]
    it.sink_committed("table", 3)
    assert it.released == [(1,), (2,)]


def test_the_last_published_epoch_is_kept_because_the_next_permit_begins_after_it() -> None:
    it = DrivenCoordinator(retain=1)
    it.complete(1, batch=4)
    it.publish(1)
    it.complete(2, batch=6)
    it.publish(2)
    it.complete(3, batch=9)
    assert [permit.after_batch for permit in it.permits("table")] == [-1, 4, 6]


def test_the_newest_complete_epoch_is_always_kept() -> None:
    it = DrivenCoordinator(retain=1, sinks={})
    for epoch in (1, 2, 3):
        it.complete(epoch)
    assert it.released == [(1,), (2,)]
    assert [item.epoch for item in it.core.complete] == [3]


def test_aborted_epochs_release_nothing() -> None:
    it = DrivenCoordinator(retain=1, sinks={})
    it.complete(1)
    it.begin(2)
    it.snapshot_failed("left", 2)
    it.abort_stored(2)
    assert it.asked(ReleaseEpochs) == []


# ------------------------------------------------------------------------------------------------- restart


def test_a_pending_epoch_is_resumed_by_injecting_its_barriers_again() -> None:
    it = DrivenCoordinator(last_epoch=4, pending=[stored_pending(4, started_ms=0)], now_ms=500)
    assert it.injected == [("left", 4), ("right", 4)]
    it.ack_all(4)
    it.manifest_stored(4)
    assert it.closed == [(4, True)]


def test_a_resumed_epoch_keeps_its_deadline() -> None:
    it = DrivenCoordinator(pending=[stored_pending(4, started_ms=0)], now_ms=600, timeout_ms=1_000)
    assert it.next_deadline_ms() == 1_000


def test_a_pending_epoch_that_expired_meanwhile_is_aborted() -> None:
    it = DrivenCoordinator(pending=[stored_pending(4, started_ms=0)], now_ms=1_000, timeout_ms=1_000)
    assert it.aborted == {4: "timed out while the coordinator was down"}
    assert it.injected == []


def test_a_pending_epoch_of_another_history_is_aborted() -> None:
    it = DrivenCoordinator(pending=[stored_pending(4, is_resumable=False)])
    assert it.aborted == {4: "the flow was restored while the epoch was pending"}
    assert it.injected == []


def test_a_pending_epoch_below_a_complete_one_is_aborted() -> None:
    it = DrivenCoordinator(complete=[complete_epoch(5, batch=3)], published={"table": 5, "raw": 5}, last_epoch=5)
    it.actions += it.core.start([stored_pending(4)], now_ms=0)
    assert it.aborted == {4: "a later epoch completed"}


def test_acknowledgements_from_before_the_restart_do_not_count() -> None:
    it = DrivenCoordinator(pending=[stored_pending(4)], generation=2)
    it.tell(OperatorAcked(ack=operator_ack("left", 4, generation=1)))
    assert it.core.ack_outcomes[AckOutcome.STALE] == 1


def test_an_epoch_is_never_used_twice() -> None:
    it = DrivenCoordinator(
        last_epoch=6,
        complete=[complete_epoch(3, batch=1)],
        published={"table": 3, "raw": 3},
        pending=[stored_pending(9, is_resumable=False)],
    )
    it.abort_stored(9)
    it.request()
    assert it.stored_pending == [10]


def test_commits_that_were_not_done_are_done_first() -> None:
    it = DrivenCoordinator(
        last_epoch=3,
        complete=[complete_epoch(1, batch=2), complete_epoch(2, batch=5), complete_epoch(3, batch=9)],
        published={"table": 1, "raw": 3},
    )
    assert [(permit.epoch, permit.after_batch, permit.through_batch) for permit in it.permits("table")] == [(2, 2, 5)]
    assert it.permits("raw") == []
    assert not it.core.is_settled()
    it.sink_committed("table", 2)
    it.sink_committed("table", 3)
    assert [(permit.epoch, permit.after_batch) for permit in it.permits("table")] == [(2, 2), (3, 5)]
    assert it.core.is_settled()


def test_a_replayed_permit_names_the_generation_that_completed_the_epoch() -> None:
    it = DrivenCoordinator(complete=[complete_epoch(1, batch=2, generation=1)], generation=7)
    assert [permit.generation for permit in it.permits("table")] == [1]


def test_a_sink_that_is_new_begins_with_the_oldest_epoch_that_is_kept() -> None:
    it = DrivenCoordinator(complete=[complete_epoch(7, batch=9)], published={"raw": 7}, last_epoch=7)
    assert [permit.epoch for permit in it.permits("table")] == [7]


def test_after_a_restart_too_many_kept_epochs_go_with_the_next_one() -> None:
    it = DrivenCoordinator(
        retain=1,
        complete=[complete_epoch(epoch, batch=epoch) for epoch in (1, 2, 3)],
        published={"table": 3, "raw": 3},
        last_epoch=3,
    )
    it.complete(4)
    it.publish(4)
    assert it.released == [(1, 2), (3,)]
    assert [item.epoch for item in it.core.complete] == [4]


def test_whoever_waits_for_a_subsumed_epoch_is_answered_by_the_one_that_covers_it() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.complete(2)
    it.abort_stored(1)
    it.publish(2)
    answers = {name: (answer.epoch, answer.completed) for name, answer in it.answers.items()}
    assert answers == {"r1": (2, True), "r2": (2, True)}


def test_an_epoch_whose_predecessor_was_let_go_of_is_published() -> None:
    """An epoch goes only when every sink has published it; a sink need keep no trace of one without rows."""
    it = DrivenCoordinator(
        complete=[complete_epoch(5, batch=4, previous=4)], published={"table": 1, "raw": 5}, last_epoch=5
    )
    assert [permit.epoch for permit in it.permits("table")] == [5]


def test_an_epoch_whose_predecessor_is_gone_unpublished_is_not_published() -> None:
    """Its record stages only what came after the missing one: publishing it would leave a gap."""
    with pytest.raises(InvariantViolation, match="which is gone"):
        DrivenCoordinator(
            complete=[complete_epoch(1, batch=0), complete_epoch(3, batch=4, previous=2)],
            published={"table": 1, "raw": 1},
            last_epoch=3,
        )
