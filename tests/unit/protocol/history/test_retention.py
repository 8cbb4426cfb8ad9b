"""Which complete checkpoints stay, and what they hold on to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.history.retention import (
    EpochNeeds,
    RetentionPolicy,
    Rung,
    flow_time_ms,
    truncation_points,
    unreachable,
)
from cutline.protocol.publish.publishing import CompleteEpoch
from tests.support.driven_coordinator import complete_epoch


def complete(**completed_ms: int) -> list[CompleteEpoch]:
    """complete(e1=0, e2=100): when each epoch was completed."""
    return [complete_epoch(int(name[1:]), batch=0, completed_ms=at) for name, at in completed_ms.items()]


def dropped(
    policy: RetentionPolicy,
    epochs: list[CompleteEpoch],
    *,
    published: int = 10**6,
    pins: tuple[int, ...] = (),
    now_ms: int = 0,
) -> list[int]:
    return list(
        policy.expendable(
            epochs, published_everywhere=Epoch(published), pins=[Epoch(pin) for pin in pins], now_ms=now_ms
        )
    )


THREE = complete(e1=0, e2=100, e3=200)


def test_the_newest_stay() -> None:
    assert dropped(RetentionPolicy(count=2), THREE) == [1]
    assert dropped(RetentionPolicy(count=3), THREE) == []
    assert dropped(RetentionPolicy(count=9), THREE) == []


def test_what_is_younger_stays_too() -> None:
    policy = RetentionPolicy(count=1, age_ms=1_000)
    assert dropped(policy, THREE, now_ms=999) == []
    assert dropped(policy, THREE, now_ms=1_000) == [1]
    assert dropped(policy, THREE, now_ms=1_100) == [1, 2]


LADDER = RetentionPolicy(
    count=3,
    ladder=(
        Rung(until_ms=10_000, every_ms=0),
        Rung(until_ms=100_000, every_ms=10_000),
        Rung(until_ms=1_000_000, every_ms=100_000),
    ),
)


@given(st.lists(st.integers(200, 3_000), min_size=1_200, max_size=1_200))
@settings(max_examples=5, deadline=None)
def test_a_ladder_keeps_some_of_every_age_and_not_many(pauses_ms: list[int]) -> None:
    epochs: list[CompleteEpoch] = []
    now_ms = 12_345_678
    for number, pause_ms in enumerate(pauses_ms, 1):
        now_ms += pause_ms
        epochs.append(complete_epoch(number, batch=0, completed_ms=now_ms))
        gone = dropped(LADDER, epochs, now_ms=now_ms)
        epochs = [one for one in epochs if one.epoch not in gone]
    ages = sorted(now_ms - one.completed_ms for one in epochs)
    oldest = now_ms - 12_345_678
    for until_ms, every_ms in ((10_000, 3_000), (100_000, 10_000), (1_000_000, 100_000)):
        # Whatever the moment that somebody wants to go back to, a checkpoint is not much further.
        for wanted in range(0, min(until_ms, oldest) - 2 * every_ms, every_ms):
            assert any(wanted <= age <= wanted + 2 * every_ms + 3_000 for age in ages), (wanted, ages)
    assert len(epochs) <= 10_000 // 200 + 12 + 12


def test_a_ladder_lets_go_when_an_age_is_reached() -> None:
    policy = RetentionPolicy(count=1, ladder=(Rung(until_ms=100, every_ms=0), Rung(until_ms=1_000, every_ms=500)))
    epochs = complete(e1=500, e2=510, e3=990, e4=1_000, e5=1_010)
    assert dropped(policy, epochs, now_ms=1_010) == [2]
    assert dropped(policy, epochs, now_ms=1_090) == [2, 3]
    assert policy.next_expiry_ms(epochs, (), 1_010) == 1_090
    assert dropped(policy, epochs, now_ms=1_100) == [2, 3], "the first of its slot"
    assert dropped(policy, [*epochs, *complete(e6=1_100, e7=1_600)], now_ms=2_050) == [1, 2, 3, 4, 5]


def test_a_clock_that_was_set_back_keeps_all() -> None:
    assert dropped(LADDER, THREE, now_ms=-(10**9)) == []


YEAR_MS = 365 * 86_400_000
PAUSING = replace(LADDER, pause_ms=5_000)


def living(clock: Iterable[int], before: Sequence[CompleteEpoch] = ()) -> Iterator[list[CompleteEpoch]]:
    """Completes an epoch at each moment of the clock, and releases what may go; what is left each time."""
    left = list(before)
    for now_ms in clock:
        newest = left[-1] if left else None
        flow_ms = flow_time_ms(newest, now_ms, PAUSING.pause_ms)
        number = newest.epoch + 1 if newest else 1
        left.append(replace(complete_epoch(number, batch=0, completed_ms=now_ms), flow_ms=flow_ms))
        gone = dropped(PAUSING, left, now_ms=now_ms)
        left = [one for one in left if one.epoch not in gone]
        yield list(left)


def run_for(duration_ms: int, *, at_ms: int, before: Sequence[CompleteEpoch] = ()) -> list[CompleteEpoch]:
    *_, left = living(range(at_ms, at_ms + duration_ms, 1_000), before)
    return left


@pytest.mark.parametrize("jump_ms", [20_000, 90_000, 600_000, 999_000, 1_001_000, YEAR_MS, -90_000, -YEAR_MS])
def test_neither_a_pause_nor_a_jump_of_the_clock_takes_the_history(jump_ms: int) -> None:
    """Whether the flow has stood still for a year, or its host only believes so, cannot be told apart."""
    before = run_for(900_000, at_ms=YEAR_MS)
    now_ms = before[-1].completed_ms + jump_ms
    assert len(before) > 25
    after_a_pause = dropped(PAUSING, before, now_ms=now_ms)
    assert set(after_a_pause) == set(dropped(PAUSING, before, now_ms=before[-1].completed_ms + min(jump_ms, 5_000)))
    states = living(range(now_ms, now_ms + 1_200_000, 1_000), before)
    ages = [next(states)[-1].moment_ms - before[0].moment_ms for _ in range(3)]
    assert ages[0] <= 905_000
    *_, left = states
    assert left[0].epoch > before[-1].epoch, "and it does not stay for ever"


def test_what_former_versions_completed_ages_as_it_did() -> None:
    """They knew no other time than the clock's."""
    before = complete(e1=100_000, e2=205_000, e3=1_000_000, e4=1_001_000)
    after = run_for(10_000, at_ms=1_002_000, before=before)
    assert [one.moment_ms for one in after] == [one.completed_ms for one in after]


