"""Which sink publishes which epoch next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.publishing import CompleteEpoch, Publisher
from tests.support.driven_coordinator import complete_epoch

TABLE, RAW = SinkId("table"), SinkId("raw")
SILENCE_MS = 10_000
ONE, TWO, THREE = complete_epoch(1, batch=4), complete_epoch(2, batch=4), complete_epoch(3, batch=9)


def publisher(**published: int) -> Publisher:
    return Publisher(
        FlowName("flow"),
        {TABLE: OperatorId("totals"), RAW: OperatorId("left")},
        {SinkId(name): Epoch(epoch) for name, epoch in published.items()},
        retry_ms=100,
        retry_limit_ms=350,
        silence_ms=SILENCE_MS,
    )


def due(publisher: Publisher, *complete: CompleteEpoch, now_ms: int = 0) -> Mapping[str, CommitPermit]:
    return {action.permit.sink: action.permit for action in publisher.due(complete, now_ms)}


def test_nothing_is_published_without_a_complete_epoch() -> None:
    assert due(publisher()) == {}


def test_every_sink_publishes_the_first_epoch_it_has_not() -> None:
    permits = due(publisher(table=1), ONE, TWO)
    assert {sink: permit.epoch for sink, permit in permits.items()} == {TABLE: 2, RAW: 1}


def test_a_permit_names_the_epochs_that_can_be_restored() -> None:
    permit = due(publisher(table=1, raw=3), ONE, TWO, complete_epoch(3, batch=9))[TABLE]
    assert (permit.epoch, permit.rewind_points) == (2, (1, 2, 3))


def test_a_permit_says_everything_about_its_epoch() -> None:
    assert due(publisher(table=2, raw=3), ONE, TWO, complete_epoch(3, batch=9, generation=5))[TABLE] == CommitPermit(
        flow=FlowName("flow"),
        operator=OperatorId("totals"),
        sink=TABLE,
        epoch=Epoch(3),
        generation=Generation(5),
        previous_epoch=Epoch(2),
        after_batch=BatchId(4),
        through_batch=BatchId(9),
    )


def test_the_first_epoch_covers_everything_from_the_first_batch() -> None:
    permit = due(publisher(), ONE)[TABLE]
    assert permit.previous_epoch == NO_EPOCH
    assert permit.after_batch == NO_BATCH
    assert permit.covers(BatchId(0))
    assert permit.covers(BatchId(4))
    assert not permit.covers(BatchId(5))


def test_an_epoch_without_a_new_batch_covers_nothing() -> None:
    permit = due(publisher(table=1), ONE, TWO)[TABLE]
    assert not any(permit.covers(BatchId(batch)) for batch in range(-1, 20))


def test_a_sink_publishes_one_epoch_at_a_time() -> None:
    sinks = publisher(raw=3)
    assert list(due(sinks, ONE, TWO, THREE)) == [TABLE]
    assert due(sinks, ONE, TWO, THREE) == {}
    sinks.committed(TABLE, Epoch(1))
    assert due(sinks, ONE, TWO, THREE)[TABLE].epoch == 2


def test_a_slow_sink_does_not_hold_up_the_other() -> None:
    sinks = publisher()
    due(sinks, ONE, TWO)
    sinks.committed(RAW, Epoch(1))
    assert {sink: permit.epoch for sink, permit in due(sinks, ONE, TWO).items()} == {RAW: 2}


def test_a_failed_commit_is_tried_again_with_doubling_pauses_up_to_a_limit() -> None:
    sinks, now_ms, pauses = publisher(raw=1), 0, []
    for attempt in range(5):
        (action,) = sinks.due([ONE], now_ms)
        assert action.attempt == attempt
        assert action.permit.epoch == 1
        sinks.failed(TABLE, Epoch(1), now_ms)
        (retry_at,) = sinks.deadlines_ms()
        assert sinks.due([ONE], retry_at - 1) == []
        pauses.append(retry_at - now_ms)
        now_ms = retry_at
    assert pauses == [100, 200, 350, 350, 350]


def test_a_commit_that_fails_for_years_still_has_a_pause() -> None:
    sinks, now_ms = publisher(raw=1), 0
    for _ in range(2_000):
        sinks.due([ONE], now_ms)
        sinks.failed(TABLE, Epoch(1), now_ms)
        (now_ms,) = sinks.deadlines_ms()
    assert now_ms < 2_000 * 350


def test_success_starts_the_count_of_tries_anew() -> None:
    sinks = publisher(raw=2)
    sinks.due([ONE], 0)
    sinks.failed(TABLE, Epoch(1), 0)
    sinks.due([ONE], 100)
    sinks.committed(TABLE, Epoch(1))
    (action,) = sinks.due([ONE, TWO], 100)
    assert action.attempt == 0


def test_a_retry_is_the_same_permit_even_when_later_epochs_are_complete() -> None:
    """The first try may have taken effect: the second must publish exactly the same."""
    sinks = publisher(raw=3)
    first = due(sinks, ONE)[TABLE]
    sinks.failed(TABLE, Epoch(1), 0)
    assert due(sinks, ONE, TWO, THREE, now_ms=100)[TABLE] == first


def test_a_late_repeat_of_an_old_outcome_changes_nothing() -> None:
    sinks = publisher(raw=2, table=1)
    due(sinks, ONE, TWO)
    sinks.committed(TABLE, Epoch(1))
    sinks.failed(TABLE, Epoch(1), 0)
    assert due(sinks, ONE, TWO) == {}
    assert sinks.published(TABLE) == 1
    assert sinks.deadlines_ms() == [SILENCE_MS]


def test_a_commit_heard_of_after_its_failure_leaves_no_timer() -> None:
    """With nothing left to publish, a deadline in the past would make the coordinator spin."""
    sinks = publisher(raw=1)
    due(sinks, ONE)
    sinks.failed(TABLE, Epoch(1), 0)
    sinks.committed(TABLE, Epoch(1))
    assert due(sinks, ONE, now_ms=500) == {}
    assert sinks.deadlines_ms() == []
    assert sinks.is_idle()


def test_published_never_goes_back() -> None:
    sinks = publisher(table=3)
    sinks.committed(TABLE, Epoch(1))
    assert sinks.published(TABLE) == 3


def test_sinks_are_idle_when_all_have_published_the_newest_epoch() -> None:
    sinks = publisher(table=1)
    due(sinks, ONE)
    assert not sinks.is_idle()
    sinks.committed(RAW, Epoch(1))
    assert sinks.is_idle()


def test_published_everywhere_is_what_the_slowest_sink_has() -> None:
    assert publisher(table=3, raw=1).published_everywhere([ONE, TWO, THREE]) == 1
    assert publisher(table=3).published_everywhere([ONE, TWO, THREE]) == NO_EPOCH


def test_without_sinks_every_complete_epoch_counts_as_published() -> None:
    nobody = Publisher(FlowName("flow"), {}, {}, retry_ms=1, retry_limit_ms=1, silence_ms=1)
    assert nobody.published_everywhere([ONE, TWO]) == 2
    assert nobody.published_everywhere([]) == NO_EPOCH
    assert nobody.is_idle()


def test_an_epoch_that_was_aborted_in_between_is_covered_by_the_next() -> None:
    permit = due(publisher(table=1, raw=3), ONE, THREE)[TABLE]
    assert permit.previous_epoch == 1
    assert [batch for batch in range(12) if permit.covers(BatchId(batch))] == [5, 6, 7, 8, 9]


def test_an_epoch_whose_predecessor_is_gone_says_itself_after_which_batch_it_begins() -> None:
    """Its operator's record names all that is staged, also what the epochs before it have published."""
    alone = replace(THREE, previous_epoch=Epoch(2), after_batches={OperatorId("totals"): BatchId(6)})
    permit = due(publisher(table=2, raw=3), alone)[TABLE]
    assert [batch for batch in range(12) if permit.covers(BatchId(batch))] == [7, 8, 9]
    # Behind a pinned epoch it is the same: those in between were published and are gone.
    permit = due(publisher(table=2, raw=3), ONE, alone)[TABLE]
    assert [batch for batch in range(12) if permit.covers(BatchId(batch))] == [7, 8, 9]


