"""The rules of the Kafka source; what needs a broker is in tests/torture/test_kafka_source.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cutline.connectors.kafka.client import Bounds
from cutline.connectors.kafka.positions import KafkaPosition, lost_between, ranges
from cutline.connectors.kafka.spark_reader import KafkaReader, packed
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import NotDone
from cutline.spark_dir import source_check

GUARD = ReplayGuard()

Offset = dict[str, Any]


def test_tasks_share_short_ranges_and_split_long_ones() -> None:
    spans = [(0, 0, 30_000), (1, 5, 2_005), (2, 0, 3_000), (3, 7, 30_007)]
    assert packed(spans, 0) == [[(0, 0, 30_000)], [(1, 5, 2_005), (2, 0, 3_000)], [(3, 7, 30_007)]]
    for tasks in (1, 2, 3, 7, 64):
        found = packed(spans, tasks)
        assert tasks <= len(found) + 1 and len(found) <= tasks + len(spans), tasks
        read = [(number, offset) for task in found for number, low, high in task for offset in range(low, high)]
        assert read == [(number, offset) for number, low, high in spans for offset in range(low, high)]
    assert packed([], 4) == []


def test_a_partition_that_is_new_is_read_from_its_beginning() -> None:
    start = position(begin={"0": 5}, offsets={"0": 9})
    end = position(begin={"0": 5, "1": 0}, offsets={"0": 12, "1": 4})
    assert ranges(start, end) == {0: Bounds(9, 12), 1: Bounds(0, 4)}


def test_bad_options_are_named() -> None:
    bad = {"servers": "", "start": "5", "max_per_batch": "x", "headers": "no", "tasks": "-1"}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            KafkaReader({"servers": "broker:9092", "topic": "t", name: value})


# ------------------------------------------------------------------------------------------------- the guard


def position(begin: dict[str, int] | None = None, **changes: Any) -> KafkaPosition:
    offsets = changes.pop("offsets", {"0": 10, "1": 4})
    return KafkaPosition(
        servers="broker:9092", topic="orders", topic_id="first", begin=begin or {"0": 0, "1": 0}, offsets=offsets
    )


def test_what_was_dropped_is_named_by_partition_and_offsets() -> None:
    there = {"0": Bounds(15, 40), "1": Bounds(0, 9)}
    (problem,) = lost_between(there, "first", position(), None)
    assert (problem.path, problem.parts) == ("topic orders, partition 0: offsets 10 to 14", 5)


def test_a_topic_that_was_made_again_is_another_one() -> None:
    there, end = {"0": Bounds(0, 40), "1": Bounds(0, 9)}, position(offsets={"0": 20, "1": 4})
    first, second = lost_between(there, "second", position(), end)
    assert first.path == "topic orders, partition 0: offsets 10 to 19" and "another topic" in first.problem
    assert second.path == "topic orders, partition 1: everything from offset 4 on"
    # Without ids it shows as long as it is shorter than it was.
    (shorter,) = lost_between({"0": Bounds(0, 3), "1": Bounds(0, 9)}, "", position(), None)
    assert "another topic" in shorter.problem
    assert len(lost_between(None, "", position(), None)) == 2


def test_a_topic_that_is_shorter_than_what_was_read_is_missed() -> None:
    there, end = {"0": Bounds(0, 15), "1": Bounds(0, 9)}, position(offsets={"0": 20, "1": 4})
    (problem,) = lost_between(there, "first", position(), end)
    assert (problem.path, problem.parts) == ("topic orders, partition 0: offsets 15 to 19", 5)


def test_brokers_that_cannot_be_reached_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("cutline.connectors.kafka.client.TIMEOUT_S", 0.5)
    gone = position(offsets={"0": 1})
    lost = json.dumps(gone.as_json() | {"servers": "127.0.0.1:1"}).encode()
    with pytest.raises(NotDone, match="no Kafka broker can be reached"):
        source_check.check_sources(GUARD, {"0": lost}, tmp_path)
