"""Back-pressure: when a producer may run its next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cutline.channels.log import ChannelLog
from cutline.model.ids import Generation, OperatorId, Position
from cutline.protocol.messages.wire import Consumed
from cutline.worker.backpressure import Credits, StopAtBoundary
from tests.support.channels import append_barrier, append_batch, open_log

LEFT, RIGHT = OperatorId("left"), OperatorId("right")
LONG = 10.0


@pytest.fixture
def log(tmp_path: Path) -> ChannelLog:
    return open_log(tmp_path)


def credits_of(log: ChannelLog, *consumers: OperatorId, entries: int = 2, size_bytes: int = 1_000) -> Credits:
    return Credits(log, consumers, entries=entries, size_bytes=size_bytes)


def read(consumer: OperatorId, position: int, generation: int = 1) -> Consumed:
    """A consumer's report."""
    return Consumed(
        channel=OperatorId("op"), consumer=consumer, generation=Generation(generation), position=Position(position)
    )


class Waiting:
    """A thread that asks for room."""

    def __init__(self, credit: Credits) -> None:
        self.credit = credit
        self.outcome = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.credit.begin_batch()
        except StopAtBoundary:
            self.outcome = "stopped"
        else:
            self.outcome = "room"
        self._ended.set()

    def is_held(self) -> bool:
        """Whether it waits; comes back as soon as that is certain."""
        while not self.credit.is_waiting():
            if self._ended.is_set():
                return False
        return not self._ended.wait(0.02)

    def ends_after(self, step: Callable[[], object]) -> str:
        step()
        assert self._ended.wait(LONG)
        self._thread.join()
        return self.outcome


def test_there_is_room_while_the_channel_holds_less_than_it_may(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    credit.begin_batch()
    append_batch(log)
    credit.begin_batch()


def test_a_full_channel_holds_the_producer_until_its_consumer_has_read(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    append_batch(log)
    append_batch(log)
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.reported(read(LEFT, 1))) == "room"
    assert not credit.is_waiting()


def test_too_many_bytes_hold_the_producer_too(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=100, size_bytes=10)
    append_batch(log, content=b"x" * 10)
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.reported(read(LEFT, 1))) == "room"


def test_one_batch_larger_than_the_channel_gets_through(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, size_bytes=10)
    credit.begin_batch()
    append_batch(log, content=b"x" * 500)
    credit.reported(read(LEFT, 1))
    credit.begin_batch()


def test_the_slowest_consumer_decides(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, RIGHT)
    append_batch(log)
    append_batch(log)
    credit.reported(read(LEFT, 2))
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.reported(read(RIGHT, 1))) == "room"


def test_barriers_and_empty_entries_take_no_room(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=1)
    append_batch(log, rows=0)
    append_barrier(log, 1)
    append_batch(log, rows=0)
    credit.begin_batch()


def test_without_consumers_there_is_always_room(log: ChannelLog) -> None:
    credit = credits_of(log, entries=1)
    for _ in range(3):
        append_batch(log)
    credit.begin_batch()
    assert credit.is_drained()
    assert credit.backlog() == {}


def test_a_report_that_comes_late_takes_nothing_back(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=2)
    for _ in range(3):
        append_batch(log)
    credit.reported(read(LEFT, 3))
    credit.reported(read(LEFT, 1))
    credit.begin_batch()
    assert credit.is_drained()


def test_a_paused_producer_waits_even_with_room(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    credit.set_paused(True)
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.set_paused(False)) == "room"


def test_a_paused_producer_is_not_let_go_by_its_consumers(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    append_batch(log)
    credit.set_paused(True)
    waiting = Waiting(credit)
    credit.reported(read(LEFT, 1))
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.set_paused(False)) == "room"


def test_a_full_channel_is_not_opened_by_the_end_of_a_pause(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=1)
    append_batch(log)
    credit.set_paused(True)
    waiting = Waiting(credit)
    credit.set_paused(False)
    assert waiting.is_held()
    assert waiting.ends_after(lambda: credit.reported(read(LEFT, 1))) == "room"


def test_a_stop_ends_the_wait_before_the_batch(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=1)
    append_batch(log)
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(credit.stop) == "stopped"


def test_a_stop_ends_a_pause(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    credit.set_paused(True)
    waiting = Waiting(credit)
    assert waiting.is_held()
    assert waiting.ends_after(credit.stop) == "stopped"


def test_a_channel_is_drained_when_every_row_was_read_by_everybody(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, RIGHT)
    assert credit.is_drained()
    append_batch(log)
    append_barrier(log, 1)
    append_batch(log, rows=0)
    credit.reported(read(LEFT, 1))
    assert not credit.is_drained()
    credit.reported(read(RIGHT, 1))
    assert credit.is_drained()


def test_the_backlog_is_counted_in_rows_per_consumer(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, RIGHT)
    append_batch(log, rows=5)
    append_batch(log, rows=7)
    credit.reported(read(LEFT, 1))
    assert credit.backlog() == {LEFT: 7, RIGHT: 12}


def test_what_was_truncated_away_takes_no_room(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT, entries=1)
    for _ in range(3):
        append_batch(log)
    credit.reported(read(LEFT, 3))
    log.truncate(Position(3))
    credit.begin_batch()
    assert credit.backlog() == {LEFT: 0}


def test_a_consumer_that_was_restored_reads_again(log: ChannelLog) -> None:
    credit = credits_of(log, LEFT)
    for _ in range(3):
        append_batch(log)
    credit.reported(read(LEFT, 3))
    assert credit.is_drained()
    credit.reported(read(LEFT, 1, generation=2))
    assert credit.backlog() == {LEFT: 2}
    credit.reported(read(LEFT, 3, generation=1))
    assert credit.backlog() == {LEFT: 2}, "its former self no longer counts"
