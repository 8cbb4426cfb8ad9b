"""Keeps an operator's query running: a failed one is restarted with doubling pauses, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cutline.base.logs import get_logger
from cutline.base.outages import Outage, outage_in, outage_of
from cutline.base.traces import cause_in
from cutline.config.options import Options
from cutline.errors import FlowFailedError
from cutline.model.ids import FlowName, OperatorId
from cutline.ports.engine import Engine, Query
from cutline.ports.telemetry import Telemetry
from cutline.protocol.restarts import QueryRestarts
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
        keep_trace: Callable[[OperatorId, str], str] = lambda operator, text: "",
    ) -> None:
        """``on_given_up`` is called when the restart limit is exhausted. ``keep_trace`` stores the text of an error and
        returns where; empty: nowhere.
        """
        self._flow = flow
        self._service = service
        self._engine = engine
        self._options = options
        self._on_fatal = on_fatal
        self._on_given_up = on_given_up
        self._metrics = metrics
        self._keep_trace = keep_trace
        self._part = f"query of {service.operator}"
        self._stopping = threading.Event()
        self._query: Query | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name=f"cutline-watch-{service.operator}", daemon=True)
        self.restarts = 0
        self._counted = QueryRestarts(limit=options.restart_limit, backoff_ms=options.restart_backoff_ms)
        #: Why the query could not be started: a resource was away.
        self._start_error = ""
        self._start_outage: Outage | None = None
        #: The cause of the last failure, in one line.
        self._problem = ""
        #: The file with its whole trace.
        self._trace = ""
        #: How many batches of the log had run again when the query was last prepared for the next one.
        self._repeated_at_restart = -1
        self._idle_looks = 0
        self._idle_limit = _IDLE_LOOKS
        self._repeated_at_idle = -1

    @property
    def query(self) -> Query | None:
        return self._query

    def failures(self) -> int:
        """How often in a row the query has failed without finishing a batch."""
        return self._counted.failures_since(self._finished())

    @property
    def problem(self) -> str:
        """The cause of the last of these failures; empty if there is none."""
        return self._problem if self.failures() else ""

    @property
    def trace(self) -> str:
        """The file with the whole trace of that failure; empty if there is none."""
        return self._trace if self.failures() else ""

    def _finished(self) -> int:
        return self._service.batches_total + self._service.replay.repeated_total

    def start(self) -> None:
        """If a resource is away, the query is started when it is back."""
        self._restart_query()
        self._thread.start()

    def _start_query(self) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._service.check_ready()
                self._service.replay.prepare_query()
                self._query = self._engine.start(
                    self._service.operator, self._service.spark_checkpoint_dir, self._service.handle_batch
                )

    def _restart_query(self) -> None:
        """Start the query, perhaps again. If a resource is away, the next look finds that it does not run, and why."""
        self._start_error, self._start_outage = "", None
        try:
            self._start_query()
        except Exception as error:
            self._start_outage = outage_of(error) or outage_in(str(error))
            if self._start_outage is None:
                raise  # Spark may raise many errors here; each ends the flow
            self._start_error = f"{type(error).__name__}: {error}"

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
        self._service.outages.ended(self._part)

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(_LOOK_SECONDS):
                query = self._query
                if not self._start_error and (query is None or query.is_active()):
                    self._note_progress()
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
            self._restart_query()

    def _note_progress(self) -> None:
        """What the query lacked is back when it has finished a batch."""
        if self._counted.has_ended_outage(self._finished()):
            self._service.outages.over(self._part)

    def _restart(self, query: Query | None) -> bool:
        """Restart the ended query; False if it is not restarted."""
        error = (
            self._start_error or (query.failure() if query is not None else "") or "the query ended without an error"
        )
        if self._stopping.is_set():
            return False
        replay = self._service.replay
        if replay.is_plan_wrong() and replay.repeated_total > self._repeated_at_restart:
            self._repeated_at_restart = replay.repeated_total
            self._restart_query()  # each batch of the log runs as it was planned
            return True
        outage = self._start_outage or outage_in(error)
        pause_ms = self._counted.failed(self._finished(), is_outage=outage is not None)
        self._problem = str(cause_in(error))
        trace = self._trace = self._keep_trace(self._service.operator, error)
        if pause_ms is None:
            self._give_up(trace)
            return False
        if outage is not None:
            self._service.outages.failed(self._part, outage, pause_s=pause_ms / 1000)
        self._report(trace, pause_ms)
        if self._stopping.wait(pause_ms / 1000):
            return False
        self.restarts += 1
        self._metrics.query_restarted(self._service.operator)
        self._restart_query()
        return True

    def _report(self, trace: str, pause_ms: int) -> None:
        log.error(
            "query_failed",
            flow=self._flow,
            operator=self._service.operator,
            restart=self._counted.failures,
            of=self._options.restart_limit,
            pause_ms=pause_ms,
            error=self._problem,
            trace=trace,
        )

    def _give_up(self, trace: str) -> None:
        """The root cause comes first; ``trace``: the file that holds the whole trace."""
        self._on_given_up(
            self._service,
            FlowFailedError(
                f"{self._problem}; {_where(trace)}\n"
                f"The query failed {self._counted.failures} times without finishing a batch",
                next_step="fix the cause, then restart the flow: it resumes where it stopped",
                flow=self._flow,
                operator=self._service.operator,
            ),
        )


def _where(trace: str) -> str:
    return f"whole trace: {trace}" if trace else "its whole trace could not be stored"