# ------------------------------------------------------------------------------------------------- silence, new lives


def test_a_sink_that_says_nothing_is_told_the_same_again() -> None:
    sinks = publisher(raw=2)
    (first,) = sinks.due([ONE], 0)
    assert sinks.deadlines_ms() == [SILENCE_MS]
    assert sinks.due([ONE, TWO], SILENCE_MS - 1) == []
    (again,) = sinks.due([ONE, TWO], SILENCE_MS)
    assert again == first
    assert sinks.deadlines_ms() == [2 * SILENCE_MS]


def test_silence_is_no_failure_and_lengthens_no_pause() -> None:
    sinks = publisher(raw=1)
    for now_ms in (0, SILENCE_MS, 2 * SILENCE_MS):
        (action,) = sinks.due([ONE], now_ms)
        assert action.attempt == 0
    sinks.failed(TABLE, Epoch(1), 2 * SILENCE_MS)
    assert sinks.deadlines_ms() == [2 * SILENCE_MS + 100]


def test_an_answer_after_the_silence_ends_it() -> None:
    sinks = publisher(raw=1)
    sinks.due([ONE], 0)
    sinks.due([ONE], SILENCE_MS)
    sinks.committed(TABLE, Epoch(1))
    assert sinks.deadlines_ms() == []
    assert sinks.due([ONE], 10 * SILENCE_MS) == []


