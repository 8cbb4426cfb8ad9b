"""Where reading a topic begins."""

from __future__ import annotations

import pytest

from cutline.connectors.kafka.client import Bounds
from cutline.connectors.kafka.start import begin_offsets, is_start, offsets_of, time_ms

THERE = {"0": Bounds(5, 20), "1": Bounds(0, 7)}


def test_times_need_a_zone() -> None:
    assert time_ms("1970-01-01T00:00:01Z") == 1_000
    assert time_ms("1970-01-01T01:00:00.5+01:00") == 500
    assert time_ms("1970-01-01T00:00:01") is None and time_ms("5") is None


def test_offsets_by_partition() -> None:
    assert offsets_of('{"0": 5}') == {"0": 5}
    for text in ("{}", "5", '{"a": 5}', '{"0": -1}', '{"0": "x"}'):
        assert offsets_of(text) is None and not is_start(text)


def test_partitions_that_are_not_named_begin_at_their_earliest_message() -> None:
    assert begin_offsets(None, "b:1", "t", '{"0": 9}', THERE) == {"0": 9, "1": 0}
    assert begin_offsets(None, "b:1", "t", "earliest", THERE) == {"0": 5, "1": 0}
    assert begin_offsets(None, "b:1", "t", "latest", THERE) == {"0": 20, "1": 7}


@pytest.mark.parametrize("start", ['{"0": 4}', '{"0": 21}', '{"2": 0}'])
def test_offsets_that_are_not_there_are_refused(start: str) -> None:
    with pytest.raises(ValueError, match="topic t has"):
        begin_offsets(None, "b:1", "t", start, THERE)
