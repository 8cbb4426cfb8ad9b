"""The handle of a running flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cutline.errors import CheckpointFailedError
from cutline.model.ids import Epoch, SinkId
from cutline.model.status import EpochOutcome, FlowStatus
from cutline.ports.progress import Progress
from cutline.ports.source_guard import SourceGuard
from cutline.runtime.checkpoints_api import DRAIN_SECONDS, CheckpointsApi
from cutline.runtime.draining import Draining
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.measures.sources import SourceWatch
from cutline.runtime.parts import FlowParts
from cutline.runtime.requests import RequestHandlers, RequestLoop, seconds_of, store_last_limits
from cutline.runtime.status import StatusBuilder, StatusWriter, report_unguarded, source_status
from cutline.savepoints.store import Savepoint


class RunningFlow:
    """What ``Flow.start`` returns. All methods may be called from any thread."""

    def __init__(self, parts: FlowParts, guard: SourceGuard, release_lock: Callable[[], None]) -> None:
        sources = source_status(parts.definition.plans, guard)
        layout = parts.definition.layout
        self.name = parts.definition.graph.flow
        self.metrics = parts.metrics
        self._parts = parts
        self._sources = sources
        self._lifecycle = Lifecycle(parts, release_lock, last_words=partial(store_last_limits, parts))
        self._draining = Draining(parts, self._lifecycle)
        self._checkpoints = CheckpointsApi(parts, self._lifecycle, self._draining)
        watch = SourceWatch(parts, guard, self._lifecycle)
        self._status = StatusBuilder(parts, sources, self._lifecycle, watch)
        self._handlers = RequestHandlers(parts, self._checkpoints, stop=self.stop)
        self._lifecycle.watch(
            StatusWriter(self._status, layout, self._lifecycle),
            RequestLoop(self.name, layout, self._handlers, self._lifecycle),
            watch,
        )

    # ------------------------------------------------------------------ used by the assembly

    def begin(self, progress: Progress) -> None:
        """Start everything."""
        report_unguarded(self.name, self._sources)
        self._lifecycle.begin(progress)

    def fail(self, error: BaseException) -> None:
        """The flow cannot continue: everything stops, and waiting callers get the error."""
        self._lifecycle.fail(error)

    # ------------------------------------------------------------------ checkpoints

    def trigger_checkpoint(
        self, *, mode: str | None = None, timeout: str | float | None = None, quiesce: bool = False
    ) -> Epoch:
        """Take a checkpoint now; returns its epoch when it is complete and every sink has published it.

        Raises CheckpointFailedError when it was aborted. ``mode``: "aligned" or "unaligned" for this one only.
        ``quiesce``: first pause the sources until everything under way is processed, so that nothing is in flight; then
        take an aligned checkpoint and resume the sources, unless they were paused before.
        """
        return self._checkpoints.trigger(mode=mode, seconds=seconds_of(timeout), quiesce=quiesce)

    def savepoint(
        self, name: str, *, drain: bool = True, note: str = "", timeout: str | float | None = None
    ) -> Savepoint:
        """Take a checkpoint and keep it under a name, self-contained, until it is deleted.

        ``drain`` (default): the sources are paused and nothing is in flight, so that the code may change before the
        savepoint is restored. Raises CheckpointFailedError when the checkpoint was aborted; the flow continues.
        """
        return self._checkpoints.savepoint(name, drain=drain, note=note, seconds=seconds_of(timeout))

    def savepoints(self) -> list[Savepoint]:
        """The savepoints of this flow, oldest first."""
        return self._checkpoints.savepoints()

    def pin(self, epoch: int) -> None:
        """Keep a complete checkpoint until ``unpin``, also across restarts."""
        self._checkpoints.pin(Epoch(epoch))

    def unpin(self, epoch: int) -> None:
        """Return a pinned checkpoint to normal retention."""
        self._checkpoints.unpin(Epoch(epoch))

    def wait_remote(self, epoch: int, *, timeout: str | float = DRAIN_SECONDS) -> bool:
        """Wait until a checkpoint, or a later one, is in the remote tier; False on timeout."""
        return self._checkpoints.wait_remote(Epoch(epoch), seconds_of(timeout) or 0.0)

    def checkpoints(self, limit: int = 100) -> list[EpochOutcome]:
        """How past checkpoints ended, newest first."""
        return self._status.history(limit)

    # ------------------------------------------------------------------ running

    def status(self) -> FlowStatus:
        """The status of the flow; after its end, the last status."""
        return self._status.status()

    def published(self, sink: SinkId) -> Epoch:
        """The newest epoch that a sink has published."""
        return self._parts.coordinator.published(sink)

    def pause(self, *, timeout: str | float = DRAIN_SECONDS) -> bool:
        """Pause the sources and wait until everything under way is processed; True when drained."""
        return self._draining.pause(seconds_of(timeout) or 0.0)

    def resume(self) -> None:
        """Resume the sources."""
        self._draining.set_paused(is_paused=False)

    def process_all_available(self) -> None:
        """Wait until every operator has processed what the sources have now, and every sink has published it."""
        self._draining.wait_all_processed()
        self.trigger_checkpoint()

    def await_termination(self, timeout: str | float | None = None) -> bool:
        """Wait until the flow ends; True if it has. Raises the error that ended it, if one did."""
        return self._lifecycle.wait_ended(seconds_of(timeout))

    def stop(self, *, drain: bool = False, savepoint: str | None = None) -> None:
        """Stop at a batch boundary. The next start resumes exactly here.

        ``drain=True`` first processes everything under way and publishes it with a last checkpoint; ``savepoint`` also
        keeps that checkpoint under a name. If it cannot be taken, the flow continues.
        """
        if savepoint is not None and not self._lifecycle.ended.is_set():
            self._checkpoints.last_savepoint(savepoint)
            self._lifecycle.shut_down()
            return
        try:
            if drain and not self._lifecycle.ended.is_set():
                if not self.pause():
                    raise CheckpointFailedError(
                        "the flow was not drained in time", next_step="work under way is kept", flow=self.name
                    )
                self.trigger_checkpoint()
        finally:
            self._lifecycle.shut_down()
