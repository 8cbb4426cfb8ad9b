"""Telemetry passes the suite of its port."""

from __future__ import annotations

import pytest

from cutline.model.ids import FlowName
from cutline.ports.telemetry import NoTelemetry, Telemetry
from cutline.runtime.metrics import Metrics
from cutline.testing.conformance.telemetry import TelemetryConformance
from cutline.testing.twins.telemetry import MemoryTelemetry


class TestTelemetry(TelemetryConformance):
    @pytest.fixture(params=["prometheus", "none", "memory"])
    def telemetry(self, request: pytest.FixtureRequest) -> Telemetry:
        if request.param == "prometheus":
            return Metrics(FlowName("flow"))
        return NoTelemetry() if request.param == "none" else MemoryTelemetry()


def test_the_twin_remembers_events_in_their_order() -> None:
    twin = MemoryTelemetry()
    twin.checkpoint_aborted()
    twin.health_changed(is_healthy=False)
    assert twin.events == [("checkpoint_aborted", ()), ("health_changed", (False,))]
