"""What the coordinator does about operators that say nothing, fail, are lost, or begin a new life."""

from __future__ import annotations

from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.checkpoint.pending_epoch import AckOutcome, EpochState
from cutline.protocol.checkpoint.trigger import TriggerSettings
from cutline.protocol.messages.coordinator import (
    AnnounceClosed,
    CommitSink,
    InjectBarrier,
    ManifestStored,
    ReportHealth,
    RequestAck,
)
from cutline.protocol.messages.wire import OperatorAcked, SnapshotFailed
from tests.support.driven_coordinator import NEVER_MS, DrivenCoordinator, complete_epoch, operator_ack, stored_pending

# ------------------------------------------------------------------------------------------------- timeouts


def test_an_operator_with_a_timeout_of_its_own_fails_the_epoch_before_the_flow_does() -> None:
    it = DrivenCoordinator(timeout_ms=1_000, operator_timeouts_ms={"totals": 300, "left": 200})
    it.begin(1)
    it.ack("left", 1)
    assert it.next_deadline_ms() == 300
    it.pass_ms(299)
    assert it.aborted == {}
    it.pass_ms(1)
    assert it.aborted == {1: "timed out after 300 ms waiting for totals subtasks [0, 1]"}


def test_an_operator_that_has_acknowledged_in_time_has_no_timeout_any_more() -> None:
    it = DrivenCoordinator(timeout_ms=1_000, operator_timeouts_ms={"totals": 300})
    it.begin(1)
    it.ack("totals", 1)
    it.pass_ms(999)
    assert it.aborted == {}
    it.pass_ms(1)
    assert list(it.aborted) == [1]


def test_an_operator_that_has_acknowledged_in_part_is_still_waited_for() -> None:
    it = DrivenCoordinator(operator_timeouts_ms={"totals": 300})
    it.begin(1)
    it.ack("totals", 1, subtasks=[0])
    it.pass_ms(300)
    assert it.aborted == {1: "timed out after 300 ms waiting for totals subtasks [1]"}


def test_a_timeout_longer_than_the_flows_lengthens_nothing() -> None:
    it = DrivenCoordinator(timeout_ms=1_000, operator_timeouts_ms={"totals": 5_000})
    it.begin(1)
    assert it.next_deadline_ms() == 1_000
    it.pass_ms(1_000)
    assert list(it.aborted) == [1]


def test_only_the_first_few_of_thousands_of_subtasks_are_named() -> None:
    it = DrivenCoordinator(subtasks={"left": 1, "right": 1, "totals": 10_000})
    it.begin(1)
    it.pass_ms(1_000)
    assert it.aborted[1].endswith("totals subtasks [0, 1, 2, 3, 4, 5, 6, 7, … 10000 in all]")


# ------------------------------------------------------------------------------------------------- asking again


def asking(**others: int) -> DrivenCoordinator:
    return DrivenCoordinator(timeout_ms=NEVER_MS, ask_again_ms=100, **others)  # type: ignore[arg-type]


def test_whoever_says_nothing_is_asked_again_with_doubling_pauses_up_to_a_limit() -> None:
    it = asking(ask_again_limit=4)
    it.begin(1)
    asked_at = []
    while (deadline := it.next_deadline_ms()) is not None:
        assert it.pass_ms(deadline - it.now_ms - 1) == []
        assert it.pass_ms(1) != []
        asked_at.append(deadline)
    assert asked_at == [100, 300, 700, 1_500]
    assert it.pass_ms(10**9) == []


def test_only_those_who_are_missing_are_asked_and_sources_are_told_again() -> None:
    """A source may never have heard of the epoch; whoever is behind it hears of it from the log."""
    it = asking()
    it.begin(1)
    it.ack("left", 1)
    it.ack("totals", 1, subtasks=[0])
    assert it.pass_ms(100) == [
        InjectBarrier(operator=OperatorId("right"), epoch=Epoch(1), terms=it.core.pending[Epoch(1)].terms),
        RequestAck(operator=OperatorId("right"), epoch=Epoch(1)),
        RequestAck(operator=OperatorId("totals"), epoch=Epoch(1)),
    ]


