"""Telemetry that records every event."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId, SinkId


class MemoryTelemetry:
    """See ``cutline.ports.telemetry``. ``events``: (name, arguments), in the order of the calls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[object, ...]]] = []

    def checkpoint_completed(self, epoch: Epoch, duration_ms: int) -> None:
        self.events.append(("checkpoint_completed", (epoch, duration_ms)))

    def checkpoint_aborted(self) -> None:
        self.events.append(("checkpoint_aborted", ()))

    def sink_published(self, sink: SinkId, epoch: Epoch) -> None:
        self.events.append(("sink_published", (sink, epoch)))

    def sink_failed(self, sink: SinkId) -> None:
        self.events.append(("sink_failed", (sink,)))

    def health_changed(self, *, is_healthy: bool) -> None:
        self.events.append(("health_changed", (is_healthy,)))

    def query_restarted(self, operator: OperatorId) -> None:
        self.events.append(("query_restarted", (operator,)))

    def recovered(self, path: str, seconds: float) -> None:
        self.events.append(("recovered", (path, seconds)))

    def input_lost(self, lost: Iterable[LostInput]) -> None:
        self.events.append(("input_lost", tuple(lost)))
