"""Executors in this process: work is pickled, as for a cluster."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from cutline.errors import ExecutorsFailedError

Part = TypeVar("Part")
Report = TypeVar("Report")


class MemoryExecutors:
    """See ``cutline.ports.executors`` for what each method promises."""

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots
        self._running = threading.Event()
        self._cancelled = threading.Event()

    def are_elsewhere(self) -> bool:
        return False

    def slots(self) -> int:
        return self._slots

    def run(self, work: Callable[[Part], Report], parts: Sequence[Part], *, limit_s: float) -> list[Report]:
        self._cancelled.clear()
        self._running.set()
        pickled = pickle.dumps(work)
        try:
            reports = []
            for part in parts:
                if self._cancelled.is_set():
                    raise ExecutorsFailedError("the job was cancelled")
                data = pickle.dumps(part)
                try:
                    report = pickle.loads(pickled)(pickle.loads(data))
                except Exception as error:
                    raise ExecutorsFailedError(f"a task failed: {error}") from error
                reports.append(pickle.loads(pickle.dumps(report)))
            return reports
        finally:
            self._running.clear()

    def cancel(self) -> None:
        if self._running.is_set():
            self._cancelled.set()
