"""Requests to a running flow: one handler per kind of request, for every transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from cutline.base import durable, records
from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.base.redaction import without_secrets
from cutline.config.values import parse_duration_ms
from cutline.fingerprint.definition import place_of
from cutline.maintenance.gc_live import LiveCollection
from cutline.model.graph import SinkNode
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.model.layout import Layout
from cutline.model.status import RESTORE_LIMITS, RestoreLimits, RewindWindow
from cutline.ports.sinks import RewindsSoFar, RewindsToPoints, Sink
from cutline.protocol.publish.rewind_points import Gap
from cutline.protocol.recovery.facts import SinkFacts
from cutline.recovery.facts import sink_facts, with_limits
from cutline.runtime.checkpoints_api import CheckpointsApi
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.transport.request_files import RequestFolder
from cutline.worker.immediate_publishing import ImmediateSink

log = get_logger(__name__)

_LOOK_SECONDS = 0.25
#: A flow that has ended answers no request, so the answer to "stop" is sent first.
_STOP_DELAY_SECONDS = 0.25
#: A sink that publishes, or whose target is away, is not waited for longer.
_SINK_SECONDS = 3.0
#: Nor by a stop.
_STOP_SECONDS = 1.0

Handler = Callable[..., dict[str, Any]]


def seconds_of(timeout: str | float | None) -> float | None:
    return None if timeout is None else parse_duration_ms(timeout, option="timeout") / 1000


class RequestHandlers:
    """Arguments and results are plain values, as request files and HTTP transport them."""

    def __init__(self, parts: FlowParts, checkpoints: CheckpointsApi, stop: Callable[..., None]) -> None:
        """``stop``: stops the flow; takes ``drain``."""
        self._parts = parts
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
            "pin": self.pin,
            "hold": self.hold,
            "restore_limits": self.restore_limits,
            "sink_facts": self.sink_facts,
            "gc": self._collection.collect,
        }

    def checkpoint(self, mode: str | None = None, timeout: str | float | None = None) -> dict[str, Any]:
        return {"epoch": self._checkpoints.trigger(mode=mode, seconds=seconds_of(timeout))}

    def savepoint(self, name: str, drain: bool = True, note: str = "") -> dict[str, Any]:
        taken: dict[str, Any] = msgspec.to_builtins(self._checkpoints.savepoint(name, drain=drain, note=note))
        return taken

    def pin(self, epoch: int, is_pinned: bool = True) -> dict[str, Any]:
        (self._checkpoints.pin if is_pinned else self._checkpoints.unpin)(Epoch(epoch))
        return {"epoch": epoch, "is_pinned": is_pinned}

    def hold(self, epoch: int, is_held: bool = True) -> dict[str, Any]:
        """For a restore that is about to stop this flow."""
        coordinator = self._parts.coordinator
        (coordinator.hold if is_held else coordinator.end_hold)(Epoch(epoch))
        return {"epoch": epoch, "is_held": is_held}

    def restore_limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = msgspec.to_builtins(restore_limits(self._parts))
        return limits

    def sink_facts(self) -> dict[str, Any]:
        """What a start would find out about the sinks, and the options that decide with it."""
        answers = [_sink_answer(self._parts, node) for node in self._parts.definition.graph.sinks]
        options = self._parts.definition.options
        return {
            "sinks": [msgspec.to_builtins(facts) for facts, _ in answers],
            "problems": {facts.sink: problem for facts, problem in answers if problem},
            "options": {"missing_input": options.missing_input, "mode": options.mode},
            "places": {name: place_of(_of_the_user(sink)) for name, sink in self._parts.definition.sinks.items()},
        }

    def stop(self, savepoint: str | None = None, drain: bool = False) -> dict[str, Any]:
        taken = None if savepoint is None else msgspec.to_builtins(self._checkpoints.last_savepoint(savepoint))
        drains_now = drain and savepoint is None
        threading.Timer(_STOP_DELAY_SECONDS, self._stop, kwargs={"drain": drains_now}).start()
        return {"stopping": True, "savepoint": taken}


def restore_limits(
    parts: FlowParts,
    *,
    is_asked: Callable[[SinkNode], bool] = lambda _: True,
    seconds: float = _SINK_SECONDS,
    at_ms: int = 0,
) -> RestoreLimits:
    """How far the sinks can be rewound now, and what retention goes by. ``seconds``: a sink has to answer."""
    options = parts.definition.options
    names = [name for name in options.__struct_fields__ if name.startswith("retain")]
    return RestoreLimits(
        at_ms=at_ms,
        sinks=[_window(parts, node, seconds) for node in parts.definition.graph.sinks if is_asked(node)],
        options={name: getattr(options, name) for name in (*names, "checkpoint_interval_ms", "mode")},
    )


def store_last_limits(parts: FlowParts) -> None:
    """What limits restores when the flow stops: a stopped flow's sinks are known to its code only.

    For ``cutline checkpoints``; nothing depends on it, so it need not survive a power cut.
    """

    def is_quick(node: SinkNode) -> bool:
        """Whether it answers from its ledger. A table's log may be long; and it changes while the flow is stopped."""
        sink = parts.definition.sinks[node.sink]
        has_ledger = isinstance(sink, RewindsToPoints) or not isinstance(sink, RewindsSoFar)
        return has_ledger and node.publish == "checkpoint"

    limits = restore_limits(parts, is_asked=is_quick, seconds=_STOP_SECONDS, at_ms=now_ms())
    durable.replace(parts.definition.layout.restore_limits, records.encode(RESTORE_LIMITS, limits), sync=False)


