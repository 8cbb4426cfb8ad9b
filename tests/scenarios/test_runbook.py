"""The sections of the runbook that need no Spark: each situation is produced, then its commands run as written.

The others are in tests/integration/test_runbook_on_spark.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cutline.model.status import FlowStatus
from cutline.runtime.lock import FlowLock
from tests.support.damage import flip_a_byte
from tests.support.doc_commands import Command, Shell, perform, read_steps
from tests.support.running import running
from tests.support.small_disk import small_disk
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"


@contextmanager
def reader(folder: Path, storage: Path) -> Iterator[Shell]:
    """The shell of a person in a folder whose cutline.toml names the storage."""
    with Shell(folder) as shell:
        (folder / "cutline.toml").write_text(f'storage = "{storage / "storage"}"\n')
        yield shell


@contextmanager
def payments(storage: Path, **settings: Any) -> Iterator[SparklessFlow]:
    """A running flow that other processes see as running."""
    with running(storage, name="payments", **settings) as flow:
        lock = FlowLock(flow.layout.lock, "payments")
        lock.acquire()
        try:
            yield flow
        finally:
            lock.release()


def commands(section: str) -> list[Command]:
    return [step for step in read_steps(RUNBOOK, section=section) if isinstance(step, Command)]


def told(flow: SparklessFlow) -> FlowStatus:
    """What another process sees."""
    return msgspec.json.decode(flow.layout.status.read_bytes(), type=FlowStatus)


def test_a_stuck_checkpoint(tmp_path: Path) -> None:
    stuck, aborted = commands("A stuck checkpoint")
    with reader(tmp_path / "reader", tmp_path) as shell, payments(tmp_path, checkpoint_timeout="6s") as flow:
        flow.emit(2)
        flow.checkpoint()
        flow.step(NUMBERS)
        flow.request(aligned=True)  # totals never reads up to the barrier
        flow.wait(lambda: bool(told(flow).checkpoints.pending))
        list(perform([stuck], shell))
        flow.wait(lambda: told(flow).history[0].outcome == "aborted")
        list(perform([aborted], shell))
        flow.step(TOTALS)
        assert flow.checkpoint() == 3, "the next checkpoint covers these rows"
        assert flow.sink.rows() == [[0, 1], [1, 2], [2, 3]]


def test_a_full_disk(tmp_path: Path) -> None:
    waiting, running_again = commands("A full disk")
    with (
        small_disk(tmp_path / "disk", 64_000) as disk,
        reader(tmp_path / "reader", disk.folder) as shell,
        payments(disk.folder, checkpoint_interval="50ms") as flow,
    ):
        flow.emit(3)
        flow.wait(lambda: flow.layout.status.exists() and len(flow.sink.rows()) == 3)
        for _ in range(2):  # old checkpoints that are collected meanwhile leave some room again
            disk.fill()
            flow.wait(lambda: told(flow).state == "waiting")
        list(perform([waiting], shell))
        disk.free()
        list(perform([running_again], shell))


def test_a_corrupt_file(tmp_path: Path) -> None:
    """Without the start that follows: that needs Spark."""
    with payments(tmp_path, retain_checkpoints=5) as flow:
        for _ in range(3):
            flow.emit(2)
            flow.checkpoint()
    assert flip_a_byte(flow.layout, TOTALS) == 3
    steps = [one for one in commands("A corrupt file") if one.code]
    assert len(steps) == 2
    with reader(tmp_path / "reader", tmp_path) as shell:
        assert list(perform(steps, shell)) == steps
