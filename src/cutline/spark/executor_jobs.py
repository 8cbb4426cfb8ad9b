"""Runs work outside of queries on Spark's executors, in separate jobs."""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cutline.errors import ExecutorsFailedError

Part = TypeVar("Part")
Report = TypeVar("Report")

#: A stopped context has lost its attributes and raises AttributeError.
_FAILURES = (Py4JError, PySparkException, ConnectionError, EOFError, AttributeError)
_GROUP_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


class SparkExecutors:
    """See ``cutline.ports.executors``. The jobs of one flow are one job group, so that they can be cancelled."""

    def __init__(self, session: SparkSession, flow: str) -> None:
        self._context: SparkContext = session.sparkContext
        self._flow = flow
        self._group = f"cutline-{flow}-{uuid.uuid4()}"

    def are_elsewhere(self) -> bool:
        return re.fullmatch(r"local(\[.*\])?", self._context.master or "local") is None

    def slots(self) -> int:
        # No separate scheduler pool: first come, first served, and never more than half of the slots. Queries wait for
        # a slot at most until one part is done.
        with contextlib.suppress(*_FAILURES):
            return max(self._context.defaultParallelism // 2, 1)
        return 1

    def run(self, work: Callable[[Part], Report], parts: Sequence[Part], *, limit_s: float) -> list[Report]:
        overdue = threading.Timer(limit_s, self.cancel)
        overdue.daemon = True
        overdue.start()
        try:
            with self._as_group():
                return self._context.parallelize(parts, len(parts)).map(work).collect()
        except _FAILURES as error:
            # The JVM's text contains the whole stack; its first line names the error.
            why = (str(getattr(error, "java_exception", "")) or str(error) or type(error).__name__).splitlines()[0]
            raise ExecutorsFailedError(f"a Spark job failed: {why}", flow=self._flow) from error
        finally:
            overdue.cancel()

    def cancel(self) -> None:
        with contextlib.suppress(*_FAILURES):
            self._context.cancelJobGroup(self._group)

    @contextlib.contextmanager
    def _as_group(self) -> Iterator[None]:
        """The thread may be the user's own and already have a job group."""
        before = {name: self._context.getLocalProperty(name) for name in _GROUP_PROPERTIES}
        self._context.setJobGroup(self._group, f"cutline: files of {self._flow}", interruptOnCancel=True)
        try:
            yield
        finally:
            with contextlib.suppress(*_FAILURES):
                for name, value in before.items():
                    self._context.setLocalProperty(name, value)  # type: ignore[arg-type]
