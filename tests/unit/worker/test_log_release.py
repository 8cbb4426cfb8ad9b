"""Entries go on a thread of their own, only while no other process runs the flow, and every request is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cutline.channels.log import ChannelLog
from cutline.errors import FencedError
from cutline.model.ids import Generation, Position
from cutline.protocol.messages.wire import EntriesReleased
from cutline.worker import log_release
from cutline.worker.log_release import LogRelease
from tests.support.channels import append_batch, open_log
from tests.support.outbox import KeptOutbox

LONG = 10.0


@pytest.fixture
def log(tmp_path: Path) -> ChannelLog:
    log = open_log(tmp_path)
    for _ in range(5):
        append_batch(log)
    return log


class Desk:
    def __init__(self, log: ChannelLog, check_fence: Callable[[], None] = lambda: None) -> None:
        outbox = KeptOutbox()
        self.heard = outbox.heard
        self.release = LogRelease(log, Generation(3), check_fence=check_fence, outbox=outbox)
        self.release.start()

    def ask(self, below: int) -> EntriesReleased:
        self.release.request(Position(below))
        answer = self.heard.get(timeout=LONG)
        assert isinstance(answer, EntriesReleased)
        return answer


def test_what_is_released_goes_and_is_confirmed(log: ChannelLog) -> None:
    desk = Desk(log)
    assert desk.ask(3) == EntriesReleased(operator=log.operator, generation=Generation(3), below=Position(3))
    assert log.start == 3
    desk.release.stop()
    assert desk.release.has_ended()


def test_a_request_that_is_repeated_or_late_changes_nothing(log: ChannelLog) -> None:
    desk = Desk(log)
    for below in (3, 3, 1):
        assert desk.ask(below).below == below
    assert log.start == 3
    desk.release.stop()


def test_a_process_that_was_replaced_deletes_nothing_and_says_so_all_the_same(log: ChannelLog) -> None:
    def check_fence() -> None:
        raise FencedError("another process runs the flow")

    desk = Desk(log, check_fence)
    assert desk.ask(3).below == 3
    assert log.start == 0
    desk.release.stop()


def test_what_is_queued_when_it_stops_is_left_to_the_next_start(
    log: ChannelLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_release, "_STOP_SECONDS", 0.0)
    entered, go = threading.Event(), threading.Event()
    checks: list[bool] = []

    def check_fence() -> None:
        checks.append(True)
        entered.set()
        assert go.wait(LONG)

    desk = Desk(log, check_fence)
    desk.release.request(Position(1))
    assert entered.wait(LONG)
    for below in (2, 4, 3):
        desk.release.request(Position(below))
    stopping = threading.Thread(target=desk.release.stop)
    stopping.start()
    assert desk.release._is_stopping.wait(LONG)
    go.set()
    stopping.join(LONG)
    assert desk.release.has_ended()
    assert log.start == 1
    assert len(checks) == 1
    assert desk.heard.get_nowait() == EntriesReleased(
        operator=log.operator, generation=Generation(3), below=Position(1)
    )
    assert desk.heard.empty()
    again = Desk(log)  # positions are cumulative: the next release covers what was dropped
    assert again.ask(4).below == 4
    assert log.start == 4
    again.release.stop()


def test_a_short_run_performs_its_first_release_though_it_stops(log: ChannelLog) -> None:
    outbox = KeptOutbox()
    release = LogRelease(log, Generation(3), check_fence=lambda: None, outbox=outbox)
    for below in (1, 3, 2):
        release.request(Position(below))
    release._is_stopping.set()
    release.start()
    release.stop()
    assert log.start == 3


def test_what_is_asked_for_after_the_stop_is_left(log: ChannelLog) -> None:
    desk = Desk(log)
    desk.release.stop()
    desk.release.request(Position(3))
    assert log.start == 0 and desk.heard.empty()