def _window(parts: FlowParts, node: SinkNode, seconds: float) -> RewindWindow:
    commits = parts.workers.operators[node.operator].sink_commits
    oldest, gaps, problem = None, list[Gap](), ""
    try:
        asked = commits.ask_oldest_rewinds()
        gaps += commits.ask(partial(_gaps, node.sink)).result(timeout=seconds)
        oldest = asked.result(timeout=seconds).get(node.sink)
    except Exception as error:  # noqa: BLE001 (a sink may raise anything, and the others have answers)
        problem = without_secrets(f"{type(error).__name__}: {error}".rstrip(": "))
    return RewindWindow(
        sink=node.sink,
        published=parts.coordinator.published(node.sink),
        on_rollback=node.on_rollback,
        can_rewind=parts.definition.sinks[node.sink].can_rewind,
        oldest=oldest,
        gaps=gaps,
        problem=problem,
    )


def _sink_answer(parts: FlowParts, node: SinkNode) -> tuple[SinkFacts, str]:
    """What the sink itself says; if it cannot be asked, what the coordinator knows, and why."""
    graph, metadata = parts.definition.graph, parts.stores.metadata

    def question(sinks: Mapping[SinkId, Sink]) -> SinkFacts:
        own = {node.sink: sinks[node.sink]}
        (facts,) = with_limits(sink_facts(graph, own, metadata), own)
        return facts

    asked = parts.workers.operators[node.operator].sink_commits.ask(question)
    try:
        return asked.result(timeout=_SINK_SECONDS), ""
    except Exception as error:  # noqa: BLE001 (a sink may raise anything, and the others have answers)
        published = parts.coordinator.published(node.sink)
        facts = SinkFacts(
            sink=node.sink,
            operator=node.operator,
            published=published,
            recorded=published,
            on_rollback=node.on_rollback,
            publish=node.publish,
            can_rewind=parts.definition.sinks[node.sink].can_rewind,
        )
        return facts, without_secrets(f"{type(error).__name__}: {error}".rstrip(": "))


def _of_the_user(sink: Sink) -> Sink:
    return sink.sink if isinstance(sink, ImmediateSink) else sink


def _gaps(name: SinkId, sinks: Mapping[SinkId, Sink]) -> tuple[Gap, ...]:
    sink = sinks[name]
    return sink.rewind_gaps() if isinstance(sink, RewindsToPoints) else ()


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
