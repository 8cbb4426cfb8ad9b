"""A query that is behind its log and seems idle is started again, ever more rarely while that does not help."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cutline.config.options import build_options
from cutline.model.ids import FlowName, OperatorId
from cutline.ports.telemetry import NoTelemetry
from cutline.testing.twins.engine import IdleQuery, MemoryEngine
from cutline.worker.query_supervisor import Supervisor


class BehindItsLog(IdleQuery):
    def is_idle(self) -> bool:
        return True


class Engine(MemoryEngine):
    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def start(self, *_: Any) -> BehindItsLog:
        self.started += 1
        return BehindItsLog()


class Watched:
    def __init__(self) -> None:
        self.engine = Engine()
        self.replay = SimpleNamespace(is_repeating=lambda: True, prepare_query=lambda: None, repeated_total=0)
        service = SimpleNamespace(
            operator=OperatorId("o"), replay=self.replay, spark_checkpoint_dir=Path(), handle_batch=None
        )
        self.supervisor = Supervisor(
            flow=FlowName("f"),
            service=cast(Any, service),
            engine=self.engine,
            options=build_options({}),
            on_fatal=lambda _: None,
            on_given_up=lambda *_: None,
            metrics=NoTelemetry(),
        )
        self.supervisor._start_query()

    def looks_until_restart(self) -> int:
        before, looks = self.engine.started, 0
        while self.engine.started == before:
            self.supervisor._look_at(self.supervisor.query)
            looks += 1
        return looks


def test_a_query_that_starts_slowly_gets_ever_more_time() -> None:
    watched = Watched()
    looks = [watched.looks_until_restart() for _ in range(4)]
    assert looks == [11, 11, 21, 41]


def test_progress_makes_it_quick_again() -> None:
    watched = Watched()
    for _ in range(4):
        watched.looks_until_restart()
    watched.replay.repeated_total += 1
    watched.looks_until_restart()
    assert watched.looks_until_restart() == 11
