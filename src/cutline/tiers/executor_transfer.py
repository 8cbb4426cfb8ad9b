"""Transfers many files between a flow's folder and an object store: executors transfer them, the driver checks.

A file that executors report counts only if the driver finds it. The driver transfers the rest itself: an executor may
not see the flow's folder, may lack the credentials, or may be lost, and none of that is an error.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cutline.base.logs import get_logger
from cutline.errors import CutlineError, DamagedRecordError, ExecutorsFailedError, StoreError
from cutline.model.layout import Layout
from cutline.ports.executors import Executors
from cutline.ports.objects import ObjectStore
from cutline.tiers.driver_transfer import Done, DriverTransfer, transfer_one
from cutline.tiers.transfer import Direction, File, Transferred

log = get_logger(__name__)

#: Limit per task: a task holds its slot until it ends, and queries need slots too. One task still transfers a larger
#: file whole.
_TASK_BYTES = 64 << 20
#: Files transferred in parallel in one task: a single upload rarely uses the whole bandwidth.
_TASK_THREADS = 4
#: A job that has not ended by then, for example because no slot became free, is cancelled.
_JOB_SECONDS = 300.0


class ExecutorTransfer:
    """Uses executors when there is much to transfer, and the driver's threads for the rest."""

    def __init__(
        self,
        executors: Executors,
        open_store: Callable[[], ObjectStore],
        layout: Layout,
        driver: DriverTransfer,
        *,
        least_bytes: int,
    ) -> None:
        """``open_store`` is sent to the executors; fewer than ``least_bytes`` are not worth a job."""
        self._executors = executors
        self._open_store = open_store
        self._layout = layout
        self._driver = driver
        self._least_bytes = least_bytes
        self._is_given_up = threading.Event()
        #: An executor has reported that it does not see the flow's folder; the cluster's setup does not change.
        self._are_blind = False

    def run(self, direction: Direction, files: Sequence[File], done: Done) -> None:
        left = {file.name: file for file in files}

        def noted(transferred: Transferred, begun_s: float) -> None:
            del left[transferred.file.name]
            done(transferred, begun_s)

        if not self._are_blind and sum(file.size_bytes for file in files) >= self._least_bytes:
            self._by_executors(direction, files, noted)
        self._driver.run(direction, list(left.values()), done)

    def give_up(self) -> None:
        self._is_given_up.set()
        self._driver.give_up()
        self._executors.cancel()

    def _by_executors(self, direction: Direction, files: Sequence[File], done: Done) -> None:
        work = partial(_transfer_part, self._open_store, _folder_of(self._layout), direction)
        for parts in jobs_of(files, self._executors.slots()):
            if self._is_given_up.is_set():
                return
            # One time for all files of the job: only the executors' clocks know when each transfer began.
            begun_s = time.monotonic()
            try:
                reports = self._executors.run(work, parts, limit_s=_JOB_SECONDS)
            except ExecutorsFailedError as error:
                if not self._is_given_up.is_set():
                    log.warning("executor_transfer_incomplete", reason=str(error))
                return
            arrived = self._driver.arrived(direction, [one for report in reports for one in report.transferred])
            for transferred in arrived:
                done(transferred, begun_s)
            problems = [report.problem for report in reports if report.problem]
            self._are_blind = _UNSEEN in problems
            if problems or not arrived:
                reason = problems[0] if problems else "they do not see the files, or not the same store"
                log.warning("executor_transfer_incomplete", reason=reason)
                return


_UNSEEN = "an executor does not see the flow's folder; the driver transfers all from now on"


class _Report(NamedTuple):
    """The result of one task's part."""

    transferred: list[Transferred]
    #: A problem that the next part would have too; empty if there is none.
    problem: str


class _Folder(NamedTuple):
    """Identifies the flow's folder, so that an executor can tell it from a folder of the same path on its own disk."""

    root: str
    identity: str
    content: bytes


def _folder_of(layout: Layout) -> _Folder:
    return _Folder(str(layout.root), str(layout.identity), layout.identity.read_bytes())


def _is_seen(folder: _Folder) -> bool:
    try:
        return Path(folder.identity).read_bytes() == folder.content
    except OSError:
        return False


def _transfer_part(
    open_store: Callable[[], ObjectStore], folder: _Folder, direction: Direction, part: Sequence[File]
) -> _Report:
    """Runs on an executor. Raises nothing: Spark would repeat a failed task, and lose the other tasks' reports."""
    transferred: list[Transferred] = []
    problems: list[str] = []
    if not _is_seen(folder):  # a download would go to a disk where it is never read, nor removed
        return _Report([], _UNSEEN)
    try:
        store = open_store()
    except CutlineError as error:
        return _Report([], str(error))

    def one(file: File) -> None:
        try:
            if not problems:
                transferred.append(transfer_one(direction, store, Path(folder.root), file))
        except StoreError as error:
            problems.append(str(error))
        except DamagedRecordError:
            pass  # or this host sees another folder than the driver, which will notice

    with ThreadPoolExecutor(_TASK_THREADS) as pool:
        list(pool.map(one, part))
    return _Report(transferred, problems[0] if problems else "")


def jobs_of(files: Iterable[File], slots: int) -> Iterator[list[list[File]]]:
    """Consecutive jobs, each with one part per task; all parts of a job are about equally large."""
    job: list[File] = []
    size_bytes = 0
    for file in sorted(files, key=lambda one: one.size_bytes, reverse=True):
        if job and size_bytes + file.size_bytes > slots * _TASK_BYTES:
            yield _parts_of(job, slots)
            job, size_bytes = [], 0
        job.append(file)
        size_bytes += file.size_bytes
    if job:
        yield _parts_of(job, slots)


def _parts_of(files: Sequence[File], slots: int) -> list[list[File]]:
    """Assigns the largest file first, each to the part that is smallest so far."""
    parts: list[list[File]] = [[] for _ in range(min(slots, len(files)))]
    loads = [(0, number) for number in range(len(parts))]
    for file in files:
        load_bytes, number = loads[0]
        parts[number].append(file)
        heapq.heapreplace(loads, (load_bytes + file.size_bytes, number))
    return parts
