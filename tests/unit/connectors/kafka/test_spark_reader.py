"""The rules of the Kafka source, against confluent-kafka's mock cluster; on real brokers: tests/torture."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from cutline.connectors.kafka import positions as kafka_positions
from cutline.connectors.kafka import spark_reader as kafka_source
from cutline.connectors.kafka.client import Bounds
from cutline.connectors.kafka.positions import KafkaPosition, lost_between, moved, ranges
from cutline.connectors.kafka.spark_reader import KafkaReader, packed
from cutline.connectors.replay_guard import ReplayGuard
from cutline.errors import CutlineError, LostInputError, NotDone
from cutline.spark_dir import source_check
from tests.support.kafka_mock import MockKafka

GUARD = ReplayGuard()

Offset = dict[str, Any]


@pytest.fixture(scope="module")
def kafka() -> MockKafka:
    return MockKafka()


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The mock cluster does not know ids of topics, and takes long to say so."""
    known = {"id": "first"}
    for module in ("cutline.connectors.kafka.client", "cutline.connectors.kafka.positions"):
        monkeypatch.setattr(f"{module}.topic_id", lambda *_: known["id"])
    return known


def reader(kafka: MockKafka, topic: str, **options: Any) -> KafkaReader:
    return KafkaReader({"servers": kafka.servers, "topic": topic, **{name: str(one) for name, one in options.items()}})


def rows(one: KafkaReader, start: Offset, end: Offset) -> list[tuple[int, int, str]]:
    found = []
    for partition in one.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end))):
        copy, part = pickle.loads(pickle.dumps((one, partition)))
        for batch in copy.read(part):
            found += [(row["partition"], row["offset"], row["value"].decode()) for row in batch.to_pylist()]
    return found


def test_ranges_follow_one_another_and_hold_every_message_once(kafka: MockKafka) -> None:
    kafka.publish("ranges", *range(7), partition=0)
    kafka.publish("ranges", *range(7, 10), partition=3)
    one = reader(kafka, "ranges", max_per_batch=4)
    offset, seen = one.initialOffset(), []
    first_end = None
    while (end := one.latestOffset(offset, None)) != offset:
        found = rows(one, offset, end)
        assert len(found) <= 4 and found == rows(one, offset, end), "a second reading is like the first"
        first_end = first_end or (found, end)
        seen += found
        offset = end
    assert sorted(int(value) for _, _, value in seen) == list(range(10))
    assert first_end is not None
    kafka.publish("ranges", "later", partition=0)
    # Spark asks anew where the first batch begins; what it has noted decides.
    again = reader(kafka, "ranges", start="latest")
    assert rows(again, again.initialOffset(), first_end[1]) == first_end[0]
    for each in (one, again):
        each.stop()


def test_reading_begins_at_the_end_if_it_is_told_to(kafka: MockKafka) -> None:
    kafka.publish("latest", 1, 2, 3)
    one = reader(kafka, "latest", start="latest")
    start = one.initialOffset()
    kafka.publish("latest", 4)
    assert rows(one, start, one.latestOffset(start, None)) == [(0, 3, "4")]
    one.stop()


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


def test_bad_options_are_named(kafka: MockKafka) -> None:
    bad = {"servers": "", "start": "5", "max_per_batch": "x", "headers": "no", "tasks": "-1"}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            KafkaReader({"servers": kafka.servers, "topic": "t", name: value})


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


def test_the_guard_asks_the_brokers(kafka: MockKafka, tmp_path: Any, identity: dict[str, str]) -> None:
    kafka.publish("guarded", *range(5))
    one = reader(kafka, "guarded")
    end = one.latestOffset(one.initialOffset(), None)
    one.stop()
    recorded = json.dumps(end).encode()
    assert source_check.check_sources(GUARD, {"0": recorded}, tmp_path).problems == []
    identity["id"] = "second"
    problems = source_check.check_sources(GUARD, {"0": recorded}, tmp_path).problems
    assert problems and "another topic" in problems[0].problem
    (here,) = moved([recorded], None)
    back = json.loads(here)
    assert back["topic_id"] == "second" and back["offsets"]["0"] == 0


def test_a_batch_planned_in_a_topic_that_is_gone_takes_nothing_of_the_new_one(
    kafka: MockKafka, identity: dict[str, str]
) -> None:
    """Its output may be in the log already: what it would read now would be thrown away."""
    kafka.publish("remade", *range(9))
    one = reader(kafka, "remade", max_per_batch=4)
    first = one.latestOffset(one.initialOffset(), None)
    second = one.latestOffset(first, None)
    one.stop()
    identity["id"] = "second"
    here, planned = (json.loads(each) for each in moved([json.dumps(each).encode() for each in (first, second)], None))
    again = reader(kafka, "remade")
    assert rows(again, here, planned) == [] and here["offsets"] == planned["offsets"] == dict.fromkeys("0123", 0)
    again.stop()


def test_partitions_that_are_gone_are_gone_on_without(kafka: MockKafka, identity: dict[str, str]) -> None:
    """A topic that was made again with fewer partitions."""
    kafka.publish("fewer", *range(3))
    one = reader(kafka, "fewer")
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    for offset in (start, end):
        for names in (offset["begin"], offset["offsets"]):
            names["7"] = 5
    identity["id"] = "second"
    (here, planned) = (json.loads(each) for each in moved([json.dumps(each).encode() for each in (start, end)], None))
    assert rows(one, here, planned) == []
    assert [value for _, _, value in rows(one, planned, one.latestOffset(planned, None))] == ["0", "1", "2"]
    one.stop()


def test_a_topic_that_is_made_again_while_it_is_read_is_noticed(kafka: MockKafka, identity: dict[str, str]) -> None:
    """Even if it is longer than the old one by the time it is looked at."""
    kafka.publish("running", *range(5))
    one = reader(kafka, "running")
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    kafka.publish("running", *range(5, 9))
    identity["id"] = "second"
    with pytest.raises(LostInputError, match="another topic has this name"):
        one.latestOffset(end, None)
    again = reader(kafka, "running")
    with pytest.raises(LostInputError, match="another topic has this name"):
        again.partitions(start, end)
    for each in (one, again):
        each.stop()


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


def test_a_reader_refuses_what_is_gone(kafka: MockKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    kafka.publish("gone", *range(5))
    one = reader(kafka, "gone")
    start = one.initialOffset()
    monkeypatch.setattr(KafkaReader, "_look", lambda _: {"0": Bounds(3, 5)} | {str(n): Bounds(0, 0) for n in (1, 2, 3)})
    with pytest.raises(LostInputError, match="topic gone, partition 0: offsets 0 to 2"):
        one.latestOffset(start, None)
    one.stop()
    assert issubclass(LostInputError, CutlineError) and kafka_source.FORMAT == kafka_positions.KIND
