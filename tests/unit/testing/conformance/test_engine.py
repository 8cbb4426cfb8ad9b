"""The engine's twin passes the suite of its port."""

from __future__ import annotations

from pathlib import Path

from cutline.model.ids import OperatorId
from cutline.ports.engine import Engine
from cutline.testing.conformance.engine import EngineConformance
from cutline.testing.twins.engine import MemoryEngine


class TestMemoryEngine(EngineConformance):
    operator = OperatorId("totals")

    def make_engine(self, tmp_path: Path) -> Engine:
        return MemoryEngine()
