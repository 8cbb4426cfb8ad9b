"""A running Spark query; a lost JVM becomes one error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.listener import StateOperatorProgress
from pyspark.sql.streaming.query import StreamingQuery

from cutline.errors import JvmLostError
from cutline.model.ids import FlowName


@contextlib.contextmanager
def _asking_jvm(flow: FlowName) -> Iterator[None]:
    """Turns py4j's various errors for a lost JVM into one error; errors that the JVM itself reports pass unchanged."""
    try:
        yield
    except Py4JJavaError:
        raise
    except (Py4JError, ConnectionError, EOFError) as error:
        raise JvmLostError(
            "the JVM that runs the queries has ended",
            next_step="find the cause (its output, the kernel's log), then restart the flow: it resumes where it ended",
            flow=flow,
        ) from error


class SparkQuery:
    """A running query. See ``cutline.ports.Query``."""

    def __init__(self, query: StreamingQuery, flow: FlowName) -> None:
        self._query = query
        self._flow = flow

    def is_active(self) -> bool:
        try:
            with _asking_jvm(self._flow):
                return self._query.isActive
        except JvmLostError:
            return False

    def is_idle(self) -> bool:
        with _asking_jvm(self._flow):
            status = self._query.status
            return not status["isTriggerActive"] and not status["isDataAvailable"]

    def failure(self) -> str | None:
        """The whole trace of the error that has ended the query; None: it ended without one.

        Raises JvmLostError if the JVM has ended: a restart of the query would not help.
        """
        with _asking_jvm(self._flow):
            error = self._query.exception()
            return str(error) if error else None

    def stop(self) -> None:
        with contextlib.suppress(JvmLostError), _asking_jvm(self._flow):
            self._query.stop()

    def wait_processed(self) -> None:
        # ``failure`` reports what was wrong; the supervisor handles it.
        with contextlib.suppress(StreamingQueryException, JvmLostError), _asking_jvm(self._flow):
            self._query.processAllAvailable()

    def state_bytes(self) -> int | None:
        with contextlib.suppress(JvmLostError, Py4JJavaError), _asking_jvm(self._flow):
            latest = self._query.lastProgress
            if latest is not None and latest.stateOperators:
                return sum(map(_state_bytes, latest.stateOperators))
        return None


def _state_bytes(operator: StateOperatorProgress) -> int:
    """RocksDB tells how large its files are; the heap provider keeps all state in memory."""
    files = operator.customMetrics.get("rocksdbSstFileSize", 0)
    return max(int(files), operator.memoryUsedBytes)
