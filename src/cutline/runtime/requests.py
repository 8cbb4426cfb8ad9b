"""Requests to a running flow: one handler per kind of request, for every transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from cutline.base.logs import get_logger
from cutline.config.values import parse_duration_ms
from cutline.maintenance.gc_live import LiveCollection
from cutline.model.ids import FlowName
from cutline.model.layout import Layout
from cutline.runtime.checkpoints_api import CheckpointsApi
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.transport.request_files import RequestFolder

log = get_logger(__name__)

_LOOK_SECONDS = 0.25
#: A flow that has ended answers no request, so the answer to "stop" is sent first.
_STOP_DELAY_SECONDS = 0.25

Handler = Callable[..., dict[str, Any]]


def seconds_of(timeout: str | float | None) -> float | None:
    return None if timeout is None else parse_duration_ms(timeout, option="timeout") / 1000


class RequestHandlers:
    """Arguments and results are plain values, as request files and HTTP transport them."""

    def __init__(self, parts: FlowParts, checkpoints: CheckpointsApi, stop: Callable[..., None]) -> None:
        """``stop``: stops the flow; takes ``drain``."""
        self._checkpoints = checkpoints
        self._stop = stop
        self._collection = LiveCollection(
            parts.definition.layout,
            parts.background.janitor,
            parts.background.replicator,
            metadata=parts.stores.metadata,
            generations=parts.stores.generations,
            started_ms=parts.settled.recovered.record.started_ms,
            channels=parts.settled.recovered.channels,
            live_needs=parts.background.live_needs,
        )

    def by_kind(self) -> dict[str, Handler]:
        return {
            "checkpoint": self.checkpoint,
            "savepoint": self.savepoint,
            "stop": self.stop,
            "gc": self._collection.collect,
        }

    def checkpoint(self, mode: str | None = None, timeout: str | float | None = None) -> dict[str, Any]:
        return {"epoch": self._checkpoints.trigger(mode=mode, seconds=seconds_of(timeout))}

    def savepoint(self, name: str, drain: bool = True, note: str = "") -> dict[str, Any]:
        taken: dict[str, Any] = msgspec.to_builtins(self._checkpoints.savepoint(name, drain=drain, note=note))
        return taken

    def stop(self, savepoint: str | None = None, drain: bool = False) -> dict[str, Any]:
        taken = None if savepoint is None else msgspec.to_builtins(self._checkpoints.last_savepoint(savepoint))
        drains_now = drain and savepoint is None
        threading.Timer(_STOP_DELAY_SECONDS, self._stop, kwargs={"drain": drains_now}).start()
        return {"stopping": True, "savepoint": taken}


class RequestLoop:
    """Answers the request files of one flow on a separate thread."""

    def __init__(self, flow: FlowName, layout: Layout, handlers: RequestHandlers, lifecycle: Lifecycle) -> None:
        self._flow = flow
        self._folder = RequestFolder(layout.requests, handlers.by_kind())
        self._is_over = lifecycle.is_over
        self._thread = threading.Thread(target=self._run, name="cutline-requests", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The thread ends by itself; it may be waiting for something that fails when the flow ends."""

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                self._folder.take()
            except OSError:  # for example a full disk: it must end neither the flow nor this thread
                log.warning("request_not_answered", flow=self._flow, exc_info=True)
