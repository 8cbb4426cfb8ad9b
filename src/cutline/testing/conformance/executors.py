"""The suite that every executors adapter must pass."""

from __future__ import annotations

import os
import threading

import pytest

from cutline.errors import ExecutorsFailedError
from cutline.ports.executors import Executors

_LIMIT_S = 60.0


class ExecutorsConformance:
    """Subclasses have a fixture ``executors``."""

    def test_there_is_at_least_one_slot(self, executors: Executors) -> None:
        assert executors.slots() >= 1
        assert executors.are_elsewhere() in (True, False)

    def test_reports_come_in_the_order_of_the_parts(self, executors: Executors) -> None:
        assert executors.run(_double, [3, 1, 2], limit_s=_LIMIT_S) == [6, 2, 4]

    def test_work_that_fails_says_nothing_of_what_was_done(self, executors: Executors) -> None:
        with pytest.raises(ExecutorsFailedError):
            executors.run(_fail_at_two, [1, 2, 3], limit_s=_LIMIT_S)
        assert executors.run(_double, [4], limit_s=_LIMIT_S) == [8], "it can be used again"

    def test_parts_are_pickled(self, executors: Executors) -> None:
        with pytest.raises(Exception, match=r"pickle|serializ"):
            executors.run(_kind, [threading.Lock()], limit_s=_LIMIT_S)

    def test_cancelling_without_a_job_does_nothing(self, executors: Executors) -> None:
        executors.cancel()
        assert executors.run(_double, [1], limit_s=_LIMIT_S) == [2]


def _double(part: int) -> int:
    return part * 2


def _fail_at_two(part: int) -> int:
    if part == 2:
        raise RuntimeError(f"process {os.getpid()} cannot do this")
    return part


def _kind(part: object) -> str:
    return type(part).__name__
