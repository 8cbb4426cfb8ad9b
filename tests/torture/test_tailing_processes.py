"""A log that is written by another process, which is killed on the way, is followed to its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from cutline.channels.log import ChannelLog
from cutline.channels.tailing import TailedLog
from cutline.model.ids import Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage
from tests.support.channels import append_barrier, append_batch, open_log

pytestmark = pytest.mark.kill

LONG = 30.0
FIRST = Lineage.begin(Generation(1))


def _write(folder: str, count: int) -> None:
    log = open_log(Path(folder))
    for number in range(count):
        append_barrier(log, number) if number % 4 == 3 else append_batch(log)


def _read_until(reader: TailedLog, count: int) -> None:
    deadline = time.monotonic() + LONG
    while len(reader.entries()) < count:
        reader.poll()
        assert time.monotonic() < deadline


def test_entries_of_another_process_are_read_as_they_come(tmp_path: Path) -> None:
    reader = TailedLog(OperatorId("op"), tmp_path, FIRST)
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(str(tmp_path), 80))
    process.start()
    _read_until(reader, 80)
    process.join()
    assert reader.entries() == open_log(tmp_path).entries()


def test_a_writer_that_is_killed_leaves_nothing_that_its_successor_cannot_go_on_from(tmp_path: Path) -> None:
    reader = TailedLog(OperatorId("op"), tmp_path, FIRST)
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(str(tmp_path), 100_000))
    process.start()
    _read_until(reader, 20)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while reader.poll():
        pass
    end = len(reader.entries())
    successor = ChannelLog.open(OperatorId("op"), tmp_path, FIRST.fork(Generation(2), Position(end)))
    reader.follow_fork(successor.lineage)
    append_batch(successor)
    _read_until(reader, end + 1)
    assert reader.entries() == successor.entries()
    reader.check_for_hole()
