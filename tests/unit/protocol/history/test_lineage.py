"""Whose entry stands at which place of a log, after any number of forks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.errors import InvariantViolation
from cutline.model.ids import Generation, Position
from cutline.protocol.history.lineage import Lineage, Span

FIRST = Lineage.begin(Generation(1))


def owners(lineage: Lineage, end: int) -> list[int]:
    return [lineage.owner(Position(seq)) for seq in range(end)]


def test_a_new_log_belongs_to_its_first_generation() -> None:
    assert owners(FIRST, 3) == [1, 1, 1]
    assert FIRST.generation == 1


def test_a_fork_leaves_what_is_before_it_and_takes_what_is_after() -> None:
    assert owners(FIRST.fork(Generation(2), Position(2)), 5) == [1, 1, 2, 2, 2]


def test_a_fork_behind_an_earlier_fork_gives_up_what_that_one_wrote() -> None:
    lineage = FIRST.fork(Generation(2), Position(4)).fork(Generation(3), Position(2))
    assert owners(lineage, 6) == [1, 1, 3, 3, 3, 3]
    assert [span.generation for span in lineage.spans] == [1, 3]


def test_a_log_that_begins_later_shows_nothing_of_what_lies_before() -> None:
    lineage = Lineage(spans=(Span(Generation(2), Position(3)),)).fork(Generation(4), Position(5))
    assert not lineage.shows(Generation(1), Position(2))
    assert lineage.shows(Generation(2), Position(3))
    assert not lineage.shows(Generation(2), Position(5))
    assert lineage.shows(Generation(4), Position(5))


def test_a_generation_that_wrote_nothing_leaves_no_span() -> None:
    lineage = FIRST.fork(Generation(2), Position(4)).fork(Generation(3), Position(4))
    assert lineage.spans == (Span(Generation(1), Position(0)), Span(Generation(3), Position(4)))


def test_a_fork_at_the_start_gives_up_everything() -> None:
    assert FIRST.fork(Generation(9), Position(0)) == Lineage.begin(Generation(9))


def test_a_fork_changes_nothing_about_the_lineage_it_came_from() -> None:
    FIRST.fork(Generation(2), Position(1))
    assert owners(FIRST, 3) == [1, 1, 1]


@pytest.mark.parametrize("generation", [0, 1])
def test_only_a_newer_generation_may_fork(generation: int) -> None:
    with pytest.raises(InvariantViolation):
        FIRST.fork(Generation(generation), Position(3))


def test_ranges_are_where_each_generation_is_visible() -> None:
    lineage = FIRST.fork(Generation(2), Position(3)).fork(Generation(5), Position(7))
    assert list(lineage.ranges()) == [(1, 0, 3), (2, 3, 7), (5, 7, None)]


def test_a_place_before_the_lineage_belongs_to_nobody() -> None:
    with pytest.raises(InvariantViolation):
        Lineage(spans=(Span(Generation(1), Position(5)),)).owner(Position(4))


def test_a_lineage_comes_back_from_its_stored_form() -> None:
    lineage = FIRST.fork(Generation(2), Position(3))
    assert msgspec.json.decode(msgspec.json.encode(lineage), type=Lineage) == lineage


@given(st.lists(st.integers(0, 30), max_size=12))
def test_after_any_forks_every_place_has_the_last_generation_that_forked_at_or_below_it(forks: list[int]) -> None:
    lineage, expected = FIRST, [1] * 40
    for number, at in enumerate(forks, 2):
        lineage = lineage.fork(Generation(number), Position(at))
        expected = expected[:at] + [number] * (40 - at)
        assert owners(lineage, 40) == expected
        assert lineage.generation == number
        visible = {
            seq: generation
            for generation, first, end in lineage.ranges()
            for seq in range(first, 40 if end is None else end)
        }
        assert visible == dict(enumerate(expected))
        generations = [span.generation for span in lineage.spans]
        starts = [span.start for span in lineage.spans]
        assert generations == sorted(set(generations))
        assert starts == sorted(set(starts))


def test_lineages_part_where_they_first_show_another_generation() -> None:
    first = Lineage.begin(Generation(1))
    second = first.fork(Generation(2), Position(8))
    third = second.fork(Generation(3), Position(12))
    assert first.parts_from(first) is None
    assert first.parts_from(second) == second.parts_from(first) == 8
    assert first.parts_from(third) == 8
    assert second.parts_from(third) == 12
    assert third.parts_from(second.fork(Generation(4), Position(5))) == 5


def test_what_only_one_lineage_reaches_back_to_does_not_part_them() -> None:
    later = Lineage(spans=(Span(Generation(1), Position(5)), Span(Generation(2), Position(7))))
    assert Lineage.begin(Generation(1)).fork(Generation(2), Position(7)).parts_from(later) is None
    assert Lineage.begin(Generation(3)).parts_from(later) == 5
