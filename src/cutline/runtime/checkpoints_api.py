"""Checkpoints and savepoints of a running flow, on request."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

from cutline.errors import CheckpointFailedError, ConfigError
from cutline.model.ids import Epoch
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.runtime.draining import Draining
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.savepoints.store import Savepoint

#: How long a pause waits for work under way by default.
DRAIN_SECONDS = 60.0


class CheckpointsApi:
    """Takes checkpoints and savepoints, and pins them."""

    def __init__(self, parts: FlowParts, lifecycle: Lifecycle, draining: Draining) -> None:
        self._flow = parts.definition.graph.flow
        self._options = parts.definition.options
        self._coordinator = parts.coordinator
        self._janitor = parts.background.janitor
        self._replicator = parts.background.replicator
        self._savepoints = parts.stores.savepoints
        self._lifecycle = lifecycle
        self._draining = draining
        #: One at a time: the end of one checkpoint must not resume the sources that another has paused.
        self._quiescing = threading.Lock()
        self._taking_savepoint = threading.Lock()

    # ------------------------------------------------------------------ checkpoints

    def trigger(self, *, mode: str | None = None, seconds: float | None = None, quiesce: bool = False) -> Epoch:
        """Returns the epoch when the checkpoint is complete and published; raises CheckpointFailedError."""
        self._lifecycle.raise_if_over()
        if quiesce:
            return self._quiesced(mode, seconds)
        return self._take(self.options_for(mode), seconds)

    def _quiesced(self, mode: str | None, seconds: float | None) -> Epoch:
        if mode not in (None, "aligned"):
            raise ConfigError(f"mode: {mode!r} does not go with quiesce", next_step="leave the mode out")
        with self._quiescing:
            deadline = None if seconds is None else time.monotonic() + seconds
            was_paused = self._draining.is_paused
            try:
                if not self._draining.pause(DRAIN_SECONDS if seconds is None else seconds):
                    raise CheckpointFailedError(
                        "the work under way was not processed in time",
                        next_step="the flow continues; give it more time, or take a checkpoint without quiesce",
                        flow=self._flow,
                    )
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                mode = None if self._options.is_per_operator else "aligned"
                return self._take(self.options_for(mode), left)
            finally:
                if not was_paused:
                    self._draining.set_paused(is_paused=False)

    def _take(self, options: CheckpointOptions | None, seconds: float | None) -> Epoch:
        future = self._coordinator.request_checkpoint(options)
        try:
            return future.result(seconds)
        except FutureTimeoutError as error:
            raise CheckpointFailedError(
                "the checkpoint is not complete in the time given; it continues in the background", flow=self._flow
            ) from error
        except CancelledError as error:
            self._lifecycle.raise_if_over()
            raise CheckpointFailedError("the flow has stopped", flow=self._flow) from error

    def options_for(self, mode: str | None) -> CheckpointOptions | None:
        """The options of one checkpoint in this mode; None: the flow's own options."""
        limits = {"aligned": None, "unaligned": 0, "auto": self._options.alignment_timeout_ms}
        if mode is None:
            return None
        if self._options.is_per_operator:
            raise ConfigError(
                f"mode: {mode!r} does not go with a flow in per-operator mode",
                next_step="leave the mode out: every operator takes its own checkpoint",
                flow=self._flow,
            )
        if mode not in limits:
            raise ConfigError(f"mode: {mode!r} is not known", next_step=f"use one of {', '.join(limits)}")
        return CheckpointOptions(alignment_limit_ms=limits[mode])

    # ------------------------------------------------------------------ savepoints

    def savepoint(self, name: str, *, drain: bool = True, note: str = "", seconds: float | None = None) -> Savepoint:
        """Take a checkpoint and keep it under a name, self-contained, until it is deleted."""
        if self._options.is_per_operator:
            raise ConfigError(
                "in per-operator mode no checkpoint covers the whole flow: there is nothing to save", flow=self._flow
            )
        with self._taking_savepoint:  # two with one name at the same time would mix their content
            self._savepoints.check_free(name)
            return self._keep(self.trigger(quiesce=drain, seconds=seconds), name, is_drained=drain, note=note)

    def _keep(self, epoch: Epoch, name: str, *, is_drained: bool, note: str) -> Savepoint:
        if not self._janitor.hold(epoch):
            raise CheckpointFailedError("the checkpoint was collected too early", flow=self._flow, epoch=epoch)
        try:
            manifest = self._coordinator.load_manifest(epoch)
            return self._savepoints.create(name, manifest, is_drained=is_drained, note=note)
        finally:
            self._janitor.end_hold(epoch)

    def last_savepoint(self, name: str) -> Savepoint:
        """Take a savepoint and leave the sources paused, so that nothing follows. If it fails, they are as before."""
        was_paused = self._draining.is_paused
        self._draining.set_paused(is_paused=True)
        try:
            return self.savepoint(name)
        except BaseException:
            self._draining.set_paused(is_paused=was_paused)
            raise

    def savepoints(self) -> list[Savepoint]:
        return self._savepoints.list()

    # ------------------------------------------------------------------ pins, remote tier

    def pin(self, epoch: Epoch) -> None:
        self._lifecycle.raise_if_over()
        self._coordinator.pin(epoch)

    def unpin(self, epoch: Epoch) -> None:
        self._lifecycle.raise_if_over()
        self._coordinator.unpin(epoch)

    def wait_remote(self, epoch: Epoch, seconds: float) -> bool:
        """Wait until a checkpoint, or a later one, is in the remote tier; False on timeout."""
        self._lifecycle.raise_if_over()
        if self._replicator is None:
            raise ConfigError("the flow has no remote tier", next_step="set the option remote", flow=self._flow)
        return self._replicator.wait_copied(epoch, seconds)
