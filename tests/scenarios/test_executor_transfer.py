"""Files carried by executors: what they cannot do the driver does, and nothing counts as sent that was not."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cutline.errors import DamagedRecordError, NotDone
from cutline.model.layout import Layout
from cutline.objects import open_store
from cutline.ports.objects import ObjectStore
from cutline.tiers import executor_transfer
from cutline.tiers.driver_transfer import DriverTransfer
from cutline.tiers.executor_transfer import ExecutorTransfer, jobs_of
from cutline.tiers.transfer import DOWNLOAD, UPLOAD, Direction, File, Transferred
from tests.support.executors import PickledExecutors
from tests.support.remote import copied, lose_host, remote, replica_of
from tests.support.running import assert_each_once, running


class Place:
    """A flow's folder, a store, executors; and what the carrier has said."""

    def __init__(self, tmp_path: Path, *, least_bytes: int = 0, at: str = "store") -> None:
        self.layout = Layout(tmp_path, "flow")
        self.root = self.layout.root
        self.root.mkdir(exist_ok=True)
        self.layout.identity.write_bytes(b"the flow's own")
        self.open: Callable[[], ObjectStore] = partial(open_store, str(tmp_path / at))
        self.store = open_store(str(tmp_path / "store"))
        self.executors = PickledExecutors()
        driver = DriverTransfer(self.store, self.root, 4)
        self.carrier = ExecutorTransfer(self.executors, self.open, self.layout, driver, least_bytes=least_bytes)
        self.done: list[Transferred] = []

    def blob(self, content: bytes) -> File:
        digest = hashlib.sha256(content).hexdigest()
        return self.file(f"blobs/{digest[:2]}/{digest}", content)

    def file(self, name: str, content: bytes) -> File:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return File(name, len(content))

    def carry(self, files: list[File], errand: Direction = UPLOAD) -> None:
        self.carrier.run(errand, files, lambda carried, _: self.done.append(carried))

    def names_done(self) -> list[str]:
        return sorted(one.file.name for one in self.done)

    def assert_all_there(self, files: list[File]) -> None:
        assert self.names_done() == sorted(file.name for file in files)
        for one in self.done:
            found = self.store.find(one.stored_as)
            assert found is not None and found.size_bytes == one.stored_bytes


def some_files(place: Place) -> list[File]:
    blobs = [place.blob(os.urandom(9_000)) for _ in range(3)]
    return [*blobs, place.blob(b"x" * 50_000), place.file("channels/numbers/data/one.arrow", b"rows" * 10)]