def test_the_timer_is_not_set_for_what_only_a_next_checkpoint_can_make_too_old() -> None:
    epochs = complete(e1=0, e2=1_000, e3=2_000, e4=3_000)
    assert LADDER.next_expiry_ms(epochs, (), 3_000) == 10_000
    assert PAUSING.next_expiry_ms(epochs, (), 3_000) is None
    assert replace(PAUSING, pause_ms=7_000).next_expiry_ms(epochs, (), 3_000) == 10_000


def test_only_the_newest_need_the_logs() -> None:
    policy = RetentionPolicy(count=1, ladder=(Rung(until_ms=10**9, every_ms=0),))
    assert policy.detachable(THREE, published_everywhere=Epoch(9)) == (1, 2)
    assert policy.detachable(THREE, published_everywhere=Epoch(2)) == (1,), "a sink has yet to publish the others"
    alone = RetentionPolicy(count=1, detaches=False)
    assert alone.detachable(THREE, published_everywhere=Epoch(9)) == ()


def test_the_count_stays_however_old() -> None:
    assert dropped(RetentionPolicy(count=2, age_ms=1), THREE, now_ms=10**9) == [1]


def test_pinned_ones_stay() -> None:
    assert dropped(RetentionPolicy(count=1), THREE, pins=(1,)) == [2]


def test_what_is_not_published_everywhere_stays_and_so_does_the_newest_that_is() -> None:
    policy = RetentionPolicy(count=1)
    assert dropped(policy, THREE, published=0) == []
    assert dropped(policy, THREE, published=1) == []
    assert dropped(policy, THREE, published=2) == [1]


def test_the_timer_is_set_for_the_next_one_to_grow_too_old() -> None:
    policy = RetentionPolicy(count=1, age_ms=1_000)
    assert policy.next_expiry_ms(THREE, [], 0) == 1_000
    assert policy.next_expiry_ms(THREE, [Epoch(1)], 0) == 1_100
    assert policy.next_expiry_ms(THREE, [], 1_000) == 1_100
    assert policy.next_expiry_ms(THREE, [], 1_100) is None
    assert policy.next_expiry_ms(THREE[:1], [], 0) is None
    assert RetentionPolicy(count=1).next_expiry_ms(THREE, [], 0) is None


histories = st.lists(st.integers(1, 30), unique=True, max_size=8).flatmap(
    lambda epochs: st.tuples(*(st.tuples(st.just(epoch), st.integers(0, 100)) for epoch in sorted(epochs)))
)


@given(
    history=histories,
    count=st.integers(1, 4),
    age_ms=st.none() | st.integers(0, 60),
    published=st.integers(0, 31),
    pins=st.sets(st.integers(1, 30), max_size=4),
    now_ms=st.integers(0, 200),
)
def test_an_epoch_goes_exactly_when_nothing_holds_it(
    *,
    history: tuple[tuple[int, int], ...],
    count: int,
    age_ms: int | None,
    published: int,
    pins: set[int],
    now_ms: int,
) -> None:
    epochs = [complete_epoch(epoch, batch=0, completed_ms=at) for epoch, at in history]
    policy = RetentionPolicy(count=count, age_ms=age_ms)
    gone = dropped(policy, epochs, published=published, pins=tuple(pins), now_ms=now_ms)
    # The flow's time does not go back behind its newest checkpoint.
    flow_ms = max([now_ms, *(at for _, at in history[-1:])])
    for epoch, completed_ms in history:
        is_held = (
            sum(1 for other, _ in history if other > epoch) < count
            or (age_ms is not None and flow_ms < completed_ms + age_ms)
            or epoch in pins
            or epoch >= published
        )
        assert (epoch in gone) == (not is_held)
    assert gone == sorted(set(gone))
    # What is left is settled: the same question once more changes nothing, and the timer is not in the past.
    left = [item for item in epochs if item.epoch not in gone]
    assert dropped(policy, left, published=published, pins=tuple(pins), now_ms=now_ms) == []
    expiry = policy.next_expiry_ms(left, [Epoch(pin) for pin in pins], now_ms)
    assert expiry is None or expiry > now_ms


