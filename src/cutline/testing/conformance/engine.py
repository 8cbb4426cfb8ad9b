"""The suite that every engine must pass, without rows: queries, gates, closing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from cutline.model.ids import Generation, OperatorId, Position
from cutline.ports.engine import Engine, StreamingBatch
from cutline.protocol.history.lineage import Lineage


class EngineConformance(ABC):
    """Subclasses create an engine for a flow with one operator, which reads no channel."""

    #: The operator's name.
    operator: OperatorId

    @abstractmethod
    def make_engine(self, tmp_path: Path) -> Engine: ...

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        return self.make_engine(tmp_path)

    def test_a_query_is_active_until_it_is_stopped(self, engine: Engine, tmp_path: Path) -> None:
        engine.begin_stop()
        query = engine.start(self.operator, tmp_path / "query", _ignore)
        assert query.is_active() and query.failure() is None
        for _ in range(2):
            query.stop()
            assert not query.is_active()
        query.wait_processed()
        assert query.state_bytes() is None

    def test_a_query_may_be_started_again(self, engine: Engine, tmp_path: Path) -> None:
        engine.expect_restarts(self.operator, True)
        for _ in range(2):
            query = engine.start(self.operator, tmp_path / "query", _ignore)
            assert query.is_active()
            query.stop()
        engine.expect_restarts(self.operator, False)

    def test_a_gate_may_be_set_before_the_query_runs_and_again(self, engine: Engine) -> None:
        lineage = Lineage.begin(Generation(1))
        for admit in (0, 5, 3):
            engine.set_gate(self.operator, OperatorId("orders"), Position(admit), lineage, Position(0))

    def test_an_engine_may_be_closed_twice(self, engine: Engine) -> None:
        for _ in range(2):
            engine.close()


def _ignore(_: StreamingBatch) -> None: ...