def test_executors_send_packed_and_checked_as_the_driver_does(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.carry(files)
    place.assert_all_there(files)
    by_executors = {info.path: place.store.read(info.path) for info in place.store.walk()}
    other = Place(tmp_path, least_bytes=1 << 30)
    place.store.delete(list(by_executors))
    other.carry(files)
    assert {info.path: place.store.read(info.path) for info in place.store.walk()} == by_executors
    assert other.executors.jobs == []


def test_little_is_sent_by_the_driver(tmp_path: Path) -> None:
    place = Place(tmp_path, least_bytes=1_000)
    small = place.blob(b"y" * 999)
    place.carry([small])
    assert place.executors.jobs == []
    place.carry([place.blob(b"z" * 1_000)])
    assert len(place.executors.jobs) == 1


def test_a_file_that_executors_cannot_see_is_sent_by_the_driver(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    hidden = place.root / files[0].name

    def before() -> None:
        if hidden.exists():
            hidden.rename(tmp_path / "hidden")

    def told(report: Any) -> Any:
        if (tmp_path / "hidden").exists():
            (tmp_path / "hidden").rename(hidden)
        return report

    place.executors.before, place.executors.told = before, told
    place.carry(files)
    place.assert_all_there(files)


@pytest.mark.parametrize("identity", [None, b"of another flow"])
def test_on_a_host_with_another_folder_of_that_name_nothing_is_written(tmp_path: Path, identity: bytes | None) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.carry(files)
    shutil.rmtree(place.root / "blobs")
    place.done.clear()
    seen: list[bool] = []

    def before() -> None:
        place.layout.identity.unlink()
        if identity is not None:
            place.layout.identity.write_bytes(identity)

    def told(report: Any) -> Any:
        seen.append((place.root / "blobs").exists())
        place.layout.identity.write_bytes(b"the flow's own")
        return report

    place.executors.before, place.executors.told = before, told
    jobs = len(place.executors.jobs)
    for _ in range(2):
        place.carry(files, DOWNLOAD)
    assert seen and not any(seen)
    assert place.names_done() == sorted([file.name for file in files] * 2)
    assert len(place.executors.jobs) == jobs + 1, "it is not asked again"


def test_another_file_of_the_same_name_on_an_executor_is_not_sent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    segment = place.file("channels/numbers/data/one.arrow", b"the driver's own")
    seen: list[bool] = []

    def before() -> None:
        (place.root / segment.name).write_bytes(b"another")

    def told(report: Any) -> Any:
        seen.append(place.store.find(segment.name) is not None)
        place.file(segment.name, b"the driver's own")
        return report

    place.executors.before, place.executors.told = before, told
    place.carry([segment])
    assert seen == [False]
    assert place.store.read(segment.name) == b"the driver's own"


def test_executors_that_write_to_a_folder_of_their_own_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_transfer, "_TASK_BYTES", 10_000)
    place = Place(tmp_path, at="a folder on the executor's disk")
    files = some_files(place)
    place.carry(files)
    assert len(place.executors.jobs) == 1, "the next ones would be in vain too"
    place.assert_all_there(files)


@pytest.mark.parametrize("lost_after", [0, 1, 2])
def test_lost_executors_leave_all_to_the_driver(tmp_path: Path, lost_after: int) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.executors.lost_after = lost_after
    place.carry(files)
    place.assert_all_there(files)


def _refusing() -> ObjectStore:
    raise NotDone("no credentials on this host")


class _Refusing:
    """A store that an executor can open and not write to."""

    url = "s3://bucket"

    def replace(self, path: str, data: bytes) -> None:
        raise NotDone("refused")


@pytest.mark.parametrize("opened", [_refusing, _Refusing])
def test_executors_that_may_not_write_cost_one_job_and_the_driver_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.carrier._open_store = opened
    monkeypatch.setattr(executor_transfer, "_TASK_BYTES", 10_000)
    place.carry(files)
    assert len(place.executors.jobs) == 1, "the next ones would have gone no better"
    place.assert_all_there(files)


def test_what_neither_can_send_counts_as_not_sent_and_the_rest_as_sent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    (place.root / files[0].name).write_bytes(b"r" * files[0].size_bytes)
    with pytest.raises(DamagedRecordError, match="does not match its hash"):
        place.carry(files)
    assert place.names_done() == sorted(file.name for file in files[1:])


def test_a_store_that_is_away_ends_as_a_store_error_and_nothing_counts_as_sent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.carrier._open_store = _refusing
    place.carrier._driver._store = _Refusing()  # type: ignore[assignment]
    with pytest.raises(NotDone, match="refused"):
        place.carry(files)
    assert place.done == []


def test_stopping_cancels_the_job_and_the_driver_does_not_go_on_in_its_place(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.executors.before = place.carrier.give_up
    with pytest.raises(NotDone, match="stops"):
        place.carry(files)
    assert place.executors.cancelled.is_set()
    assert place.done == [] and list(place.store.walk()) == []


def test_executors_fetch_what_is_large_and_the_driver_sees_to_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = some_files(place)
    place.carry(files)
    contents = {file.name: (place.root / file.name).read_bytes() for file in files}
    for file in files:
        (place.root / file.name).unlink()
    place.done.clear()
    gone = place.root / files[0].name

    def told(report: Any) -> Any:
        gone.unlink(missing_ok=True)  # it was put where only the executor sees it
        return report

    place.executors.told = told
    place.carry(files, DOWNLOAD)
    assert place.names_done() == sorted(contents)
    assert {name: (place.root / name).read_bytes() for name in contents} == contents


def test_a_segment_that_was_cut_short_there_is_not_taken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.store.replace("channels/numbers/data/one.arrow", b"ro")
    with pytest.raises(DamagedRecordError, match="size"):
        place.carry([File("channels/numbers/data/one.arrow", 4)], DOWNLOAD)
    assert not (place.root / "channels/numbers/data/one.arrow").exists()


def test_jobs_are_small_and_their_parts_even() -> None:
    sizes = [200, *(20 for _ in range(30)), 5, 5]
    files = [File(f"f{number}", size << 20) for number, size in enumerate(sizes)]
    jobs = list(jobs_of(files, 2))
    assert sorted(file for parts in jobs for part in parts for file in part) == sorted(files)
    assert jobs[0] == [[files[0]]], "a file is never divided"
    for parts in jobs[1:]:
        loads = [sum(file.size_bytes for file in part) for part in parts]
        assert sum(loads) <= 128 << 20 and len(parts) <= 2
        assert max(loads) - min(loads) <= 20 << 20
    assert list(jobs_of([], 4)) == []


# ------------------------------------------------------------------------------------------- a whole flow


def by_executors(tmp_path: Path, executors: PickledExecutors) -> dict[str, Any]:
    return {**remote(tmp_path), "executors": executors, "executor_transfer_bytes": 1}


def test_a_lost_host_comes_back_with_what_executors_carried(tmp_path: Path) -> None:
    executors = PickledExecutors()
    with running(tmp_path, **by_executors(tmp_path, executors)) as flow:
        flow.emit(3)
        copied(flow, flow.checkpoint())
        assert executors.jobs
    lose_host(tmp_path)
    executors = PickledExecutors()
    with running(tmp_path, **by_executors(tmp_path, executors)) as flow:
        assert flow.recovered.path == "remote" and executors.jobs
        flow.emit(2)
        flow.drain()
        assert_each_once(flow.sink.rows())


def test_a_flow_stops_quickly_in_the_middle_of_a_job_and_seals_nothing(tmp_path: Path) -> None:
    executors = PickledExecutors()
    is_working = threading.Event()

    def work_until_cancelled() -> None:
        is_working.set()
        executors.cancelled.wait(60)

    executors.before = work_until_cancelled
    with running(tmp_path, **by_executors(tmp_path, executors)) as flow:
        flow.emit(3)
        flow.checkpoint()
        flow.wait(is_working.is_set)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < 15
    assert flow.remote_status().failures == 0, "it was given up, which is no failure"
    assert replica_of(flow, tmp_path).checkpoints.epochs() == []
    with running(tmp_path, **by_executors(tmp_path, PickledExecutors())) as flow:
        copied(flow, flow.checkpoint())


def test_unless_it_is_asked_for_executors_carry_only_if_they_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.runtime.stores._WORTH_A_JOB_BYTES", 1)
    for are_elsewhere, number in ((False, 0), (True, 1)):
        monkeypatch.setattr(PickledExecutors, "are_elsewhere", lambda _, answer=are_elsewhere: answer)
        executors = PickledExecutors()
        with running(tmp_path / str(number), **remote(tmp_path / str(number)), executors=executors) as flow:
            flow.emit(1)
            copied(flow, flow.checkpoint())
        assert bool(executors.jobs) is are_elsewhere