def test_nobody_is_asked_before_the_barriers_are_out_or_after_the_last_acknowledgement() -> None:
    it = asking()
    it.request()
    assert it.pass_ms(1_000) == []
    it.pending_stored(1)
    it.ack_all(1)
    assert it.pass_ms(10_000) == []
    assert it.questions == []


def test_the_pause_counts_from_the_barriers_not_from_the_request() -> None:
    it = asking()
    it.request()
    it.now_ms = 500
    it.pending_stored(1)
    assert it.next_deadline_ms() == 600


def test_a_late_timer_asks_once() -> None:
    it = asking()
    it.begin(1)
    it.pass_ms(50_000)
    assert len(it.questions) == 3
    assert it.next_deadline_ms() == 50_200


def test_an_answer_to_a_question_is_an_acknowledgement_like_any_other() -> None:
    it = asking()
    it.begin(1)
    it.pass_ms(100)
    it.ack_all(1)
    assert it.manifests == [1]


def test_an_epoch_that_waits_only_for_the_manifest_before_it_asks_for_no_timer_and_does_not_expire() -> None:
    it = DrivenCoordinator(max_concurrent=2, timeout_ms=1_000, ask_again_ms=100)
    it.begin(1)
    it.begin(2)
    it.ack_all(1)
    it.ack_all(2)
    assert it.next_deadline_ms() is None, "a deadline that nothing can meet would make the coordinator spin"
    assert it.pass_ms(10_000) == []
    it.manifest_stored(1)
    assert it.manifests == [1, 2]


def test_an_epoch_that_waits_until_an_inherited_one_is_barred_asks_for_no_timer() -> None:
    it = DrivenCoordinator(max_concurrent=2, pending=[stored_pending(1)], last_epoch=1)
    it.begin(2)
    it.ack_all(2)
    assert list(it.aborted) == [1]
    assert it.next_deadline_ms() is None
    assert it.pass_ms(10_000) == []
    it.abort_stored(1)
    assert it.manifests == [2]


# ------------------------------------------------------------------------------------------------- a new life


def test_an_operator_that_begins_a_new_life_is_told_what_is_pending() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.begin(2)
    it.ack("left", 1)
    assert it.operator_started("left", 1, 2) == [
        InjectBarrier(operator=OperatorId("left"), epoch=Epoch(2), terms=it.core.pending[Epoch(2)].terms),
        RequestAck(operator=OperatorId("left"), epoch=Epoch(2)),
    ]


def test_an_operator_behind_the_sources_is_only_asked() -> None:
    it = DrivenCoordinator()
    it.begin(1)
    assert it.operator_started("totals", 1) == [RequestAck(operator=OperatorId("totals"), epoch=Epoch(1))]


def test_it_is_told_of_epochs_that_ended_while_it_was_away_and_nobody_else_is() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.publish(1)
    it.begin(2)
    it.snapshot_failed("left", 2)
    it.abort_stored(2)
    assert it.operator_started("totals", 1, 2) == [
        AnnounceClosed(epoch=Epoch(1), completed=True, operator=OperatorId("totals"), is_reminder=True),
        AnnounceClosed(epoch=Epoch(2), completed=False, operator=OperatorId("totals"), is_reminder=True),
    ]


def test_an_epoch_that_is_not_decided_is_not_said_to_be_over() -> None:
    it = DrivenCoordinator(max_concurrent=3)
    it.begin(1)
    it.snapshot_failed("left", 1)
    it.begin(2)
    it.ack_all(2)
    it.request("r3")
    assert it.operator_started("totals", 1, 2, 3) == []


def test_a_life_of_another_generation_is_told_nothing() -> None:
    it = DrivenCoordinator(generation=2)
    it.begin(1)
    assert it.operator_started("left", 7, generation=1) == []


def test_sinks_of_an_operator_that_begins_a_new_life_are_told_again_at_once() -> None:
    it = DrivenCoordinator()
    it.complete(1, batch=4)
    first = it.permits("table")
    (again,) = it.operator_started("totals")
    assert isinstance(again, CommitSink)
    assert [again.permit] == first
    assert len(it.permits("raw")) == 1


