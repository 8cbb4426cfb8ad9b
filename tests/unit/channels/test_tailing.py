"""Following a log that another process writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.channels.tailing import FollowedLog, TailedLog
from cutline.errors import DamagedRecordError, InvariantViolation
from cutline.model.entries import Entry
from cutline.model.ids import START, Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage
from tests.support.channels import append_barrier, append_batch, open_log

OP = OperatorId("op")
LONG = 10.0


@pytest.fixture
def writer(tmp_path: Path) -> ChannelLog:
    return open_log(tmp_path)


def tail(writer: ChannelLog, first: int = START) -> TailedLog:
    return TailedLog(OP, writer.folder, writer.lineage, Position(first))


def both_kinds() -> list[FollowedLog]:
    """For mypy: a log of this process and one of another are followed in the same way."""
    lineage = Lineage.begin(Generation(1))
    return [ChannelLog(OP, Path(), lineage), TailedLog(OP, Path(), lineage)]


def path_of(writer: ChannelLog, seq: int) -> Path:
    return codec.entry_path(writer.folder, writer.lineage.owner(Position(seq)), Position(seq))


def test_what_is_there_is_read_once_and_in_order(writer: ChannelLog) -> None:
    append_batch(writer, rows=2)
    append_barrier(writer, 1)
    reader = tail(writer)
    assert reader.poll() == 2
    assert reader.entries() == writer.entries()
    assert reader.poll() == 0
    append_batch(writer)
    assert reader.poll() == 1
    assert reader.entries() == writer.entries()


def test_listeners_hear_of_new_entries_and_get_the_old_ones_at_once(writer: ChannelLog) -> None:
    append_batch(writer)
    reader = tail(writer)
    reader.poll()
    heard: list[Entry] = []
    assert reader.on_append(heard.append) == writer.entries()
    append_barrier(writer, 1)
    reader.poll()
    assert heard == writer.entries()[1:]


def test_a_listener_that_is_forgotten_hears_nothing(writer: ChannelLog) -> None:
    reader, heard = tail(writer), list[Entry]()
    listener = heard.append
    reader.on_append(listener)
    reader.remove_listener(listener)
    append_batch(writer)
    assert reader.poll() == 1 and heard == []


def test_amounts_are_those_of_the_writer(writer: ChannelLog) -> None:
    for rows in (3, 0, 4):
        append_batch(writer, rows=rows)
    reader = tail(writer)
    reader.poll()
    assert reader.in_flight_at(Epoch(7), Position(1)) is None, "the barrier is not there"
    barrier = append_barrier(writer, 7)
    reader.poll()
    assert reader.in_flight_at(Epoch(7), Position(1)) == writer.in_flight(Position(1), barrier.seq)
    flight = reader.in_flight_at(Epoch(7), Position(0))
    assert flight is not None and (flight.entries, flight.rows) == (2, 7)


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    reader = TailedLog(OP, tmp_path / "later", Lineage.begin(Generation(1)))
    assert reader.poll() == 0
    append_batch(open_log(tmp_path / "later"))
    assert reader.poll() == 1


def test_temporary_files_are_not_there(writer: ChannelLog) -> None:
    append_batch(writer)
    reader = tail(writer)
    (path_of(writer, 1).parent / ".tmp-000000000001.json-abcd").write_bytes(b"half of")
    assert reader.poll() == 1
    reader.check_for_hole()


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":1,"kind":"entry"'])
def test_a_torn_entry_is_not_there_until_it_is_whole(writer: ChannelLog, content: bytes) -> None:
    append_batch(writer)
    append_batch(writer)
    whole = path_of(writer, 1).read_bytes()
    path_of(writer, 1).write_bytes(content)
    reader = tail(writer)
    assert reader.poll() == 1
    reader.check_for_hole()
    path_of(writer, 1).write_bytes(whole)
    assert reader.poll() == 1
    assert reader.entries() == writer.entries()


@pytest.mark.parametrize("is_torn", [True, False], ids=["torn", "missing"])
def test_an_entry_that_cannot_be_read_before_one_that_can_is_damage(writer: ChannelLog, is_torn: bool) -> None:
    for _ in range(3):
        append_batch(writer)
    if is_torn:
        path_of(writer, 1).write_bytes(b"")
    else:
        path_of(writer, 1).unlink()
    reader = tail(writer)
    assert reader.poll() == 1, "it is never skipped"
    with pytest.raises(DamagedRecordError, match="entry 1 cannot be read"):
        reader.check_for_hole()


def test_an_entry_in_the_place_of_another_is_damage(writer: ChannelLog) -> None:
    append_batch(writer)
    append_batch(writer)
    path_of(writer, 1).write_bytes(path_of(writer, 0).read_bytes())
    with pytest.raises(DamagedRecordError, match="another entry"):
        tail(writer).poll()


def test_a_truncated_log_is_read_from_where_it_begins(writer: ChannelLog) -> None:
    for _ in range(4):
        append_batch(writer)
    writer.truncate(Position(2))
    reader = tail(writer)
    reader.poll()
    assert reader.entries() == writer.entries()


def test_what_is_not_needed_is_not_read(writer: ChannelLog) -> None:
    for _ in range(4):
        append_batch(writer)
    reader = tail(writer, 3)
    assert reader.poll() == 1
    assert reader.entries() == writer.entries()[3:]


def test_what_was_read_and_is_not_needed_any_more_is_forgotten(writer: ChannelLog) -> None:
    for _ in range(4):
        append_batch(writer)
    reader = tail(writer)
    reader.poll()
    reader.evict_below(Position(2))
    assert reader.entries() == writer.entries()[2:]
    assert len(list(path_of(writer, 0).parent.iterdir())) == 4, "the files are the writer's"
    append_batch(writer)
    append_barrier(writer, 1)
    reader.poll()
    flight = reader.in_flight_at(Epoch(1), Position(2))
    assert flight is not None and flight.entries == 3


# ------------------------------------------------------------------------------------------------- lineages


def test_what_a_zombie_writes_after_a_fork_is_never_seen(writer: ChannelLog) -> None:
    for _ in range(3):
        append_batch(writer)
    successor = open_log(writer.folder, (2, 2))
    reader = TailedLog(OP, writer.folder, successor.lineage)
    append_batch(writer)  # the zombie goes on in generation 1
    assert reader.poll() == 2
    append_batch(successor, rows=9)
    append_batch(writer)
    assert reader.poll() == 1
    assert reader.entries() == successor.entries()
    assert [entry.generation for entry in reader.entries()] == [1, 1, 2]
    reader.check_for_hole()


def test_a_fork_after_what_was_read_is_followed(writer: ChannelLog) -> None:
    append_batch(writer)
    reader = tail(writer)
    reader.poll()
    writer.fork(Generation(2))
    append_batch(writer)
    assert reader.poll() == 0, "nobody has told it"
    reader.follow_fork(writer.lineage)
    assert reader.poll() == 1
    assert reader.entries() == writer.entries()


def test_a_fork_that_is_told_twice_changes_nothing(writer: ChannelLog) -> None:
    append_batch(writer)
    reader = tail(writer)
    writer.fork(Generation(2))
    reader.follow_fork(writer.lineage)
    append_batch(writer)
    reader.poll()
    reader.follow_fork(writer.lineage)
    assert reader.entries() == writer.entries()


def test_a_reader_that_has_read_what_is_given_up_cannot_go_on(writer: ChannelLog) -> None:
    for _ in range(3):
        append_batch(writer)
    reader = tail(writer)
    reader.poll()
    with pytest.raises(InvariantViolation, match="read up to 3"):
        reader.follow_fork(writer.lineage.fork(Generation(2), Position(2)))


def test_a_reader_that_missed_an_earlier_fork_notices_it_in_a_later_one(writer: ChannelLog) -> None:
    """Generation 2 wrote 8 and 9 anew; the fork of generation 3 alone would be after what was read."""
    for _ in range(10):
        append_batch(writer)
    reader = tail(writer)
    reader.poll()
    second = open_log(writer.folder, (2, 8))
    for _ in range(4):
        append_batch(second)
    with pytest.raises(InvariantViolation, match="read up to 10, but generation 2 writes from 8 on"):
        reader.follow_fork(second.lineage.fork(Generation(3), second.end))


# ------------------------------------------------------------------------------------------------- the thread


class Following:
    """A reader on its own thread, and what it hears."""

    def __init__(self, reader: TailedLog) -> None:
        self.reader = reader
        self.entries: list[Entry] = []
        self.fatal: list[BaseException] = []
        self._changed = threading.Condition()
        reader.on_append(self._heard)
        reader.start(self._failed)

    def _heard(self, entry: Entry) -> None:
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self.fatal.append(error)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entries) >= count or self.fatal, LONG)

    def wait_failed(self) -> BaseException:
        with self._changed:
            assert self._changed.wait_for(lambda: self.fatal, LONG)
        return self.fatal[0]


@pytest.fixture
def following(writer: ChannelLog) -> Iterator[Following]:
    following = Following(tail(writer))
    yield following
    following.reader.stop()


def test_a_writer_in_another_thread_is_followed(writer: ChannelLog, following: Following) -> None:
    def write() -> None:
        for number in range(60):
            append_barrier(writer, number) if number % 3 == 2 else append_batch(writer)

    thread = threading.Thread(target=write)
    thread.start()
    following.wait_for(60)
    thread.join()
    assert following.entries == writer.entries()


def test_a_hint_wakes_it(writer: ChannelLog, following: Following) -> None:
    append_batch(writer)
    following.reader.hint()
    following.wait_for(1)
    assert following.entries == writer.entries()


def test_without_a_hint_it_finds_the_entry_all_the_same(writer: ChannelLog, following: Following) -> None:
    append_batch(writer)
    following.wait_for(1)
    assert following.entries == writer.entries()


def test_a_damaged_log_is_reported(writer: ChannelLog, following: Following) -> None:
    for _ in range(3):
        append_batch(writer)
    following.wait_for(3)
    append_batch(open_log(writer.folder))  # seq 3
    following.wait_for(4)
    path_of(writer, 5).write_bytes(path_of(writer, 3).read_bytes())
    assert isinstance(following.wait_failed(), DamagedRecordError)


def test_a_reader_that_never_started_stops(writer: ChannelLog) -> None:
    tail(writer).stop()