@given(
    history=histories, count=st.integers(1, 3), age_ms=st.integers(0, 60), pins=st.sets(st.integers(1, 30), max_size=4)
)
def test_following_the_timer_lets_go_of_everything_that_time_alone_lets_go_of(
    history: tuple[tuple[int, int], ...], count: int, age_ms: int, pins: set[int]
) -> None:
    left = [complete_epoch(epoch, batch=0, completed_ms=at) for epoch, at in history]
    policy, held, now_ms = RetentionPolicy(count=count, age_ms=age_ms), [Epoch(pin) for pin in pins], 0
    for _ in range(len(history) + 1):
        gone = dropped(policy, left, pins=tuple(pins), now_ms=now_ms)
        left = [item for item in left if item.epoch not in gone]
        now_ms = policy.next_expiry_ms(left, held, now_ms) or now_ms
    assert dropped(policy, left, pins=tuple(pins), now_ms=10**9) == []


# ------------------------------------------------------------------------------------------------- channels


A, B, C = OperatorId("a"), OperatorId("b"), OperatorId("c")
#: a ── b ── c
TOUCHED_BY = {A: {A, B}, B: {B, C}, C: {C}}


def needs(*operators: OperatorId, **positions: int) -> EpochNeeds:
    return EpochNeeds(operators=operators, channels={OperatorId(name): Position(at) for name, at in positions.items()})


def test_a_restore_reads_what_is_in_flight_and_the_barrier() -> None:
    barriers = {A: Position(9), B: Position(3)}
    found = EpochNeeds.of(barriers, [{A: Position(4)}, {A: Position(7)}])
    assert found == EpochNeeds(operators=frozenset({A, B}), channels={A: Position(4), B: Position(3)})


def test_an_operator_alone_needs_its_own_log_from_its_barrier_and_its_inputs_from_where_it_reads() -> None:
    found = EpochNeeds.of({B: Position(9)}, [{A: Position(4)}])
    assert found == EpochNeeds(operators=frozenset({B}), channels={A: Position(4), B: Position(9)})


def test_a_channel_is_kept_from_the_lowest_place_that_a_retained_epoch_needs() -> None:
    retained = [needs(A, B, C, a=7, b=3, c=1), needs(A, B, C, a=5, b=9, c=2)]
    assert truncation_points(retained, TOUCHED_BY) == {A: 5, B: 3, C: 1}


def test_a_channel_that_somebody_without_a_snapshot_writes_or_reads_is_not_touched() -> None:
    assert truncation_points([needs(B, a=4, b=9)], TOUCHED_BY) == {}
    assert truncation_points([needs(B, a=4, b=9), needs(A, a=6)], TOUCHED_BY) == {A: 4}
    assert truncation_points([needs(B, a=4, b=9), needs(C, b=2, c=8)], TOUCHED_BY) == {B: 2, C: 8}


def test_without_a_retained_epoch_nothing_goes() -> None:
    """A flow without a checkpoint starts again from the beginning."""
    assert truncation_points([], TOUCHED_BY) == {}


@given(
    retained=st.lists(
        st.builds(
            EpochNeeds,
            operators=st.sets(st.sampled_from([A, B, C])),
            channels=st.fixed_dictionaries({name: st.integers(0, 20).map(Position) for name in (A, B, C)}),
        ),
        max_size=4,
    )
)
def test_no_retained_epoch_loses_an_entry_and_no_needless_one_stays(retained: list[EpochNeeds]) -> None:
    points = truncation_points(retained, TOUCHED_BY)
    covered = {operator for need in retained for operator in need.operators}
    for channel, operators in TOUCHED_BY.items():
        if operators <= covered:
            assert all(points[channel] <= need.channels[channel] for need in retained)
            assert any(points[channel] == need.channels[channel] for need in retained)
        else:
            assert channel not in points


# ------------------------------------------------------------------------------------------------- content


def test_content_goes_when_nobody_reaches_or_claims_it() -> None:
    assert unreachable(["a", "b", "c", "d"], [{"a"}, {"b", "x"}], {"c"}) == {"d"}


@given(
    stored=st.sets(st.sampled_from("abcdef")),
    reached=st.lists(st.sets(st.sampled_from("abcdef")), max_size=4),
    claimed=st.sets(st.sampled_from("abcdef")),
)
def test_nothing_that_is_reached_or_claimed_ever_goes_and_nothing_else_stays(
    stored: set[str], reached: list[set[str]], claimed: set[str]
) -> None:
    gone = unreachable(iter(stored), iter(reached), claimed)
    held = claimed.union(*reached)
    assert gone == {content for content in stored if content not in held}
