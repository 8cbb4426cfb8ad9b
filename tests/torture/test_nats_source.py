"""The NATS source against a real server: exact ranges, at every reading, and never a message less in silence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from cutline.connectors.nats.positions import moved
from cutline.connectors.nats.spark_reader import NatsReader
from cutline.errors import CutlineError, LostInputError
from cutline.testing.servers.nats import NatsServer
from tests.support.streams import Stream

Offset = dict[str, Any]


@pytest.fixture
def stream(nats_server: NatsServer) -> Iterator[Stream]:
    with Stream(nats_server.url, nats_server.fresh_stream()) as made:
        yield made


def reader(stream: Stream, **options: Any) -> NatsReader:
    return NatsReader({"url": stream.url, "stream": stream.name, **{name: str(one) for name, one in options.items()}})


def stored(offset: Offset) -> Offset:
    """As Spark keeps it."""
    loaded: Offset = json.loads(json.dumps(offset))
    return loaded


def rows(one: NatsReader, start: Offset, end: Offset) -> list[tuple[int, str]]:
    """What executors read, partition by partition."""
    found = []
    for partition in one.partitions(start, end):
        copy, part = pickle.loads(pickle.dumps((one, partition)))
        for batch in copy.read(part):
            found += [(row["sequence"], row["data"].decode()) for row in batch.to_pylist()]
    return found


def test_ranges_follow_one_another_and_hold_every_message_once(stream: Stream) -> None:
    stream.publish(*range(1, 11))
    one = reader(stream, max_per_batch=4, partitions=3)
    offset, seen = one.initialOffset(), []
    while (end := one.latestOffset(offset, None)) != offset:
        seen += rows(one, stored(offset), stored(end))
        offset = end
    one.stop()
    assert seen == [(number, str(number)) for number in range(1, 11)]
    assert offset["sequence"] == 11 and offset["messages"] == 10
    assert "cutline_nats" in json.dumps(offset)


def test_large_messages_are_asked_for_in_small_pages(stream: Stream) -> None:
    """The server cuts off whoever lets 64 MB pile up, at every try again."""
    for _ in range(4):
        stream.publish_many([bytes(100)] * 150 + [bytes(900_000)] * 30)
    one = reader(stream)
    start = one.initialOffset()
    (part,) = one.partitions(start, one.latestOffset(start, None))
    assert sum(rows.num_rows for rows in one.read(part)) == 720
    one.stop()


def test_every_column_is_filled(stream: Stream) -> None:
    stream.publish("x", subject="b")
    one = reader(stream)
    start = one.initialOffset()
    (partition,) = one.partitions(start, one.latestOffset(start, None))
    (row,) = next(iter(one.read(partition))).to_pylist()
    one.stop()
    assert row["subject"] == f"{stream.name}.b" and row["published_at"].year > 2000 and row["headers"] == []


def test_a_subject_filter_leaves_out_the_others(stream: Stream) -> None:
    for number in range(6):
        stream.publish(number, subject="even" if number % 2 == 0 else "odd")
    one = reader(stream, subject=f"{stream.name}.odd")
    start = one.initialOffset()
    assert [data for _, data in rows(one, start, one.latestOffset(start, None))] == ["1", "3", "5"]
    one.stop()


@pytest.mark.parametrize(("start", "expected"), [("earliest", [1, 2, 3, 4]), ("latest", [4]), ("3", [3, 4])])
def test_reading_begins_where_it_is_told_to(stream: Stream, start: str, expected: list[int]) -> None:
    stream.publish(1, 2, 3)
    one = reader(stream, start=start)
    begin = one.initialOffset()
    stream.publish(4)
    assert [sequence for sequence, _ in rows(one, begin, one.latestOffset(begin, None))] == expected
    one.stop()


def test_the_first_batch_is_read_again_from_where_it_began(stream: Stream) -> None:
    """Spark does not note where the first batch begins, and asks anew after a crash."""
    stream.publish(1, 2)
    one = reader(stream, start="latest")
    begin = one.initialOffset()
    stream.publish(3, 4)
    end = stored(one.latestOffset(begin, None))
    first = rows(one, begin, end)
    one.stop()
    again = reader(stream, start="latest")
    assert rows(again, again.initialOffset(), end) == first == [(3, "3"), (4, "4")]
    again.stop()


def test_a_second_reading_is_like_the_first_across_a_killed_server() -> None:
    server = NatsServer()
    server.start()
    try:
        with Stream(server.url, "KILLED") as stream:
            stream.publish(*range(50))
            one = reader(stream, partitions=2)
            start = one.initialOffset()
            end = one.latestOffset(start, None)
            first = rows(one, start, end)
            server.restart()
            stream.publish("later")
            assert rows(one, stored(start), stored(end)) == first
            assert len(first) == 50
            assert [data for _, data in rows(one, end, one.latestOffset(end, None))] == ["later"]
            server.kill()
            with pytest.raises(CutlineError, match="cannot be reached"):
                one.latestOffset(end, None)
            one.stop()
    finally:
        server.remove()


def test_dropped_messages_are_named_and_never_passed_over(stream: Stream) -> None:
    stream.publish(*range(1, 11))
    one = reader(stream)
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    partitions = one.partitions(start, end)
    stream.purge(below=5)
    with pytest.raises(ValueError, match="cannot be read"):
        list(one.read(partitions[0]))
    other = reader(stream)
    for offset in (start, stored(start)):
        with pytest.raises(LostInputError, match=f"stream {stream.name}: sequences 1 to 4"):
            other.latestOffset(offset, None)
        with pytest.raises(LostInputError, match=f"stream {stream.name}: sequences 1 to 4"):
            other.partitions(offset, end)
    for each in (one, other):
        each.stop()


def test_a_message_deleted_inside_a_batch_that_was_read_is_missed(stream: Stream) -> None:
    stream.publish(*range(1, 11))
    stream.delete(3)
    one = reader(stream, partitions=2)
    start = one.initialOffset()
    end = stored(one.latestOffset(start, None))
    assert end["messages"] == 9
    assert [sequence for sequence, _ in rows(one, start, end)] == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    stream.delete(7)
    again = reader(stream)
    with pytest.raises(LostInputError, match="1 of the sequences 1 to 10"):
        again.partitions(start, end)
    for each in (one, again):
        each.stop()


def test_a_stream_that_was_made_again_is_another_one(stream: Stream) -> None:
    stream.publish(1, 2, 3)
    one = reader(stream)
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    stream.remove()
    with pytest.raises(ValueError, match="no stream"):
        one.latestOffset(end, None)
    stream.make()
    stream.publish(*"abcdef")
    with pytest.raises(LostInputError, match="another stream has this name"):
        one.latestOffset(end, None)
    one.stop()


def test_an_emptied_stream_goes_on_where_it_was(stream: Stream) -> None:
    stream.publish(1, 2, 3)
    one = reader(stream)
    start = one.initialOffset()
    end = one.latestOffset(start, None)
    stream.purge(below=4)
    assert one.latestOffset(end, None) == end, "everything was read before it was dropped"
    stream.publish(4)
    assert rows(one, end, one.latestOffset(end, None)) == [(4, "4")]
    one.stop()


def test_a_message_deleted_while_a_batch_is_read_again_is_missed_behind_a_filter_too(stream: Stream) -> None:
    stream.publish(*range(1, 6))
    one = reader(stream, subject=f"{stream.name}.a")
    start = one.initialOffset()
    end = stored(one.latestOffset(start, None))
    (partition,) = one.partitions(start, end)
    stream.delete(3)
    with pytest.raises(ValueError, match="cannot be read"):
        list(one.read(partition))
    one.stop()


def test_a_stream_that_was_set_back_is_not_read_on() -> None:
    """A server that has lost its last messages, or got its data from a backup, gives their sequences to others."""
    server = NatsServer()
    server.start()
    try:
        with Stream(server.url, "SET_BACK") as stream:
            stream.publish(1, 2, 3)
            server.stop()
            copy = server.copy_data()
            server.start()
            stream.publish(4, 5, 6)
            one, again, filtered = reader(stream), reader(stream), reader(stream, subject="SET_BACK.>")
            start = one.initialOffset()
            end = stored(one.latestOffset(start, None))
            assert len(rows(one, start, end)) == 6
            server.kill()
            server.replace_data(copy)
            server.start()
            with pytest.raises(LostInputError, match="SET_BACK: sequences 4 to 6"):
                one.latestOffset(end, None)
            for each in (again, filtered):
                with pytest.raises(LostInputError, match="SET_BACK: sequences 4 to 6"):
                    rows(each, start, end)
            here, planned = moved([json.dumps(start).encode(), json.dumps(end).encode()], None)
            assert rows(again, json.loads(here), json.loads(planned)) == [(1, "1"), (2, "2"), (3, "3")]
            (here,) = moved([json.dumps(end).encode()], None)
            stream.publish("new")
            offset = json.loads(here)
            assert rows(again, offset, again.latestOffset(offset, None)) == [(4, "new")]
            for each in (one, again, filtered):
                each.stop()
    finally:
        server.remove()


@pytest.mark.parametrize("config", [{"retention": "workqueue"}, {"max_msgs_per_subject": 1}])
def test_streams_that_cannot_be_read_twice_are_refused(nats_server: NatsServer, config: dict[str, Any]) -> None:
    with Stream(nats_server.url, nats_server.fresh_stream(), **config) as stream:
        one = reader(stream)
        with pytest.raises(ValueError, match="a source needs"):
            one.initialOffset()
        one.stop()


def test_bad_options_are_named(stream: Stream) -> None:
    for options, text in [
        ({"url": ""}, "url"),
        ({"stream": ""}, "stream"),
        ({"start": "tomorrow"}, "start"),
        ({"max_per_batch": "0"}, "max_per_batch"),
        ({"url": "nats://user:secret@127.0.0.1:1"}, "must not hold"),
    ]:
        with pytest.raises((ValueError, CutlineError), match=text):
            NatsReader({"url": stream.url, "stream": stream.name, **options})
    one = reader(stream, start="77")
    with pytest.raises(ValueError, match="cannot begin with 77"):
        one.initialOffset()
    one.stop()
