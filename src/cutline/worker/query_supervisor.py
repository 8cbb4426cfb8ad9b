"""Keeps an operator's query running: a failed one is restarted with doubling pauses, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cutline.base.logs import get_logger
from cutline.config.options import Options
from cutline.errors import FlowFailedError
from cutline.model.ids import FlowName
from cutline.ports import Engine, Query
from cutline.runtime.metrics import Metrics
from cutline.worker.operator import OperatorService

log = get_logger(__name__)

_LOOK_SECONDS = 0.1
#: A query that is behind its log and idle for so many looks must be started again to go on.
_IDLE_LOOKS = 10


class Supervisor:
    """Watches one query on a thread of its own."""

    def __init__(
        self,
        *,
        flow: FlowName,
        service: OperatorService,
        engine: Engine,
        options: Options,
        on_fatal: Callable[[BaseException], None],
        on_given_up: Callable[[OperatorService, FlowFailedError], None],
        metrics: Metrics,
    ) -> None:
        """``on_given_up`` hears when starting the query again and again has not helped."""
        self._flow = flow
        self._service = service
        self._engine = engine
        self._options = options
        self._on_fatal = on_fatal
        self._on_given_up = on_given_up
        self._metrics = metrics
        self._stopping = threading.Event()
        self._query: Query | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name=f"cutline-watch-{service.operator}", daemon=True)
        self.restarts = 0

    @property
    def query(self) -> Query | None:
        return self._query

    def start(self) -> None:
        self._start_query()
        self._thread.start()

    def _start_query(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._service.prepare_query()
                self._query = self._engine.start(
                    self._service.operator, self._service.spark_checkpoint_dir, self._service.handle_batch
                )

    def begin_stop(self) -> None:
        """From now on the query's end is wanted."""
        self._stopping.set()

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            query = self._query
        if query is not None:
            query.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        try:
            self._keep_running()
        except Exception as error:  # noqa: BLE001 (a dead JVM shows itself here first, in whatever form)
            if not self._stopping.is_set():
                self._on_fatal(error)

    def _keep_running(self) -> None:
        failures, last_batches, last_repeated, idle_looks = 0, -1, -1, 0
        while not self._stopping.wait(_LOOK_SECONDS):
            query = self._query
            if query is None or query.is_active():
                idle_looks = idle_looks + 1 if query and self._service.is_repeating() and query.is_idle() else 0
                if query and idle_looks > _IDLE_LOOKS:
                    # Spark sees no reason for the next batch of the log: prepared for it, it runs it all the same.
                    idle_looks = 0
                    query.stop()
                    self._start_query()
                continue
            error = query.failure() or "the query ended without an error"
            if self._stopping.is_set():
                return
            if self._service.is_plan_wrong() and self._service.repeated_total > last_repeated:
                last_repeated = self._service.repeated_total
                self._start_query()  # one batch of the log after the other, each as it was planned
                continue
            # Progress since the last failure starts the count anew: only failing on the spot is hopeless.
            batches = self._service.batches_total + self._service.repeated_total
            failures = 1 if batches > last_batches else failures + 1
            last_batches = batches
            if failures > self._options.restart_limit:
                self._on_given_up(
                    self._service,
                    FlowFailedError(
                        f"failed {failures} times without finishing a batch; the last error was:\n{error}\n",
                        next_step="mend the cause and start the flow again: it resumes where it stopped",
                        flow=self._flow,
                        operator=self._service.operator,
                    ),
                )
                return
            pause_ms = self._options.restart_backoff_ms * 2 ** (failures - 1)
            log.error(
                "query_failed",
                flow=self._flow,
                operator=self._service.operator,
                restart=failures,
                of=self._options.restart_limit,
                pause_ms=pause_ms,
                error=error,
            )
            if self._stopping.wait(pause_ms / 1000):
                return
            self.restarts += 1
            self._metrics.query_restarted(self._service.operator)
            try:
                self._start_query()
            except Exception as problem:  # noqa: BLE001 (Spark may refuse in many ways; all of them end the flow)
                self._on_fatal(problem)
                return
