"""Keeps an operator's query running: a failed one is restarted with doubling pauses, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cutline.base.backoff import Backoff
from cutline.base.logs import get_logger
from cutline.config.options import Options
from cutline.errors import FlowFailedError
from cutline.model.ids import FlowName
from cutline.ports.engine import Engine, Query
from cutline.ports.telemetry import Telemetry
from cutline.worker.operator import OperatorService

log = get_logger(__name__)

_LOOK_SECONDS = 0.1
#: A query that is behind its log and idle for this many polls must be restarted. The number doubles whenever a restart
#: has not helped: on a busy machine a query that has just been started seems idle for longer.
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
        metrics: Telemetry,
    ) -> None:
        """``on_given_up`` is called when the restart limit is exhausted."""
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
        #: Consecutive failures without a finished batch, and the number of batches at the last of them.
        self._failures = 0
        self._batches_at_failure = -1
        #: How many batches of the log had run again when the query was last prepared for the next one.
        self._repeated_at_restart = -1
        self._idle_looks = 0
        self._idle_limit = _IDLE_LOOKS
        self._repeated_at_idle = -1

    @property
    def query(self) -> Query | None:
        return self._query

    def start(self) -> None:
        self._start_query()
        self._thread.start()

    def _start_query(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._service.replay.prepare_query()
                self._query = self._engine.start(
                    self._service.operator, self._service.spark_checkpoint_dir, self._service.handle_batch
                )

    def begin_stop(self) -> None:
        """From now on the end of the query is expected."""
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
            while not self._stopping.wait(_LOOK_SECONDS):
                query = self._query
                if query is None or query.is_active():
                    self._look_at(query)
                elif not self._restart(query):
                    return
        except Exception as error:  # noqa: BLE001 (a dead JVM shows here first, with any error)
            if not self._stopping.is_set():
                self._on_fatal(error)

    def _look_at(self, query: Query | None) -> None:
        """Restart a query that waits for input although the log holds its next batch."""
        is_stuck = query is not None and self._service.replay.is_repeating() and query.is_idle()
        self._idle_looks = self._idle_looks + 1 if is_stuck else 0
        if query is not None and self._idle_looks > self._idle_limit:
            # Spark sees no new input and plans no batch; after a restart it runs the logged plan.
            repeated = self._service.replay.repeated_total
            self._idle_limit = _IDLE_LOOKS if repeated > self._repeated_at_idle else self._idle_limit * 2
            self._repeated_at_idle = repeated
            self._idle_looks = 0
            query.stop()
            self._start_query()

    def _restart(self, query: Query) -> bool:
        """Restart the ended query; False if it is not restarted."""
        error = query.failure() or "the query ended without an error"
        if self._stopping.is_set():
            return False
        replay = self._service.replay
        if replay.is_plan_wrong() and replay.repeated_total > self._repeated_at_restart:
            self._repeated_at_restart = replay.repeated_total
            self._start_query()  # each batch of the log runs as it was planned
            return True
        # Progress since the last failure resets the count: only failures without progress exhaust it.
        batches = self._service.batches_total + replay.repeated_total
        self._failures = 1 if batches > self._batches_at_failure else self._failures + 1
        self._batches_at_failure = batches
        if self._failures > self._options.restart_limit:
            self._give_up(error)
            return False
        if self._stopping.wait(self._pause_ms(error) / 1000):
            return False
        self.restarts += 1
        self._metrics.query_restarted(self._service.operator)
        self._start_query()  # Spark may raise many errors here; each ends the flow
        return True

    def _pause_ms(self, error: str) -> int:
        backoff = Backoff(first_s=self._options.restart_backoff_ms / 1000)
        pause_ms = round(backoff.pause_s(self._failures) * 1000)
        log.error(
            "query_failed",
            flow=self._flow,
            operator=self._service.operator,
            restart=self._failures,
            of=self._options.restart_limit,
            pause_ms=pause_ms,
            error=error,
        )
        return pause_ms

    def _give_up(self, error: str) -> None:
        self._on_given_up(
            self._service,
            FlowFailedError(
                f"{error}\nThe query failed {self._failures} times without finishing a batch",
                next_step="fix the cause, then restart the flow: it resumes where it stopped",
                flow=self._flow,
                operator=self._service.operator,
            ),
        )
