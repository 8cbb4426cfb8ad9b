"""The order in which the parts of a flow start and stop, and how a failure ends the flow."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Protocol

from cutline.base.logs import get_logger
from cutline.base.traces import cause_in, store_trace
from cutline.errors import FlowFailedError
from cutline.ports.progress import Progress, Step
from cutline.runtime.parts import FlowParts
from cutline.worker.operator import OperatorService

log = get_logger(__name__)

_LOOK_SECONDS = 0.02
#: How long a stop waits for batches under way before it cancels them.
_BATCH_SECONDS = 30.0
#: How long a caller that gets a failure waits until everything is released.
_END_SECONDS = 60.0

OperatorFailed = Callable[[OperatorService, FlowFailedError], None]


class FailureSink:
    """Passes fatal errors to the flow's lifecycle, and operators that failed permanently to region recovery.

    It exists before the parts that report to it; the parts that respond register when they are built.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_fatal: Callable[[BaseException], None] | None = None
        self._on_operator_failed: OperatorFailed | None = None
        #: The first error that was reported before ``register``.
        self._early: BaseException | None = None

    def fatal(self, error: BaseException) -> None:
        """The flow cannot continue. ``register`` passes on an error that was reported earlier."""
        with self._lock:
            respond = self._on_fatal
            if respond is None:
                self._early = self._early or error
        if respond is not None:
            respond(error)

    def operator_failed(self, service: OperatorService, error: FlowFailedError) -> None:
        """The operator's query failed again after its restarts."""
        if self._on_operator_failed is None:
            self.fatal(error)
        else:
            self._on_operator_failed(service, error)

    def register(
        self, *, on_fatal: Callable[[BaseException], None], on_operator_failed: OperatorFailed | None = None
    ) -> None:
        with self._lock:
            self._on_fatal, self._on_operator_failed = on_fatal, on_operator_failed
            early, self._early = self._early, None
        if early is not None:
            on_fatal(early)


class Watcher(Protocol):
    """A thread that watches the flow from outside: it starts last, and stops before the stores are closed."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Lifecycle:
    """Starts everything, stops everything, and knows whether the flow has failed or ended."""

    def __init__(
        self, parts: FlowParts, release_lock: Callable[[], None], *, last_words: Callable[[], None] = lambda: None
    ) -> None:
        """``last_words``: called when a flow that has not failed stops, before its sinks do."""
        self._parts = parts
        self._last_words = last_words
        self._flow = parts.definition.graph.flow
        self._release_lock = release_lock
        #: A flow that has failed keeps its lock and its status until it is stopped.
        self._stays = parts.definition.options.on_failure == "stay"
        self._is_asked = threading.Event()
        self._watchers: tuple[Watcher, ...] = ()
        #: Nothing runs anymore.
        self.is_over = threading.Event()
        #: Everything is released as well: the same flow may be started again.
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self._stop_lock = threading.Lock()

    def watch(self, *watchers: Watcher) -> None:
        """Call this before ``begin``."""
        self._watchers = watchers

    def begin(self, progress: Progress) -> None:
        """Start everything: agents before the coordinator that sends them requests, and both before the queries."""
        parts = self._parts
        for service in parts.workers.operators.values():
            service.start()
        if parts.background.replicator is not None:
            parts.background.replicator.start()
        parts.coordinator.start(parts.settled.pending)
        count = len(parts.workers.supervisors)
        progress.begin(Step.QUERIES)
        for number, (operator, supervisor) in enumerate(parts.workers.supervisors.items(), 1):
            progress.tell(f"{number} of {count}: {operator}")
            supervisor.start()
        progress.tell(f"{count} started")
        for watcher in self._watchers:
            watcher.start()

    def fail(self, error: BaseException) -> None:
        """The flow cannot continue: everything stops, and waiting callers get the error."""
        if self.failure is None:
            self.failure = error
            log.error("flow_failed", flow=self._flow, error=str(error))
            threading.Thread(target=self._shut_down, name="cutline-shutdown", daemon=True).start()

    def raise_if_over(self) -> None:
        if self.failure is not None:
            if not self._stays:
                self.ended.wait(_END_SECONDS)  # the caller may restart the flow at once, or end the process
            raise self.failure
        if self.ended.is_set():
            raise FlowFailedError("the flow has stopped", next_step="start it again", flow=self._flow)

    def wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Wait until the condition holds; False on timeout. Raises when the flow ends first."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not condition():
            self.raise_if_over()
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def wait_ended(self, seconds: float | None) -> bool:
        """Wait until the flow ends; True if it has. Raises the error that ended it, if one did."""
        ended = self.ended.wait(seconds)
        if ended and self.failure is not None:
            raise self.failure
        return ended

    # ------------------------------------------------------------------ stop

    def shut_down(self) -> None:
        """Stop everything, also a flow that has failed and stays."""
        self._is_asked.set()
        self._shut_down()

    def _shut_down(self) -> None:
        with self._stop_lock:
            if self.ended.is_set():
                return
            # Each step separately: a dead JVM must not prevent the release of the rest.
            for step in self._steps_down():
                try:
                    step()
                except Exception as error:  # noqa: BLE001 (the JVM may be gone already: a signal reaches both)
                    text = "".join(traceback.format_exception(error))
                    trace = store_trace(self._parts.definition.layout.traces, "shutdown", text)
                    log.warning("shutdown_step_failed", flow=self._flow, error=cause_in(text).what, trace=str(trace))
            self.ended.set()
            log.info("flow_stopped", flow=self._flow)

    def _steps_down(self) -> Iterator[Callable[[], object]]:
        """Yields the steps one by one: the operators are final only when no region is being restored."""
        parts, workers, engine = self._parts, self._parts.workers, self._parts.definition.engine
        yield parts.regions.stop
        yield from [supervisor.begin_stop for supervisor in workers.supervisors.values()]
        yield engine.begin_stop
        yield from [service.credits.stop for service in workers.operators.values()]
        yield self._wait_for_batches
        yield from [supervisor.stop for supervisor in workers.supervisors.values()]
        # In this order a release is performed to its end: by the janitor, the coordinator, then the operators.
        yield parts.coordinator.begin_stop
        yield parts.background.janitor.stop
        yield parts.coordinator.stop
        if parts.background.replicator is not None:
            yield parts.background.replicator.stop
        if self.failure is None:
            yield self._last_words
        yield from [service.stop for service in workers.operators.values()]
        yield self.is_over.set
        yield from [watcher.stop for watcher in self._watchers]
        yield engine.close
        yield parts.stores.metadata.close
        if self._stays and self.failure is not None:
            yield self._is_asked.wait
        yield self._release_lock

    def _wait_for_batches(self) -> None:
        """Let batches under way finish: their queries then wait at the boundary, where stopping loses nothing."""
        deadline = time.monotonic() + _BATCH_SECONDS
        while any(service.credits.is_in_batch() for service in self._parts.workers.operators.values()):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)
