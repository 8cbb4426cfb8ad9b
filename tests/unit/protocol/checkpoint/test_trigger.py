"""When the next checkpoint begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import OperatorId
from cutline.protocol.checkpoint.trigger import TriggerPolicy, TriggerSettings
from cutline.protocol.messages.wire import ProgressMade


def policy(interval_ms: int = 0, *, first_ms: int = 0, min_pause_ms: int = 0, max_concurrent: int = 1) -> TriggerPolicy:
    settings = TriggerSettings(interval_ms=interval_ms, min_pause_ms=min_pause_ms, max_concurrent=max_concurrent)
    return TriggerPolicy(settings, first_ms=first_ms)


def test_without_an_interval_the_timer_never_asks() -> None:
    trigger = policy(interval_ms=0)
    assert trigger.next_due_ms(10**12, pending=0) is None
    assert not trigger.is_due(10**12, pending=0)


def test_the_timer_waits_for_its_first_time() -> None:
    trigger = policy(interval_ms=100, first_ms=400)
    assert not trigger.is_due(499, pending=0)
    assert trigger.is_due(500, pending=0)
    assert trigger.next_due_ms(0, pending=0) == 500


def test_the_interval_counts_from_start_to_start() -> None:
    trigger = policy(interval_ms=100)
    trigger.started(1_000)
    trigger.ended(1_030)
    assert trigger.next_due_ms(1_030, pending=0) == 1_100


def test_the_pause_counts_from_the_end() -> None:
    trigger = policy(interval_ms=100, min_pause_ms=50)
    trigger.started(1_000)
    trigger.ended(1_090)
    assert not trigger.is_due(1_139, pending=0)
    assert trigger.is_due(1_140, pending=0)


def test_a_short_pause_never_shortens_the_interval() -> None:
    trigger = policy(interval_ms=100, min_pause_ms=10)
    trigger.started(1_000)
    trigger.ended(1_020)
    assert not trigger.is_due(1_099, pending=0)


def test_no_more_than_the_allowed_number_run_at_once() -> None:
    trigger = policy(interval_ms=1, max_concurrent=2)
    assert trigger.has_room(1)
    assert not trigger.has_room(2)
    assert not trigger.is_due(10**9, pending=2)


# ------------------------------------------------------------------------------------------------- progress


def progress(
    operator: str = "source",
    *,
    is_source: bool = True,
    batches: int = 0,
    rows: int = 0,
    watermark_ms: int = 0,
    is_without_room: bool = False,
) -> ProgressMade:
    return ProgressMade(
        operator=OperatorId(operator),
        is_source=is_source,
        batches=batches,
        rows=rows,
        watermark_ms=watermark_ms,
        is_without_room=is_without_room,
    )


def test_every_so_many_batches_of_the_sources() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, every_batches=3))
    trigger.progressed(progress("left", batches=2))
    assert not trigger.is_due(0, pending=0)
    assert trigger.next_due_ms(0, pending=0) is None
    trigger.progressed(progress("right", batches=1))
    assert trigger.is_due(0, pending=0)
    assert trigger.next_due_ms(7, pending=0) == 7
    trigger.started(0)
    assert not trigger.is_due(0, pending=0)


def test_every_so_many_rows_of_the_sources() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, every_rows=100))
    trigger.progressed(progress(rows=99, batches=50))
    assert not trigger.is_due(0, pending=0)
    trigger.progressed(progress(rows=1))
    assert trigger.is_due(0, pending=0)
    trigger.started(0)
    trigger.progressed(progress(rows=99))
    assert not trigger.is_due(0, pending=0)


def test_what_is_done_behind_the_sources_is_not_counted() -> None:
    """The same rows would count once for every operator that they pass."""
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, every_batches=1, every_rows=1))
    trigger.progressed(progress("totals", is_source=False, batches=9, rows=9))
    assert not trigger.is_due(0, pending=0)


def test_what_is_counted_while_a_checkpoint_runs_counts_for_the_next() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, every_batches=2))
    trigger.progressed(progress(batches=2))
    trigger.started(0)
    trigger.progressed(progress(batches=2))
    assert not trigger.is_due(0, pending=1)
    assert trigger.next_due_ms(0, pending=1) is None
    trigger.ended(50)
    assert trigger.is_due(50, pending=0)


def test_the_pause_holds_for_progress_too() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, every_batches=1, min_pause_ms=100))
    trigger.started(0)
    trigger.ended(50)
    trigger.progressed(progress(batches=1))
    assert not trigger.is_due(149, pending=0)
    assert trigger.next_due_ms(60, pending=0) == 150
    assert trigger.is_due(150, pending=0)


# ------------------------------------------------------------------------------------------------- event time


# ---------------------------------------------------------------------- the first checkpoint of a new flow

LEDGER, TOTALS = OperatorId("ledger"), OperatorId("totals")


def of_new_flow(**settings: int) -> TriggerPolicy:
    return TriggerPolicy(TriggerSettings(**{"interval_ms": 10_000, **settings}), awaited={LEDGER, TOTALS})


def ran(operator: OperatorId, batches: int = 1, rows: int = 5) -> ProgressMade:
    return ProgressMade(operator=operator, is_source=False, batches=batches, rows=rows if batches else 0)


def test_a_new_flow_begins_its_first_checkpoint_when_every_sink_has_something_to_publish() -> None:
    trigger = of_new_flow()
    trigger.progressed(ran(LEDGER))
    trigger.progressed(ran(LEDGER))
    assert not trigger.is_due(500, 0)
    trigger.progressed(ran(TOTALS, batches=0))  # only its channel has become free
    assert not trigger.is_due(500, 0) and trigger.next_due_ms(500, 0) == 10_000
    trigger.progressed(ran(TOTALS, rows=0))  # the batch with which a query begins before its input is there
    assert not trigger.is_due(500, 0)
    trigger.progressed(ran(TOTALS))
    assert trigger.is_due(600, 0) and trigger.next_due_ms(600, 0) == 600


def test_after_the_first_checkpoint_only_the_timer_counts() -> None:
    trigger = of_new_flow()
    trigger.progressed(ran(LEDGER))
    trigger.progressed(ran(TOTALS))
    trigger.started(600)
    trigger.progressed(ran(LEDGER))
    trigger.progressed(ran(TOTALS))
    assert not trigger.is_due(10_599, 0) and trigger.is_due(10_600, 0)


def test_a_first_batch_that_takes_long_does_not_delay_the_timer() -> None:
    trigger = of_new_flow()
    trigger.progressed(ran(LEDGER))
    assert trigger.is_due(10_000, 0)
    trigger.started(10_000)
    assert not trigger.is_due(10_100, 0)
    trigger.progressed(ran(TOTALS))
    assert trigger.is_due(10_200, 0), "the checkpoint of the timer had nothing to publish"
    trigger.started(10_200)
    assert not trigger.is_due(20_199, 0) and trigger.is_due(20_200, 0)


def test_a_flow_without_a_timer_begins_no_checkpoint_by_itself() -> None:
    trigger = of_new_flow(interval_ms=0)
    trigger.progressed(ran(LEDGER))
    trigger.progressed(ran(TOTALS))
    assert not trigger.is_due(1_000_000, 0) and trigger.next_due_ms(1_000_000, 0) is None


def test_a_flow_that_has_a_checkpoint_waits_for_the_timer() -> None:
    trigger = policy(10_000)
    trigger.progressed(ran(LEDGER))
    assert not trigger.is_due(9_999, 0)


def hourly() -> TriggerPolicy:
    return TriggerPolicy(TriggerSettings(interval_ms=0, event_time_ms=1_000))


def test_a_boundary_of_event_time_counts_when_all_watermarks_have_passed_it() -> None:
    trigger = hourly()
    trigger.progressed(progress("a", watermark_ms=100))
    trigger.progressed(progress("b", watermark_ms=200))
    trigger.progressed(progress("a", watermark_ms=5_000))
    assert not trigger.is_due(0, pending=0)
    trigger.progressed(progress("b", watermark_ms=999))
    assert not trigger.is_due(0, pending=0)
    trigger.progressed(progress("b", watermark_ms=1_000))
    assert trigger.is_due(0, pending=0)


def test_where_event_time_stands_at_the_start_is_no_boundary_that_was_passed() -> None:
    trigger = hourly()
    trigger.progressed(progress("a", watermark_ms=123_456))
    assert not trigger.is_due(0, pending=0)


def test_one_checkpoint_covers_all_boundaries_that_were_passed() -> None:
    trigger = hourly()
    trigger.progressed(progress("a", watermark_ms=1))
    trigger.progressed(progress("a", watermark_ms=5_500))
    assert trigger.is_due(0, pending=0)
    trigger.started(0)
    trigger.progressed(progress("a", watermark_ms=5_999))
    assert not trigger.is_due(0, pending=0)
    trigger.progressed(progress("a", watermark_ms=6_000))
    assert trigger.is_due(0, pending=0)


def test_a_watermark_never_falls() -> None:
    trigger = hourly()
    trigger.progressed(progress("a", watermark_ms=1))
    trigger.progressed(progress("a", watermark_ms=1_000))
    trigger.progressed(progress("a", watermark_ms=5))
    assert trigger.is_due(0, pending=0)


def test_an_operator_without_a_watermark_holds_nothing_up() -> None:
    trigger = hourly()
    trigger.progressed(progress("a", watermark_ms=1))
    trigger.progressed(progress("b", watermark_ms=0))
    trigger.progressed(progress("a", watermark_ms=1_000))
    assert trigger.is_due(0, pending=0)


def test_without_the_setting_watermarks_trigger_nothing() -> None:
    trigger = policy()
    for watermark_ms in (1, 10**9):
        trigger.progressed(progress("a", watermark_ms=watermark_ms))
    assert not trigger.is_due(0, pending=0)


# ------------------------------------------------------------------------------------------------- backlog


def test_while_a_channel_has_no_room_the_timer_takes_its_time() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=100, backlog_interval_ms=1_000))
    trigger.progressed(progress("a", is_without_room=True))
    trigger.progressed(progress("b", is_without_room=True))
    assert trigger.next_due_ms(0, pending=0) == 1_000
    trigger.progressed(progress("a"))
    assert not trigger.is_due(999, pending=0)
    trigger.progressed(progress("b"))
    assert trigger.next_due_ms(0, pending=0) == 100


def test_the_backlog_interval_never_makes_the_timer_faster() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=100, backlog_interval_ms=10))
    trigger.progressed(progress("a", is_without_room=True))
    assert trigger.next_due_ms(0, pending=0) == 100


def test_the_backlog_interval_starts_no_timer_of_its_own() -> None:
    trigger = TriggerPolicy(TriggerSettings(interval_ms=0, backlog_interval_ms=10))
    trigger.progressed(progress("a", is_without_room=True))
    assert trigger.next_due_ms(0, pending=0) is None


def test_progress_is_asked_for_only_when_a_trigger_needs_it() -> None:
    assert not TriggerSettings(interval_ms=100, min_pause_ms=5, max_concurrent=3).needs_progress()
    for setting in ("every_batches", "every_rows", "event_time_ms", "backlog_interval_ms"):
        assert TriggerSettings(interval_ms=0, **{setting: 1}).needs_progress()


# ------------------------------------------------------------------------------------------------- any history

happenings = st.one_of(
    st.tuples(st.just("batches"), st.integers(1, 3)),
    st.tuples(st.just("rows"), st.integers(1, 50)),
    st.tuples(st.just("watermark a"), st.integers(1, 500)),
    st.tuples(st.just("watermark b"), st.integers(1, 500)),
    st.tuples(st.sampled_from(["full", "free", "begin", "end"]), st.just(0)),
    st.tuples(st.just("time"), st.integers(1, 150)),
)


@given(
    settings=st.builds(
        TriggerSettings,
        interval_ms=st.sampled_from([0, 100]),
        min_pause_ms=st.sampled_from([0, 30]),
        max_concurrent=st.integers(1, 2),
        every_batches=st.sampled_from([0, 4]),
        every_rows=st.sampled_from([0, 60]),
        event_time_ms=st.sampled_from([0, 100]),
        backlog_interval_ms=st.sampled_from([0, 300]),
    ),
    history=st.lists(happenings, max_size=30),
)
def test_the_timer_is_set_for_the_very_moment_when_a_checkpoint_becomes_due(
    settings: TriggerSettings, history: list[tuple[str, int]]
) -> None:
    """Too late would miss it, too early would make the coordinator spin."""
    trigger, now_ms, pending = TriggerPolicy(settings), 0, 0
    for what, number in history:
        match what:
            case "batches":
                trigger.progressed(progress(batches=number))
            case "rows":
                trigger.progressed(progress(rows=number))
            case "watermark a" | "watermark b":
                trigger.progressed(progress(what, watermark_ms=number))
            case "full" | "free":
                trigger.progressed(progress(is_without_room=what == "full"))
            case "begin" if pending < settings.max_concurrent:
                pending += 1
                trigger.started(now_ms)
                assert not trigger.is_due(now_ms, pending)
            case "end" if pending:
                pending -= 1
                trigger.ended(now_ms)
                assert not settings.min_pause_ms or not trigger.is_due(now_ms + settings.min_pause_ms - 1, pending)
            case "time":
                now_ms += number
            case _:
                pass
        due_ms = trigger.next_due_ms(now_ms, pending)
        if due_ms is None:
            assert not trigger.is_due(10**9, pending)
        else:
            assert due_ms == now_ms or not trigger.is_due(due_ms - 1, pending)
            assert trigger.is_due(max(due_ms, now_ms), pending)
            assert trigger.is_due(now_ms, pending) == (due_ms <= now_ms)