def test_an_operator_that_begins_a_new_life_is_told_again_at_once() -> None:
    sinks = publisher()
    first = due(sinks, ONE)
    sinks.restarted(OperatorId("totals"), 50)
    assert due(sinks, ONE, now_ms=50) == {TABLE: first[TABLE]}


def test_a_new_life_does_not_shorten_the_pause_after_a_failure() -> None:
    sinks = publisher(raw=1)
    sinks.due([ONE], 0)
    sinks.failed(TABLE, Epoch(1), 0)
    sinks.restarted(OperatorId("totals"), 10)
    assert sinks.due([ONE], 99) == []
    assert len(sinks.due([ONE], 100)) == 1


def test_a_new_life_of_an_operator_whose_sinks_are_idle_changes_nothing() -> None:
    sinks = publisher(table=1, raw=1)
    sinks.restarted(OperatorId("totals"), 10)
    assert sinks.due([ONE], 10) == []
    assert sinks.deadlines_ms() == []


@given(
    st.lists(st.tuples(st.sampled_from(["complete", "done", "failed", "time", "restart", "old"]), st.integers(1, 3)))
)
def test_whatever_happens_a_sink_is_told_epochs_in_order_and_publishes_each_batch_once(
    steps: list[tuple[str, int]],
) -> None:
    """One sink; every word of it may be lost, late or repeated, and nothing is let go of."""
    sinks = Publisher(
        FlowName("flow"), {TABLE: OperatorId("totals")}, {}, retry_ms=100, retry_limit_ms=350, silence_ms=SILENCE_MS
    )
    complete: list[CompleteEpoch] = []
    told: list[CommitPermit] = []
    visible: dict[int, range] = {}
    now_ms = 0
    for what, number in steps:
        if what == "complete":
            epoch = complete[-1].epoch + number if complete else number
            previous = complete[-1].epoch if complete else 0
            complete.append(complete_epoch(epoch, batch=2 * epoch, previous=previous))
        elif what == "time":
            now_ms += number * SILENCE_MS // 2
        elif what == "restart":
            sinks.restarted(OperatorId("totals"), now_ms)
        elif told:
            permit = told[-1] if what != "old" else told[max(len(told) - number, 0)]
            if what != "failed":
                visible[permit.epoch] = range(permit.after_batch + 1, permit.through_batch + 1)
                sinks.committed(TABLE, permit.epoch)
            else:
                sinks.failed(TABLE, permit.epoch, now_ms)
        for action in sinks.due(complete, now_ms):
            assert not told or action.permit.epoch >= told[-1].epoch
            assert all(one == action.permit for one in told if one.epoch == action.permit.epoch), "the same again"
            assert all(item.epoch in visible for item in complete if item.epoch < action.permit.epoch), "in order"
            told.append(action.permit)
        assert all(deadline > now_ms for deadline in sinks.deadlines_ms()), "it would spin"
        assert sinks.is_idle() or sinks.deadlines_ms(), "nobody would ever tell it again"
    batches = [batch for epoch in sorted(visible) for batch in visible[epoch]]
    assert batches == list(range(len(batches)))


def test_an_epoch_publishes_nothing_that_one_before_it_has_published_whatever_its_manifest_says() -> None:
    """An earlier coordinator may have stored it without knowing of the one in between."""
    operator, sink = OperatorId("o"), SinkId("s")
    one, two, three = (
        CompleteEpoch(
            epoch=Epoch(number),
            generation=Generation(1),
            previous_epoch=Epoch(min(number - 1, 1)),
            batches={operator: BatchId(10 * number)},
            after_batches={operator: BatchId(after)},
        )
        for number, after in ((1, -1), (2, 10), (3, 10))
    )
    publisher = Publisher(FlowName("f"), {sink: operator}, {sink: Epoch(2)}, retry_ms=1, retry_limit_ms=1, silence_ms=1)
    (commit,) = publisher.due([one, two, three], 0)
    assert (commit.permit.after_batch, commit.permit.through_batch) == (20, 30)
