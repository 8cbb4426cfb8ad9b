"""Whether checkpoints fail more often in a row than the flow's owner tolerates."""

from __future__ import annotations

from cutline.protocol.messages.coordinator import ReportHealth


class Health:
    """Counts consecutive failures; reports only changes."""

    def __init__(self, tolerable_failures: int | None) -> None:
        """``tolerable_failures``: one more makes the flow unhealthy; None: any number is tolerated."""
        self._tolerable = tolerable_failures
        self.failures_in_a_row = 0
        self.is_healthy = True

    def failed(self, reason: str) -> list[ReportHealth]:
        self.failures_in_a_row += 1
        if not self.is_healthy or self._tolerable is None or self.failures_in_a_row <= self._tolerable:
            return []
        self.is_healthy = False
        return [ReportHealth(is_healthy=False, failures=self.failures_in_a_row, reason=reason)]

    def succeeded(self) -> list[ReportHealth]:
        self.failures_in_a_row = 0
        if self.is_healthy:
            return []
        self.is_healthy = True
        return [ReportHealth(is_healthy=True, failures=0)]
