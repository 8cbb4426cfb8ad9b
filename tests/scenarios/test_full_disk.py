"""A disk that is full makes the flow wait in a named state; when there is room, it continues by itself and exactly."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.base import durable
from cutline.channels.entry_files import generation_dir
from cutline.errors import StorageError
from cutline.model.ids import OperatorId
from cutline.model.status import FlowStatus
from cutline.testing.twins.engine import IdleQuery, MemoryEngine
from cutline.worker.backpressure import StopAtBoundary
from tests.support.running import assert_each_once, running
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.sparkless import NUMBERS, TOTALS, SparklessFlow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64_000) as disk:
        yield disk


class Queries:
    """Runs the batches on threads of their own, as Spark does: a batch that fails is run again."""

    def __init__(self, flow: SparklessFlow, most: int) -> None:
        self._flow = flow
        self._most = most
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in (NUMBERS, TOTALS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, operator: OperatorId) -> None:
        while not self._is_over.wait(0.002):
            try:
                if operator != NUMBERS or self._flow.operators[NUMBERS].channel.last_batch < self._most - 1:
                    self._flow.step(operator)
            except OSError:
                self._is_over.wait(0.02)  # the query has failed, and is restarted
            except StopAtBoundary:
                return

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(20)


def status_of(flow: SparklessFlow) -> FlowStatus:
    """What another process sees."""
    return msgspec.json.decode(flow.layout.status.read_bytes(), type=FlowStatus)


@pytest.mark.parametrize("settings", [{}, {"mode": "per-operator"}], ids=["epochs", "per-operator"])
def test_a_flow_waits_for_room_and_continues_by_itself(disk: SmallDisk, settings: dict[str, Any]) -> None:
    with running(disk.folder, checkpoint_interval="50ms", **settings) as flow:
        with Queries(flow, 200):
            flow.wait(lambda: len(flow.sink.rows()) > 20 and flow.layout.status.exists())
            for _ in range(2):
                disk.fill()
                flow.wait(lambda: flow.run.status().state == "waiting")
                waiting = flow.run.status().waiting[0]
                assert waiting.resource in ("the disk", "coordinator.sqlite")
                assert waiting.since_ms > 0
                assert not flow.run.status().health.healthy
                assert "waits for" in flow.run.status().health.reason
                flow.wait(lambda: status_of(flow).state == "waiting")
                flow.wait(lambda: any(one.attempts > 1 for one in flow.run.status().waiting))
                disk.free()
                flow.wait(lambda: flow.run.status().state == "running")
            flow.wait(lambda: len(flow.sink.rows()) == 200)
        assert flow.run.status().health.healthy
        assert_each_once(flow.sink.rows())
    with running(disk.folder, checkpoint_interval=0, **settings) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(3)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 203


def test_a_flow_that_waits_for_room_can_be_stopped_and_resumes(disk: SmallDisk) -> None:
    flow = SparklessFlow(disk.folder, checkpoint_interval="50ms")
    with Queries(flow, 10_000):
        flow.wait(lambda: len(flow.sink.rows()) > 20)
        disk.fill()
        flow.wait(lambda: flow.run.status().state == "waiting")
        stopping = threading.Thread(target=flow.stop)
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive(), "it stops although it waits"
    assert flow.run._lifecycle.failure is None
    disk.free()
    with running(disk.folder, checkpoint_interval=0) as flow:
        assert flow.recovered.path == "resume"
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_start_on_a_full_disk_is_refused_in_a_few_lines_and_changes_nothing(disk: SmallDisk) -> None:
    with running(disk.folder) as flow:
        flow.emit(3)
        flow.drain()
    disk.fill()
    with pytest.raises(StorageError, match=r"full|no room|cannot be used") as caught:
        SparklessFlow(disk.folder)
    assert "make room" in str(caught.value)
    assert "flow=counting" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    disk.free()
    with running(disk.folder) as flow:
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 4


def test_records_that_cannot_be_opened_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with running(tmp_path) as flow:
        metadata = flow.layout.metadata
    metadata.unlink()
    metadata.mkdir()
    with pytest.raises(StorageError, match="records cannot be opened") as caught:
        SparklessFlow(tmp_path)
    assert "check that it is a file" in caught.value.next_step
    assert "make room" not in str(caught.value)


def test_a_first_start_on_a_full_disk_is_refused_in_a_few_lines(disk: SmallDisk) -> None:
    (disk.folder / "table").mkdir()
    (disk.folder / "storage" / "counting").mkdir(parents=True)
    disk.fill()
    with pytest.raises(StorageError, match=r"full|no room|cannot be used"):
        SparklessFlow(disk.folder)


def test_a_barrier_waits_for_a_batch_that_is_on_disk_and_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find its position taken, as if another process ran the flow."""
    with running(tmp_path) as flow:
        flow.emit(1)
        service, sync, is_full = flow.operators[NUMBERS], durable.fsync_dir, threading.Event()
        folder = generation_dir(service.channel.folder, service.channel.lineage.generation)

        def fsync_dir(path: Path) -> None:
            if path == folder and is_full.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(path)

        is_full.set()
        monkeypatch.setattr(durable, "fsync_dir", fsync_dir)
        batch = threading.Thread(target=flow.step, args=(NUMBERS,))
        batch.start()
        flow.wait(lambda: flow.run.status().state == "waiting")
        future = flow.request()
        flow.wait(lambda: bool(service._todo))
        is_full.clear()
        batch.join(20)
        flow.wait(lambda: future.done() or (not flow.step(TOTALS) and future.done()))
        assert future.result(0) == 1
        flow.emit(1)
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3


def test_a_query_is_held_back_until_its_gates_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, started, set_gate = threading.Event(), list[str](), MemoryEngine.set_gate

    def gate(*args: Any) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        set_gate(*args)

    def start(engine: MemoryEngine, operator: OperatorId, *_: Any) -> IdleQuery:
        started.append(operator)
        return IdleQuery()

    monkeypatch.setattr(MemoryEngine, "set_gate", gate)
    monkeypatch.setattr(MemoryEngine, "start", start)
    is_full.set()
    with running(tmp_path) as flow:
        assert started == [NUMBERS]
        assert flow.run.status().state == "waiting"
        is_full.clear()
        flow.wait(lambda: started == [NUMBERS, TOTALS])
        flow.emit(1)
        flow.wait(lambda: flow.run.status().state == "running")
