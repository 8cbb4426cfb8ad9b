"""Source guards pass the suite of their port."""

from __future__ import annotations

import pytest

from cutline.connectors.replay_guard import ReplayGuard
from cutline.model.plan import PlannedSource
from cutline.ports.source_guard import NoGuard, SourceGuard
from cutline.testing.conformance.source_guard import SourceGuardConformance


class TestSourceGuards(SourceGuardConformance):
    @pytest.fixture(params=["replay", "none"])
    def guard(self, request: pytest.FixtureRequest) -> SourceGuard:
        return ReplayGuard() if request.param == "replay" else NoGuard()

    @pytest.fixture
    def unknown(self) -> PlannedSource:
        return PlannedSource(format="of-another-program")
