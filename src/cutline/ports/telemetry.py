"""The telemetry port: what a running flow counts while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cutline.model.generation import LostInput
from cutline.model.ids import Epoch, OperatorId, SinkId


class Telemetry(Protocol):
    """Each call counts one event. It never blocks and never fails: measuring must not disturb the flow."""

    def checkpoint_completed(self, epoch: Epoch, duration_ms: int) -> None: ...

    def checkpoint_aborted(self) -> None: ...

    def sink_published(self, sink: SinkId, epoch: Epoch) -> None: ...

    def sink_failed(self, sink: SinkId) -> None:
        """A sink could not commit an epoch; the commit is retried."""
        ...

    def health_changed(self, *, is_healthy: bool) -> None: ...

    def query_restarted(self, operator: OperatorId) -> None: ...

    def recovered(self, path: str, seconds: float) -> None:
        """The flow, or a region of it, runs again; ``path`` is the recovery path."""
        ...

    def input_lost(self, lost: Iterable[LostInput]) -> None: ...


class NoTelemetry:
    """Counts nothing."""

    def checkpoint_completed(self, epoch: Epoch, duration_ms: int) -> None:
        pass

    def checkpoint_aborted(self) -> None:
        pass

    def sink_published(self, sink: SinkId, epoch: Epoch) -> None:
        pass

    def sink_failed(self, sink: SinkId) -> None:
        pass

    def health_changed(self, *, is_healthy: bool) -> None:
        pass

    def query_restarted(self, operator: OperatorId) -> None:
        pass

    def recovered(self, path: str, seconds: float) -> None:
        pass

    def input_lost(self, lost: Iterable[LostInput]) -> None:
        pass
