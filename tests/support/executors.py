"""Executors without Spark: work is pickled as for a cluster, and done here; the test says what goes wrong."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cutline.errors import ExecutorsFailedError


class PickledExecutors:
    """See ``cutline.ports.Executors``."""

    def __init__(self, slots: int = 2) -> None:
        self._slots = slots
        #: Parts that were handed over, by job.
        self.jobs: list[list[Any]] = []
        #: Called before a part is worked on; may raise, or change the world.
        self.before: Callable[[], None] = lambda: None
        #: So many parts of a job are done before its executors are lost; None: all.
        self.lost_after: int | None = None
        #: What becomes of a report on its way.
        self.told: Callable[[Any], Any] = lambda report: report
        self.cancelled = threading.Event()

    def are_elsewhere(self) -> bool:
        return True

    def slots(self) -> int:
        return self._slots

    def run(self, work: Callable[[Any], Any], parts: Sequence[Any], *, limit_s: float) -> list[Any]:
        self.jobs.append(list(parts))
        pickled = pickle.dumps(work)
        reports = []
        for number, part in enumerate(parts):
            if number == self.lost_after:
                raise ExecutorsFailedError("the executors are lost")
            self.before()
            if self.cancelled.is_set():
                raise ExecutorsFailedError("cancelled")
            report = pickle.loads(pickled)(pickle.loads(pickle.dumps(part)))
            reports.append(self.told(pickle.loads(pickle.dumps(report))))
        if self.lost_after is not None:
            raise ExecutorsFailedError("the executors are lost")
        return reports

    def cancel(self) -> None:
        self.cancelled.set()
