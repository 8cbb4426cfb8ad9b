"""When the next checkpoint begins."""

from __future__ import annotations

from cutline.protocol.messages import CheckpointRequested
from cutline.protocol.trigger import POSTPONED_LIMIT, TriggerPolicy


def test_without_an_interval_the_timer_never_asks() -> None:
    trigger = TriggerPolicy(interval_ms=0)
    assert not trigger.is_timed()
    assert not trigger.is_due(10**12, pending=0)


def test_the_timer_waits_for_its_first_time() -> None:
    trigger = TriggerPolicy(interval_ms=100, first_ms=500)
    assert not trigger.is_due(499, pending=0)
    assert trigger.is_due(500, pending=0)
    assert trigger.next_due_ms(pending=0) == 500


def test_the_interval_counts_from_start_to_start() -> None:
    trigger = TriggerPolicy(interval_ms=100)
    trigger.started(1_000)
    trigger.ended(1_030)
    assert trigger.next_due_ms(pending=0) == 1_100


def test_the_pause_counts_from_the_end() -> None:
    trigger = TriggerPolicy(interval_ms=100, min_pause_ms=50)
    trigger.started(1_000)
    trigger.ended(1_090)
    assert not trigger.is_due(1_139, pending=0)
    assert trigger.is_due(1_140, pending=0)


def test_a_short_pause_never_shortens_the_interval() -> None:
    trigger = TriggerPolicy(interval_ms=100, min_pause_ms=10)
    trigger.started(1_000)
    trigger.ended(1_020)
    assert not trigger.is_due(1_099, pending=0)


def test_no_more_than_the_allowed_number_run_at_once() -> None:
    trigger = TriggerPolicy(interval_ms=1, max_concurrent=2)
    assert trigger.has_room(1)
    assert not trigger.has_room(2)
    assert not trigger.is_due(10**9, pending=2)


def test_postponed_requests_come_back_once_and_in_order() -> None:
    trigger = TriggerPolicy(interval_ms=0)
    for name in ("first", "second"):
        assert trigger.postpone(CheckpointRequested(request=name))
    assert [request.request for request in trigger.take_postponed()] == ["first", "second"]
    assert trigger.take_postponed() == []


def test_one_request_too_many_is_refused() -> None:
    trigger = TriggerPolicy(interval_ms=0)
    for number in range(POSTPONED_LIMIT):
        assert trigger.postpone(CheckpointRequested(request=str(number)))
    assert not trigger.postpone(CheckpointRequested(request="one more"))
    assert len(trigger.take_postponed()) == POSTPONED_LIMIT
