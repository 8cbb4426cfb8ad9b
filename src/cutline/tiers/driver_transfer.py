"""Transfers many files between the tiers with threads of the driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from cutline.errors import DamagedRecordError, NotDone
from cutline.ports.objects import ObjectStore
from cutline.tiers.transfer import Direction, File, Transferred

#: Files transferred in parallel in the driver.
PARALLELISM = 8

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Called on any thread for every file that has arrived, with the time at which its transfer began.
Done = Callable[[Transferred, float], None]


class Transfer(Protocol):
    """Transfers files; ``run`` may be called from one thread at a time, ``give_up`` from any."""

    def run(self, direction: Direction, files: Sequence[File], done: Done) -> None:
        """Return when all files have arrived. Raises StoreError or DamagedRecordError; the files that were reported to
        ``done`` have arrived nevertheless.
        """
        ...

    def give_up(self) -> None:
        """Make this and every later ``run`` end soon with NotDone. Repeat the call until ``run`` has ended."""
        ...


class DriverTransfer:
    """Threads of this process."""

    def __init__(self, store: ObjectStore, root: Path, parallelism: int) -> None:
        self._store = store
        self._root = root
        self._parallelism = parallelism
        self._is_given_up = threading.Event()

    def run(self, direction: Direction, files: Sequence[File], done: Done) -> None:
        def one(file: File) -> None:
            if self._is_given_up.is_set():
                raise NotDone("the flow stops", store=self._store.url)
            begun_s = time.monotonic()
            done(transfer_one(direction, self._store, self._root, file), begun_s)

        self._map(one, files)

    def arrived(self, direction: Direction, reported: Sequence[Transferred]) -> list[Transferred]:
        """The reported files that the driver can see. Raises StoreError."""
        seen = self._map(lambda one: direction.has_arrived(self._store, self._root, one), reported)
        return [one for one, is_seen in zip(reported, seen, strict=True) if is_seen]

    def give_up(self) -> None:
        self._is_given_up.set()

    def _map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        if not items:
            return []
        with ThreadPoolExecutor(min(self._parallelism, len(items))) as pool:
            return list(pool.map(work, items))


def transfer_one(direction: Direction, store: ObjectStore, root: Path, file: File) -> Transferred:
    try:
        return direction.transfer(store, root, file)
    except OSError as error:
        raise DamagedRecordError(f"a file cannot be read or written: {error}", path=file.name) from error