def test_a_sink_that_had_published_is_not_told_again() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.publish(1)
    assert it.operator_started("totals") == []


def test_a_sink_that_says_nothing_is_told_again() -> None:
    it = DrivenCoordinator(sink_silence_ms=5_000)
    it.complete(1, batch=4)
    it.sink_committed("raw", 1)
    assert it.next_deadline_ms() == 5_000
    it.pass_ms(4_999)
    assert len(it.permits("table")) == 1
    it.pass_ms(1)
    first, second = it.permits("table")
    assert first == second
    assert it.next_deadline_ms() == 10_000
    it.sink_committed("table", 1)
    it.pass_ms(10_000)
    assert len(it.permits("table")) == 2


# ------------------------------------------------------------------------------------------------- regions


def test_losing_operators_aborts_what_is_pending_and_says_why() -> None:
    it = DrivenCoordinator(max_concurrent=2)
    it.begin(1)
    it.request("second")
    it.lose("totals", reason="its disk is gone")
    assert it.aborted == dict.fromkeys((1, 2), "totals must be restored: its disk is gone")


def test_an_epoch_whose_manifest_is_being_stored_is_not_touched() -> None:
    """It is complete, or will be; the lost ones go back to it."""
    it = DrivenCoordinator()
    it.begin(1)
    it.ack_all(1)
    assert it.lose("totals") == []
    it.manifest_stored(1)
    assert it.closed == [(1, True)]


def test_while_operators_are_lost_no_epoch_begins() -> None:
    it = DrivenCoordinator(trigger=TriggerSettings(interval_ms=100, every_batches=1))
    it.lose("totals")
    it.pass_ms(100)
    it.progress("left", batches=5)
    it.request("waits")
    assert it.stored_pending == []
    assert it.next_deadline_ms() is None, "a timer in the past would make the coordinator spin"
    it.restore("totals", generation=2)
    assert it.stored_pending == [1]
    it.pending_stored(1)
    assert it.injected == [("left", 1), ("right", 1)]


def test_all_lost_operators_must_be_back() -> None:
    it = DrivenCoordinator()
    it.lose("totals")
    it.lose("left")
    it.request("waits")
    it.restore("totals", generation=2)
    assert it.stored_pending == []
    it.restore("left", generation=3)
    assert it.stored_pending == [1]
    assert it.core.generation == 3


def test_after_the_restore_only_the_new_generation_of_the_region_counts_and_the_old_one_of_the_others() -> None:
    it = DrivenCoordinator()
    it.lose("totals")
    it.restore("totals", generation=2)
    it.begin(1)
    it.ack("left", 1)
    it.ack("right", 1)
    it.ack("totals", 1)
    assert it.core.ack_outcomes[AckOutcome.STALE] == 1
    assert it.manifests == []
    it.tell(OperatorAcked(ack=operator_ack("totals", 1, subtasks=[0, 1], generation=2)))
    assert it.manifests == [1]


def test_a_failure_in_the_old_generation_of_a_restored_operator_aborts_nothing() -> None:
    it = DrivenCoordinator()
    it.lose("totals")
    it.restore("totals", generation=2)
    it.begin(1)
    it.snapshot_failed("totals", 1)
    assert it.aborted == {}
    it.generation = 2
    it.snapshot_failed("totals", 1)
    assert list(it.aborted) == [1]


def test_what_is_completed_after_a_restore_is_of_the_new_generation() -> None:
    it = DrivenCoordinator()
    it.lose("totals")
    it.restore("totals", generation=2)
    it.begin(1)
    it.ack("left", 1)
    it.ack("right", 1)
    it.tell(OperatorAcked(ack=operator_ack("totals", 1, subtasks=[0, 1], generation=2)))
    it.manifest_stored(1)
    assert [item.generation for item in it.core.complete] == [2]
    assert {permit.generation for permit in it.permits("table")} == {2}


