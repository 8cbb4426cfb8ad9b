"""Who carries files between a flow's folder and an object store: threads of the driver, or executors if it is much.

What executors say is believed only if the driver finds it so. Whatever they could not do, the driver does itself: an
executor may not see the flow's folder, may lack the credentials, or may be lost, and none of that is an error.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from cutline.base.logs import get_logger
from cutline.errors import CutlineError, DamagedRecordError, ExecutorsFailedError, NotDone, StoreError
from cutline.model.layout import Layout
from cutline.ports.executors import Executors
from cutline.ports.objects import ObjectStore
from cutline.tiers.transfer import Carried, Errand, File

log = get_logger(__name__)

#: Files under way at once in the driver.
PARALLELISM = 8
#: Most that one task of a job carries: a task holds its slot until it ends, and queries want slots too. A file that is
#: larger is still carried by one task.
_TASK_BYTES = 64 << 20
#: Files under way at once in one task: a single upload rarely fills the line.
_TASK_THREADS = 4
#: A job that has not ended by then, perhaps because no slot came free, is given up.
_JOB_SECONDS = 300.0

Item = TypeVar("Item")
Result = TypeVar("Result")
#: Hears of every file that has arrived, on any thread, and when its carrying began.
Done = Callable[[Carried, float], None]


class Carrier(Protocol):
    """Carries files; may be called from one thread at a time, ``give_up`` from any."""

    def carry(self, errand: Errand, files: Sequence[File], done: Done) -> None:
        """All of them have arrived when it returns. Raises StoreError or DamagedRecordError: those that ``done`` has
        heard of have arrived nevertheless.
        """
        ...

    def give_up(self) -> None:
        """Make ``carry`` end soon, with NotDone, now and ever after. To be repeated until it has ended."""
        ...


class ThreadCarrier:
    """Threads of this process."""

    def __init__(self, store: ObjectStore, root: Path, parallelism: int) -> None:
        self._store = store
        self._root = root
        self._parallelism = parallelism
        self._is_given_up = threading.Event()

    def carry(self, errand: Errand, files: Sequence[File], done: Done) -> None:
        def one(file: File) -> None:
            if self._is_given_up.is_set():
                raise NotDone("the flow stops", store=self._store.url)
            begun_s = time.monotonic()
            done(_carry_one(errand, self._store, self._root, file), begun_s)

        self._map(one, files)

    def arrived(self, errand: Errand, carried: Sequence[Carried]) -> list[Carried]:
        """Those that can be seen from here. Raises StoreError."""
        seen = self._map(lambda one: errand.has_arrived(self._store, self._root, one), carried)
        return [one for one, is_seen in zip(carried, seen, strict=True) if is_seen]

    def give_up(self) -> None:
        self._is_given_up.set()

    def _map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        if not items:
            return []
        with ThreadPoolExecutor(min(self._parallelism, len(items))) as pool:
            return list(pool.map(work, items))


class ExecutorCarrier:
    """Executors, when there is much to carry; the driver's threads for the rest."""

    def __init__(
        self,
        executors: Executors,
        open_store: Callable[[], ObjectStore],
        layout: Layout,
        driver: ThreadCarrier,
        *,
        least_bytes: int,
    ) -> None:
        """``open_store`` travels to the executors; ``least_bytes``: with less it is not worth a job."""
        self._executors = executors
        self._open_store = open_store
        self._layout = layout
        self._driver = driver
        self._least_bytes = least_bytes
        self._is_given_up = threading.Event()
        #: An executor has said that it does not see the flow's folder, which is a matter of how the cluster is made.
        self._are_blind = False

    def carry(self, errand: Errand, files: Sequence[File], done: Done) -> None:
        left = {file.name: file for file in files}

        def noted(carried: Carried, begun_s: float) -> None:
            del left[carried.file.name]
            done(carried, begun_s)

        if not self._are_blind and sum(file.size_bytes for file in files) >= self._least_bytes:
            self._by_executors(errand, files, noted)
        self._driver.carry(errand, list(left.values()), done)

    def give_up(self) -> None:
        self._is_given_up.set()
        self._driver.give_up()
        self._executors.cancel()

    def _by_executors(self, errand: Errand, files: Sequence[File], done: Done) -> None:
        work = partial(_carry_part, self._open_store, _folder_of(self._layout), errand)
        for parts in jobs_of(files, self._executors.slots()):
            if self._is_given_up.is_set():
                return
            # Of all that the job carries: when each file began is known only on the executors' clocks.
            begun_s = time.monotonic()
            try:
                reports = self._executors.run(work, parts, limit_s=_JOB_SECONDS)
            except ExecutorsFailedError as error:
                if not self._is_given_up.is_set():
                    log.warning("executors_did_not_carry_all", reason=str(error))
                return
            arrived = self._driver.arrived(errand, [one for report in reports for one in report.carried])
            for carried in arrived:
                done(carried, begun_s)
            problems = [report.problem for report in reports if report.problem]
            self._are_blind = _UNSEEN in problems
            if problems or not arrived:
                reason = problems[0] if problems else "they do not see the files, or not the same store"
                log.warning("executors_did_not_carry_all", reason=reason)
                return


_UNSEEN = "an executor does not see the flow's folder; the driver carries all from now on"


class _Report(NamedTuple):
    """What became of one task's part."""

    carried: list[Carried]
    #: What will not go better with the next part; empty if there is no such thing.
    problem: str


class _Folder(NamedTuple):
    """The flow's folder, so that an executor knows it from one of the same name on a disk of its own."""

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


def _carry_part(
    open_store: Callable[[], ObjectStore], folder: _Folder, errand: Errand, part: Sequence[File]
) -> _Report:
    """Runs on an executor. Raises nothing: a failed task would be repeated, and take the others' reports with it."""
    carried: list[Carried] = []
    problems: list[str] = []
    if not _is_seen(folder):  # what is fetched would lie on a disk where nobody looks for it, or clears it away
        return _Report([], _UNSEEN)
    try:
        store = open_store()
    except CutlineError as error:
        return _Report([], str(error))

    def one(file: File) -> None:
        try:
            if not problems:
                carried.append(_carry_one(errand, store, Path(folder.root), file))
        except StoreError as error:
            problems.append(str(error))
        except DamagedRecordError:
            pass  # or this host sees another folder than the driver, who will find out

    with ThreadPoolExecutor(_TASK_THREADS) as pool:
        list(pool.map(one, part))
    return _Report(carried, problems[0] if problems else "")


def _carry_one(errand: Errand, store: ObjectStore, root: Path, file: File) -> Carried:
    try:
        return errand.carry(store, root, file)
    except OSError as error:
        raise DamagedRecordError(f"a file cannot be read or written: {error}", path=file.name) from error


def jobs_of(files: Iterable[File], slots: int) -> Iterator[list[list[File]]]:
    """Jobs one after the other, each with a part for every task; all parts of a job are about equally large."""
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
    """The largest first, each to who has least."""
    parts: list[list[File]] = [[] for _ in range(min(slots, len(files)))]
    loads = [(0, number) for number in range(len(parts))]
    for file in files:
        load_bytes, number = loads[0]
        parts[number].append(file)
        heapq.heapreplace(loads, (load_bytes + file.size_bytes, number))
    return parts
