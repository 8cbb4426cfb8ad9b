"""Options and ranges that the sources in Python share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.connectors.source_options import most_per_batch, needed, ranges_of, refuse_lost, start_of, whole_number
from cutline.errors import LostInputError
from cutline.ports.inspection import FileProblem


def test_a_needed_option_is_named() -> None:
    assert needed({"url": "x"}, "url", source="s") == "x"
    with pytest.raises(ValueError, match=r'source s needs the option "url"'):
        needed({"url": ""}, "url", source="s")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "²"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number from 1 on"):
        whole_number({"n": text}, "n", 7, least=1)
    with pytest.raises(ValueError, match="max_per_batch"):
        most_per_batch({"max_per_batch": text})


def test_defaults_hold() -> None:
    assert whole_number({}, "n", 7) == 7
    assert most_per_batch({}) == 100_000
    assert start_of({}) == "earliest"


def test_reading_starts_where_the_source_can() -> None:
    assert start_of({"start": "latest"}) == "latest"
    assert start_of({"start": "17"}, place="a sequence", is_place=str.isdigit) == "17"
    with pytest.raises(ValueError, match=r"use earliest or latest$"):
        start_of({"start": "17"})
    with pytest.raises(ValueError, match="use earliest, latest or a sequence"):
        start_of({"start": "soon"}, place="a sequence", is_place=str.isdigit)


@given(st.integers(-100, 100), st.integers(0, 200), st.integers(1, 20))
def test_ranges_cover_everything_once(first: int, length: int, parts: int) -> None:
    ranges = ranges_of(first, first + length, parts)
    assert [number for a, b in ranges for number in range(a, b)] == list(range(first, first + length))
    assert len(ranges) == min(parts, length)
    assert all(a < b for a, b in ranges)


def test_lost_input_is_refused() -> None:
    refuse_lost([])
    with pytest.raises(LostInputError, match="topic t: offsets 1 to 2 cannot be read: gone"):
        refuse_lost([FileProblem("topic t: offsets 1 to 2", "gone")])