def test_sinks_of_restored_operators_are_told_again() -> None:
    it = DrivenCoordinator()
    it.complete(1)
    it.lose("totals")
    it.restore("totals", generation=2)
    assert [permit.epoch for permit in it.permits("table")] == [1, 1]
    assert len(it.permits("raw")) == 1


def test_a_late_report_of_an_earlier_restore_does_not_take_the_generation_back() -> None:
    it = DrivenCoordinator()
    it.restore("totals", generation=3)
    it.restore("totals", generation=2)
    it.begin(1)
    it.tell(OperatorAcked(ack=operator_ack("totals", 1, subtasks=[0, 1], generation=2)))
    assert it.core.ack_outcomes[AckOutcome.STALE] == 1
    it.tell(OperatorAcked(ack=operator_ack("totals", 1, subtasks=[0, 1], generation=3)))
    assert it.core.ack_outcomes[AckOutcome.ACCEPTED] == 1


def test_operators_may_have_generations_of_their_own_from_the_start() -> None:
    it = DrivenCoordinator(generation=5, generations={"totals": 4})
    it.begin(1)
    it.tell(OperatorAcked(ack=operator_ack("totals", 1, subtasks=[0, 1], generation=4)))
    it.tell(OperatorAcked(ack=operator_ack("left", 1, generation=4)))
    assert it.core.ack_outcomes[AckOutcome.ACCEPTED] == 1
    assert it.core.ack_outcomes[AckOutcome.STALE] == 1


# ------------------------------------------------------------------------------------------------- health


def fail(it: DrivenCoordinator, epoch: int) -> list[object]:
    it.begin(epoch)
    it.snapshot_failed("left", epoch)
    return list(it.abort_stored(epoch))


def test_one_failure_more_than_is_tolerated_makes_the_flow_unhealthy_once() -> None:
    it = DrivenCoordinator(tolerable_failures=2)
    fail(it, 1)
    fail(it, 2)
    assert it.health == []
    reason = "snapshot of left failed: disk full"
    assert ReportHealth(is_healthy=False, failures=3, reason=reason) in fail(it, 3)
    assert not it.core.is_healthy
    fail(it, 4)
    assert it.health == [(False, 3)]
    assert it.core.failures_in_a_row == 4


def test_a_complete_checkpoint_makes_it_healthy_again() -> None:
    it = DrivenCoordinator(tolerable_failures=0)
    fail(it, 1)
    it.complete(2)
    assert it.health == [(False, 1), (True, 0)]
    assert it.core.is_healthy
    assert it.core.failures_in_a_row == 0


def test_only_failures_in_a_row_count() -> None:
    it = DrivenCoordinator(tolerable_failures=1)
    for epoch in (1, 3, 5):
        fail(it, epoch)
        it.complete(epoch + 1)
    assert it.health == []


def test_an_epoch_that_a_later_one_covers_is_no_failure() -> None:
    it = DrivenCoordinator(tolerable_failures=0, max_concurrent=2)
    it.begin(1)
    it.complete(2)
    it.abort_stored(1)
    assert it.health == []
    assert it.core.failures_in_a_row == 0


def test_without_a_limit_any_number_of_failures_is_borne() -> None:
    it = DrivenCoordinator(tolerable_failures=None)
    for epoch in range(1, 20):
        fail(it, epoch)
    assert it.health == []
    assert it.core.failures_in_a_row == 19


# ------------------------------------------------------------------------------------------------- progress


def test_progress_begins_an_epoch() -> None:
    it = DrivenCoordinator(trigger=TriggerSettings(interval_ms=0, every_rows=100))
    assert it.progress("left", rows=60) == []
    it.progress("right", rows=40)
    assert it.stored_pending == [1]
    assert not it.core.pending[Epoch(1)].terms.is_binding


def test_progress_before_the_start_begins_nothing() -> None:
    it = DrivenCoordinator(trigger=TriggerSettings(interval_ms=0, every_rows=1), started=False)
    assert it.progress("left", rows=60) == []


