"""The handle of a running flow."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import msgspec

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.config.options import Options, parse_duration_ms
from cutline.coordinator.loop import CoordinatorService
from cutline.coordinator.retention import Janitor
from cutline.errors import CheckpointFailedError, ConfigError, FlowFailedError
from cutline.maintenance.gc_local import LiveCollection
from cutline.model.graph import FlowGraph
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.ports import Engine, EpochOutcome, MetadataStore
from cutline.protocol.checkpoint.coordinator import StoredPending
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.recovery.region import RegionRecovery
from cutline.recovery.start import Recovered
from cutline.runtime.metrics import Metrics
from cutline.runtime.source_views import SourceViews, report_unguarded
from cutline.savepoints.store import Savepoint, Savepoints
from cutline.tiers.replicator import Replicator
from cutline.transport.request_files import Mailbox
from cutline.worker.operator import OperatorService
from cutline.worker.query_supervisor import Supervisor

log = get_logger(__name__)

_LOOK_SECONDS = 0.02
#: How long a stop waits for batches under way before it cancels them.
_BATCH_SECONDS = 30.0
_STATUS_SECONDS = 0.25
#: How long a pause waits for what is under way, unless told otherwise.
_DRAIN_SECONDS = 60.0
#: How long a caller who is to hear of a failure waits until everything is let go.
_END_SECONDS = 60.0
#: How many past checkpoints the status shows.
_HISTORY_SHOWN = 20
#: How many an ended flow still knows.
_HISTORY_KEPT = 10_000


class RunningFlow:
    """What ``Flow.start`` returns. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        options: Options,
        layout: Layout,
        recovered: Recovered,
        coordinator: CoordinatorService,
        operators: Mapping[OperatorId, OperatorService],
        supervisors: Mapping[OperatorId, Supervisor],
        regions: RegionRecovery,
        janitor: Janitor,
        replicator: Replicator | None,
        savepoints: Savepoints,
        engine: Engine,
        metadata: MetadataStore,
        metrics: Metrics,
        sources: SourceViews,
        release_lock: Callable[[], None],
    ) -> None:
        self.name = graph.flow
        self.metrics = metrics
        self._graph = graph
        self._options = options
        self._layout = layout
        self._recovered = recovered
        self._coordinator = coordinator
        self._operators = operators
        self._supervisors = supervisors
        self._regions = regions
        self._janitor = janitor
        self._replicator = replicator
        self._savepoints = savepoints
        self._mailbox = Mailbox(
            layout.requests,
            {
                "checkpoint": self._asked_checkpoint,
                "savepoint": self._asked_savepoint,
                "stop": self._asked_stop,
                "gc": LiveCollection(layout, janitor, replicator, metadata, recovered.record.started_ms).collect,
            },
        )
        self._request_thread = threading.Thread(target=self._take_requests, name="cutline-requests", daemon=True)
        self._engine = engine
        self._metadata = metadata
        self._sources = sources
        self._release_lock = release_lock
        #: Nothing runs any more.
        self._is_over = threading.Event()
        #: And everything is let go: the same flow may be started again.
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._paused = False
        #: One at a time: the end of one must not let the sources go on under another.
        self._quiescing = threading.Lock()
        self._taking_savepoint = threading.Lock()
        self._pause_lock = threading.RLock()
        #: Set once, when the flow has ended and its stores are closed.
        self._last_status: dict[str, Any] | None = None
        self._last_history: list[EpochOutcome] = []
        self._stop_lock = threading.Lock()
        self._status_thread = threading.Thread(target=self._write_status, name="cutline-status", daemon=True)

    # ------------------------------------------------------------------ used by the wiring

    def begin(self, pending: Iterable[StoredPending]) -> None:
        """Start everything: agents before the coordinator that asks them, and both before the queries."""
        report_unguarded(self.name, self._sources)
        for service in self._operators.values():
            service.start()
        if self._replicator is not None:
            self._replicator.start()
        self._coordinator.start(pending)
        for supervisor in self._supervisors.values():
            supervisor.start()
        self._status_thread.start()
        self._request_thread.start()

    def fail(self, error: BaseException) -> None:
        """Something no part can go on from: everything stops, and waiting callers get the error."""
        if self._failure is None:
            self._failure = error
            log.error("flow_failed", flow=self.name, error=str(error))
            threading.Thread(target=self._shut_down, name="cutline-shutdown", daemon=True).start()

    # ------------------------------------------------------------------ checkpoints

    def trigger_checkpoint(
        self, *, mode: str | None = None, timeout: str | float | None = None, quiesce: bool = False
    ) -> Epoch:
        """Take a checkpoint now; returns its epoch when it is complete and every sink has published it.

        Raises CheckpointFailedError when it was aborted. ``mode``: "aligned" or "unaligned" for this one only.
        ``quiesce``: first let the sources rest until everything under way is processed, so that nothing is in flight;
        an aligned checkpoint follows, and the sources go on, unless they were paused before.
        """
        self._raise_if_over()
        seconds = parse_duration_ms(timeout, option="timeout") / 1000 if timeout is not None else None
        if quiesce:
            return self._quiesced_checkpoint(mode, seconds)
        return self._take_checkpoint(self._checkpoint_options(mode), seconds)

    def _quiesced_checkpoint(self, mode: str | None, seconds: float | None) -> Epoch:
        if mode not in (None, "aligned"):
            raise ConfigError(f"mode: {mode!r} does not go with quiesce", next_step="leave the mode out")
        with self._quiescing:
            deadline = None if seconds is None else time.monotonic() + seconds
            was_paused = self._paused
            try:
                if not self.pause(timeout=_DRAIN_SECONDS if seconds is None else seconds):
                    raise CheckpointFailedError(
                        "what was under way was not processed in time",
                        next_step="the flow goes on; give it more time, or take a checkpoint without quiesce",
                        flow=self.name,
                    )
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                mode = None if self._options.is_per_operator else "aligned"
                return self._take_checkpoint(self._checkpoint_options(mode), left)
            finally:
                if not was_paused:
                    self.resume()

    def _take_checkpoint(self, options: CheckpointOptions | None, seconds: float | None) -> Epoch:
        future = self._coordinator.request_checkpoint(options)
        try:
            return future.result(seconds)
        except FutureTimeoutError as error:
            raise CheckpointFailedError(
                "not complete in the time given; it goes on in the background", flow=self.name
            ) from error
        except CancelledError as error:
            self._raise_if_over()
            raise CheckpointFailedError("the flow has stopped", flow=self.name) from error

    def _checkpoint_options(self, mode: str | None) -> CheckpointOptions | None:
        limits = {"aligned": None, "unaligned": 0, "auto": self._options.alignment_timeout_ms}
        if mode is None:
            return None
        if self._options.is_per_operator:
            raise ConfigError(
                f"mode: {mode!r} does not go with a flow in per-operator mode",
                next_step="leave the mode out: every operator takes a checkpoint of its own",
                flow=self.name,
            )
        if mode not in limits:
            raise ConfigError(f"mode: {mode!r} is not known", next_step=f"use one of {', '.join(limits)}")
        return CheckpointOptions(alignment_limit_ms=limits[mode])

    # ------------------------------------------------------------------ savepoints

    def savepoint(
        self, name: str, *, drain: bool = True, note: str = "", timeout: str | float | None = None
    ) -> Savepoint:
        """Take a checkpoint and keep it under a name, self-contained, until it is deleted.

        ``drain`` (default): the sources rest meanwhile and nothing is in flight, so that code may change before it is
        restored. Raises CheckpointFailedError when the checkpoint was aborted; the flow goes on in any case.
        """
        if self._options.is_per_operator:
            raise ConfigError(
                "in per-operator mode no checkpoint is of the whole flow: there is nothing to save", flow=self.name
            )
        with self._taking_savepoint:  # two of one name at once would mix what they hold
            return self._take_savepoint(name, drain=drain, note=note, timeout=timeout)

    def _take_savepoint(self, name: str, *, drain: bool, note: str, timeout: str | float | None) -> Savepoint:
        self._savepoints.check_free(name)
        epoch = self.trigger_checkpoint(quiesce=drain, timeout=timeout)
        if not self._janitor.hold(epoch):
            raise CheckpointFailedError("it was collected before it could be kept", flow=self.name, epoch=epoch)
        try:
            manifest = self._coordinator.load_manifest(epoch)
            return self._savepoints.create(name, manifest, is_drained=drain, note=note)
        finally:
            self._janitor.let_go(epoch)

    def _last_savepoint(self, name: str) -> Savepoint:
        """The sources rest, and go on resting: nothing comes after it. If it fails, all is as before."""
        was_paused = self._paused
        self._set_paused(True)
        try:
            return self.savepoint(name)
        except BaseException:
            self._set_paused(was_paused)
            raise

    def savepoints(self) -> list[Savepoint]:
        """Those there are, oldest first."""
        return self._savepoints.list()

    def pin(self, epoch: int) -> None:
        """Keep a complete checkpoint, whatever comes, until ``unpin``; also over restarts."""
        self._raise_if_over()
        self._coordinator.pin(Epoch(epoch))

    def unpin(self, epoch: int) -> None:
        """Let a pinned checkpoint go when its time has come."""
        self._raise_if_over()
        self._coordinator.unpin(Epoch(epoch))

    def wait_remote(self, epoch: int, *, timeout: str | float = _DRAIN_SECONDS) -> bool:
        """Wait until a checkpoint, or a later one, is in the remote tier; False if it is not in time."""
        self._raise_if_over()
        if self._replicator is None:
            raise ConfigError("the flow has no remote tier", next_step="set the option remote", flow=self.name)
        return self._replicator.wait_copied(Epoch(epoch), parse_duration_ms(timeout, option="timeout") / 1000)

    def checkpoints(self, limit: int = 100) -> list[EpochOutcome]:
        """How past checkpoints ended, newest first."""
        if self._last_status is not None:
            return self._last_history[:limit]
        return self._metadata.history(limit)

    # ------------------------------------------------------------------ running

    def status(self) -> dict[str, Any]:
        """Everything a person or a program wants to see, as plain values. Of an ended flow: how it ended."""
        if self._last_status is not None:
            return self._last_status
        return {
            "flow": self.name,
            "pid": os.getpid(),
            "state": self._state(),
            "generation": self._coordinator.generation(),
            "recovery": {
                "path": self._recovered.path,
                "epoch": self._recovered.restored_epoch,
                "reason": self._recovered.reason,
                "problems": self._recovered.problems,
                "lost_input": [
                    msgspec.to_builtins(one) for one in [*self._recovered.record.lost_input, *self._regions.lost_input]
                ],
                "operators": self._recovered.matching.rows(),
                "counts": self._metadata.recoveries(),
            },
            "operators": {name: self._operator_status(name) for name in self._graph.names},
            "sinks": {
                node.sink: {"operator": node.operator, "published_epoch": self._coordinator.published(node.sink)}
                for node in self._graph.sinks
            },
            "health": self._coordinator.health(),
            "checkpoints": self._coordinator.view(),
            "messages": self._coordinator.messages(),
            "remote": self._replicator.view() if self._replicator is not None else None,
            "history": [msgspec.to_builtins(item) for item in self._metadata.history(_HISTORY_SHOWN)],
        }

    def _state(self) -> str:
        if self._failure is not None:
            return "failed"
        if self._is_over.is_set():
            return "stopped"
        if self._paused:
            return "paused"
        return "running" if self._coordinator.health()["healthy"] else "unhealthy"

    def _operator_status(self, name: OperatorId) -> dict[str, Any]:
        service, supervisor = self._operators[name], self._supervisors[name]
        query = supervisor.query
        return {
            "inputs": list(self._graph.node(name).inputs),
            "sources": self._sources[name],
            "active": query is not None and query.is_active(),
            "batch": service.channel.last_batch,
            "batches": service.batches_total,
            "rows": service.rows_total,
            "batch_ms": round(service.last_batch_ms, 1),
            "backlog_rows": service.credits.backlog(),
            "waiting_for_room": service.credits.is_waiting(),
            "aligning": {epoch: list(inputs) for epoch, inputs in service.aligning().items()},
            "restarts": supervisor.restarts,
        }

    def published(self, sink: SinkId) -> Epoch:
        """The newest epoch a sink has published."""
        return self._coordinator.published(sink)

    def pause(self, *, timeout: str | float = _DRAIN_SECONDS) -> bool:
        """Give the sources no more credit and wait until everything under way is processed; True when drained."""
        self._raise_if_over()
        self._set_paused(True)
        return self._wait(self._is_drained, parse_duration_ms(timeout, option="timeout") / 1000)

    def resume(self) -> None:
        """Let the sources go on."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        with self._pause_lock:
            self._paused = paused
            for source in self._graph.sources:
                self.settle_pause(self._operators[source])

    def settle_pause(self, service: OperatorService) -> None:
        """A source gets the credit that the flow's state gives it, be it one that has just come back."""
        with self._pause_lock:
            if service.operator in self._graph.sources:
                service.credits.set_paused(self._paused)

    def process_all_available(self) -> None:
        """Wait until everything the sources have now is processed by every operator and published by every sink."""
        if self._paused:
            raise ConfigError("the flow is paused", next_step="call resume() first", flow=self.name)
        appended = -1
        while True:
            for name in self._graph.names:
                self._wait_processed(name)
                self._wait(lambda name=name: self._operators[name].credits.is_drained() or self._ended.is_set(), None)  # type: ignore[misc]
                self._raise_if_over()
            # A batch that ran meanwhile may have given a later operator something to do: look again until nothing did.
            now = sum(service.batches_total for service in self._operators.values())
            if now == appended and self._is_drained():
                break
            appended = now
        self.trigger_checkpoint()

    def _wait_processed(self, operator: OperatorId) -> None:
        """Also past a failure: the query that failed is replaced, or the flow ends."""
        while (query := self._supervisors[operator].query) is not None:
            query.wait_processed()
            if query.is_active():
                return
            self._wait(lambda failed=query: self._supervisors[operator].query is not failed, None)  # type: ignore[misc]

    def await_termination(self, timeout: str | float | None = None) -> bool:
        """Wait until the flow ends; True if it has. Raises the error that ended it, if one did."""
        limit = parse_duration_ms(timeout, option="timeout") / 1000 if timeout is not None else None
        ended = self._ended.wait(limit)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def stop(self, *, drain: bool = False, savepoint: str | None = None) -> None:
        """Stop at a batch boundary. The next start resumes exactly here.

        ``drain=True`` first processes everything under way and publishes it with a last checkpoint; ``savepoint`` does
        so too and keeps that checkpoint under a name. If it cannot be taken, the flow goes on.
        """
        if savepoint is not None and not self._ended.is_set():
            self._last_savepoint(savepoint)
            self._shut_down()
            return
        try:
            if drain and not self._ended.is_set():
                if not self.pause():
                    raise CheckpointFailedError(
                        "the flow was not drained in time", next_step="what is under way is kept", flow=self.name
                    )
                self.trigger_checkpoint()
        finally:
            self._shut_down()

    # ------------------------------------------------------------------ inside

    def _is_drained(self) -> bool:
        # While a region goes back, upstream does not know yet that it will be read again.
        if self._regions.is_busy():
            return False
        return all(s.credits.is_drained() and not s.credits.is_in_batch() for s in self._operators.values())

    def _wait(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not condition():
            self._raise_if_over()
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            self._ended.wait(_END_SECONDS)  # whoever hears of it may start the flow again at once, or end the process
            raise self._failure
        if self._ended.is_set():
            raise FlowFailedError("the flow has stopped", next_step="start it again", flow=self.name)

    def _shut_down(self) -> None:
        with self._stop_lock:
            if self._ended.is_set():
                return
            # Each step on its own: a JVM that is gone must not keep the rest from being let go.
            for step in self._steps_down():
                try:
                    step()
                except Exception:
                    log.warning("stopping_was_rough", flow=self.name, exc_info=True)
            self._ended.set()
            log.info("flow_stopped", flow=self.name)

    def _steps_down(self) -> Iterator[Callable[[], object]]:
        """One by one: only when no region goes back any more are the operators the last ones there will be."""
        yield self._regions.stop
        yield from [supervisor.begin_stop for supervisor in self._supervisors.values()]
        yield self._engine.begin_stop
        yield from [service.credits.stop for service in self._operators.values()]
        yield self._wait_for_batches
        yield from [supervisor.stop for supervisor in self._supervisors.values()]
        yield self._coordinator.stop
        if self._replicator is not None:
            yield self._replicator.stop
        yield from [service.stop for service in self._operators.values()]
        yield self._janitor.stop
        yield self._write_last_status
        yield self._engine.close
        yield self._metadata.close
        yield self._release_lock

    def _wait_for_batches(self) -> None:
        """Batches under way are finished: their queries then wait at the boundary, where stopping loses nothing."""
        deadline = time.monotonic() + _BATCH_SECONDS
        while any(service.credits.is_in_batch() for service in self._operators.values()):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)

    def _write_last_status(self) -> None:
        self._is_over.set()
        if self._status_thread.is_alive():
            self._status_thread.join(timeout=10)
        self._last_history = self._metadata.history(_HISTORY_KEPT)
        self._last_status = self.status()
        self._publish_status()

    # ------------------------------------------------------------------ requests from outside

    def _take_requests(self) -> None:
        while not self._is_over.wait(_STATUS_SECONDS):
            try:
                self._mailbox.take()
            except OSError:  # a full disk, for example: whoever asks must not end the flow, nor be the last to be heard
                log.warning("request_not_answered", flow=self.name, exc_info=True)

    def _asked_checkpoint(self, mode: str | None = None, timeout: str | float | None = None) -> dict[str, Any]:
        return {"epoch": self.trigger_checkpoint(mode=mode, timeout=timeout)}

    def _asked_savepoint(self, name: str, drain: bool = True, note: str = "") -> dict[str, Any]:
        taken: dict[str, Any] = msgspec.to_builtins(self.savepoint(name, drain=drain, note=note))
        return taken

    def _asked_stop(self, savepoint: str | None = None, drain: bool = False) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        if savepoint is not None:
            taken = msgspec.to_builtins(self._last_savepoint(savepoint))
        # Answered first: a flow that has ended answers nobody.
        threading.Timer(_STATUS_SECONDS, self.stop, kwargs={"drain": drain and savepoint is None}).start()
        return {"stopping": True, "savepoint": taken or None}

    def _write_status(self) -> None:
        while not self._is_over.wait(_STATUS_SECONDS):
            try:
                self._publish_status()
            except Exception:  # watching must never hurt the flow
                log.debug("status_not_written", exc_info=True)

    def _publish_status(self) -> None:
        durable.replace(self._layout.status, msgspec.json.encode(self.status()), sync=False)
