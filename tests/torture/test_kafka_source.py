"""Reading exact ranges of topics of a real broker: transactions, holes, kills, leaders that change."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from cutline.connectors.kafka import fetching
from cutline.connectors.kafka.spark_reader import KafkaReader
from cutline.errors import LostInputError
from cutline.testing.servers.kafka import KafkaCluster
from tests.support.kafka_topics import Topic, wait_until

if TYPE_CHECKING:
    from confluent_kafka import Producer

Offset = dict[str, Any]


@pytest.fixture
def topic(kafka_cluster: KafkaCluster) -> Topic:
    return Topic(kafka_cluster.servers, kafka_cluster.fresh_topic())


@pytest.fixture(autouse=True)
def _no_consumers_left() -> Iterator[None]:
    yield
    fetching._CONSUMERS.close()


def reader(topic: Topic, **options: object) -> KafkaReader:
    given = {"servers": topic.servers, "topic": topic.name} | {name: str(one) for name, one in options.items()}
    return KafkaReader(given)


def values(one: KafkaReader, start: Offset, end: Offset) -> list[str]:
    """What the tasks of a batch read, each from its pickled copy."""
    found = []
    for partition in one.partitions(json.loads(json.dumps(start)), json.loads(json.dumps(end))):
        copy, part = pickle.loads(pickle.dumps((one, partition)))
        for batch in copy.read(part):
            found += [value.decode() for value in batch.column("value").to_pylist()]
    return found


def batches(one: KafkaReader, start: Offset | None = None) -> list[tuple[Offset, Offset, list[str]]]:
    """All that is there, with where each batch begins and ends."""
    found, start = [], start or one.initialOffset()
    while (end := one.latestOffset(start, None)) != start:
        found.append((start, end, values(one, start, end)))
        start = end
    return found


def test_ranges_of_any_length_hold_every_finished_message_once(topic: Topic) -> None:
    """Markers and aborted messages take offsets, so ranges begin and end anywhere among them, and may hold nothing."""
    expected = []
    for number in range(12):
        own = [f"{number}-{part}" for part in range(number % 4 + 1)]
        outcome = "abort" if number % 3 == 1 else "commit"
        topic.transaction(own, end=outcome)
        expected += own if outcome == "commit" else []
    for most in (1, 2, 3, 7, 100):
        one = reader(topic, max_per_batch=most)
        found = batches(one)
        assert [value for _, _, part in found for value in part] == expected, most
        for start, end, part in reversed(found):
            assert values(one, start, end) == part, "a second reading is like the first"
        one.stop()
    several = reader(topic, tasks=5)
    ((start, end, part),) = batches(several)
    assert part == expected and len(several.partitions(start, end)) == 5, "a range that five tasks share"
    several.stop()


def test_what_follows_an_open_transaction_waits_for_it(topic: Topic) -> None:
    topic.publish(["before"])
    open_: Producer = topic.transaction(["inside"], end="")
    topic.publish(["after"])
    one = reader(topic)
    ((_, end, part),) = batches(one)
    assert part == ["before"]
    assert one.latestOffset(end, None) == end
    open_.commit_transaction(30)
    wait_until(lambda: one.latestOffset(end, None) != end)
    assert [part for _, _, part in batches(one, end)] == [["inside", "after"]]
    one.stop()


def test_holes_of_a_compacted_topic(kafka_cluster: KafkaCluster) -> None:
    """What is left of a range is read; that rows are gone cannot be seen, as docs/sources.md says."""
    name = kafka_cluster.fresh_topic(cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01")
    topic = Topic(kafka_cluster.servers, name)
    for round_ in range(5):
        for key in (b"a", b"b"):
            topic.publish([f"{key.decode()}{round_}"], key=key)
        time.sleep(0.15)
    one = reader(topic)
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    assert len(values(one, start, end)) == 10

    def is_compacted() -> bool:
        topic.publish(["x"], key=b"x")  # rolls the segment
        return len(values(one, start, end)) < 10

    wait_until(is_compacted, 90)
    left = values(one, start, end)
    assert set(left) >= {"a4", "b4"} and left == values(one, start, end)
    one.stop()


def test_reading_begins_at_a_time_or_at_offsets(kafka_cluster: KafkaCluster) -> None:
    topic = Topic(kafka_cluster.servers, kafka_cluster.fresh_topic(partitions=2))
    topic.publish(["a", "b"], partition=0)
    time.sleep(0.05)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() % 1 * 1000):03d}+00:00"
    time.sleep(0.05)
    topic.publish(["c"], partition=0)
    by_time = reader(topic, start=moment)
    assert by_time.initialOffset()["begin"] == {"0": 2, "1": 0}
    assert [part for _, _, part in batches(by_time)] == [["c"]]
    by_offset = reader(topic, start='{"0": 1}')
    assert by_offset.initialOffset()["begin"] == {"0": 1, "1": 0}
    for start, text in [('{"0": 9}', "offset 9 of partition 0"), ('{"5": 0}', "partition 5")]:
        with pytest.raises(ValueError, match=text):
            reader(topic, start=start).initialOffset()
    with pytest.raises(ValueError, match="start is 'yesterday'"):
        reader(topic, start="yesterday")


def test_reading_begins_at_the_end_if_it_is_told_to(topic: Topic) -> None:
    topic.publish([1, 2, 3])
    one = reader(topic, start="latest")
    start = one.initialOffset()
    topic.publish([4])
    end = one.latestOffset(start, None)
    assert values(one, start, end) == ["4"]
    # Spark asks anew where the first batch begins; what it has noted decides.
    topic.publish([5])
    assert values(reader(topic, start="latest"), start, end) == ["4"]
    one.stop()


def test_a_topic_that_is_created_again_while_it_is_read_is_noticed(topic: Topic) -> None:
    """Even if it is longer than the old one by the time it is looked at."""
    topic.publish(range(5))
    one = reader(topic)
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    topic.create_again()
    topic.publish(range(9))
    with pytest.raises(LostInputError, match="another topic has this name"):
        one.latestOffset(end, None)
    again = reader(topic)
    with pytest.raises(LostInputError, match="another topic has this name"):
        again.partitions(start, end)
    for each in (one, again):
        each.stop()


def test_a_reader_refuses_what_is_gone(topic: Topic) -> None:
    topic.publish(range(5))
    one = reader(topic)
    start = one.initialOffset()
    topic.drop(3)
    with pytest.raises(LostInputError, match="partition 0: offsets 0 to 2"):
        one.latestOffset(start, None)
    one.stop()


def test_headers_are_left_out_if_nobody_wants_them(topic: Topic) -> None:
    topic.publish(["a"])
    one = reader(topic, headers="false")
    start = one.initialOffset()
    (part,) = one.partitions(start, one.latestOffset(start, None))
    (batch,) = one.read(part)
    assert "headers" not in batch.schema.names
    one.stop()


def test_a_message_that_is_dropped_between_planning_and_reading_is_an_error(topic: Topic) -> None:
    topic.publish(range(10))
    one = reader(topic)
    start = one.initialOffset()
    (part,) = one.partitions(start, one.latestOffset(start, None))
    topic.drop(5)
    with pytest.raises(LostInputError, match="offset 0 is gone"):
        list(one.read(part))
    one.stop()


def test_consumers_are_kept_and_never_shared(topic: Topic) -> None:
    topic.publish(range(100))
    one = reader(topic, max_per_batch=10)
    (first, second, *_) = batches(one)
    (part,) = one.partitions(*first[:2])
    both = [one.read(part), one.read(part)]  # two readers at a time
    assert [next(each).num_rows for each in both] == [10, 10]
    assert [list(each) for each in both] == [[], []]
    assert values(one, *second[:2]) == second[2]
    assert 1 <= len(fetching._CONSUMERS._kept) <= 4
    one.stop()


@pytest.mark.kill
def test_a_broker_that_is_killed_while_a_range_is_read() -> None:
    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    cluster = KafkaCluster()
    try:
        cluster.start()
        topic = Topic(cluster.servers, cluster.fresh_topic())
        topic.publish(f"{number:06d}" + "x" * 2_000 for number in range(20_000))
        one = reader(topic)
        start = one.initialOffset()
        (part,) = one.partitions(start, one.latestOffset(start, None))
        pages = one.read(part)
        found = [value[:6] for value in next(pages).column("value").to_pylist()]
        cluster.nodes[0].kill()
        threading.Timer(1.0, cluster.start).start()
        for page in pages:
            found += [value[:6] for value in page.column("value").to_pylist()]
        assert [int(value) for value in found] == list(range(20_000))
        wait_until(lambda: cluster.nodes[0].is_running)
        one.stop()
    finally:
        cluster.remove()


@pytest.mark.kill
@pytest.mark.soak
def test_leaders_that_change_while_a_range_is_read() -> None:
    if KafkaCluster.why_not():
        pytest.skip(KafkaCluster.why_not())
    cluster = KafkaCluster(3)
    try:
        cluster.start()
        topic = Topic(cluster.servers, cluster.fresh_topic(partitions=3))
        for partition in range(3):
            topic.publish((f"{number:06d}" + "x" * 2_000 for number in range(10_000)), partition=partition)
        one = reader(topic)
        start = one.initialOffset()
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for number, part in enumerate(one.partitions(start, one.latestOffset(start, None))):
            for page_number, page in enumerate(one.read(part)):
                if page_number == 0:
                    cluster.nodes[number].kill()  # it leads one of the partitions
                for row in page.to_pylist():
                    found[row["partition"]].append(int(row["value"][:6]))
            cluster.start()
        assert found == {partition: list(range(10_000)) for partition in range(3)}
        one.stop()
    finally:
        cluster.remove()