def test_only_what_is_asked_for_by_name_binds_operators_with_limits_of_their_own() -> None:
    it = DrivenCoordinator()
    it.request("plain")
    assert not it.core.pending[Epoch(1)].terms.is_binding
    it.pending_stored(1)
    it.ack_all(1)
    it.manifest_stored(1)
    it.request("aligned", limit_ms=None)
    assert it.core.pending[Epoch(2)].terms.is_binding


# ------------------------------------------------------------------------------------------------- letting go


def test_a_pinned_epoch_is_kept_until_it_is_let_go_of() -> None:
    it = DrivenCoordinator(retain=1)
    it.complete(1)
    it.publish(1)
    it.pin(1)
    for epoch in (2, 3):
        it.complete(epoch)
        it.publish(epoch)
    assert it.released == [(2,)]
    assert it.core.min_epoch == 1
    assert it.core.pins == {1}
    it.unpin(1)
    assert it.released == [(2,), (1,)]
    assert it.core.min_epoch == 3


def test_pins_are_known_from_the_start() -> None:
    it = DrivenCoordinator(
        retain=1,
        pins=[1],
        complete=[complete_epoch(epoch, batch=epoch, previous=epoch - 1) for epoch in (1, 2, 3)],
        published={"table": 3, "raw": 3},
        last_epoch=3,
    )
    it.pass_ms(0)
    assert it.released == [(2,)]


def test_what_is_left_is_named() -> None:
    it = DrivenCoordinator(retain=2, sinks={})
    it.complete(1)
    it.pin(1)
    for epoch in (2, 3, 4):
        it.complete(epoch)
    (last,) = [action for action in it.actions if getattr(action, "drop", None)]
    assert getattr(last, "retained", None) == (1, 3, 4)


def test_an_epoch_goes_when_it_is_too_old_and_the_timer_is_set_for_it() -> None:
    it = DrivenCoordinator(retain=1, retain_ms=1_000, sinks={}, now_ms=10)
    it.complete(1)
    it.now_ms = 500
    it.complete(2)
    assert it.released == []
    assert it.next_deadline_ms() == 1_010
    it.now_ms = 1_009
    it.pass_ms(0)
    assert it.released == []
    it.pass_ms(1)
    assert it.released == [(1,)]
    assert it.next_deadline_ms() is None


def test_the_age_counts_from_when_the_manifest_says_that_it_was_completed() -> None:
    it = DrivenCoordinator(retain=1, retain_ms=1_000, sinks={}, now_ms=600)
    it.begin(1)
    it.ack_all(1)
    it.tell(ManifestStored(epoch=Epoch(1), completed_ms=400))
    it.complete(2)
    assert [item.completed_ms for item in it.core.complete] == [400, 600]
    assert it.next_deadline_ms() == 1_400


def test_the_age_is_known_from_the_start() -> None:
    it = DrivenCoordinator(
        retain=1,
        retain_ms=1_000,
        sinks={},
        complete=[complete_epoch(1, batch=0, completed_ms=400), complete_epoch(2, batch=0, previous=1)],
        last_epoch=2,
        now_ms=1_000,
    )
    assert it.next_deadline_ms() == 1_400


# ------------------------------------------------------------------------------------------------- strangers


def test_a_failure_of_an_operator_that_is_none_of_the_flows_aborts_nothing() -> None:
    it = DrivenCoordinator(pending=[stored_pending(1)])
    assert it.core.pending[Epoch(1)].state is EpochState.COLLECTING
    event = SnapshotFailed(operator=OperatorId("stranger"), epoch=Epoch(1), generation=it.core.generation, reason="?")
    it.tell(event)
    assert it.aborted == {}


# ------------------------------------------------------------------------------------------------- KNOWN BUGS


def test_a_new_sink_begins_although_an_old_epoch_is_pinned() -> None:
    """Epochs 2 and 3 were published everywhere and let go of, epoch 1 is pinned; then the flow gets another sink."""
    it = DrivenCoordinator(
        complete=[complete_epoch(1, batch=1), complete_epoch(4, batch=4, previous=3)],
        published={"raw": 4},
        pins=[1],
        last_epoch=4,
    )
    it.sink_committed("table", 1)
    assert it.permits("table")[-1].epoch == 4
