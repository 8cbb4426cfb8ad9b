"""A flow whose operator fails for good ends, however many checkpoints complete meanwhile, with the root cause first."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutline.errors import FlowFailedError
from cutline.model.ids import OperatorId
from cutline.model.status import FlowStatus
from cutline.ports.engine import BatchHandler, Query
from cutline.testing.twins.engine import IdleQuery
from tests.support.running import assert_each_once, running
from tests.support.sparkless import LONG_SECONDS, NUMBERS, TOTALS, HandDrivenEngine, SparklessFlow

TRACE = """[STREAM_FAILED] Query terminated with exception: Traceback (most recent call last):
  File "shop.py", line 7, in keyed
ValueError: the key is null
\tat org.apache.spark.scheduler.Task.run(Task.scala:141)
"""


class Poisoned(IdleQuery):
    """Fails as soon as the poison is there."""

    def __init__(self, poison: threading.Event) -> None:
        super().__init__()
        self._poison = poison

    def is_active(self) -> bool:
        return super().is_active() and not self._poison.is_set()

    def failure(self) -> str | None:
        return TRACE if self._poison.is_set() else None


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """``totals`` gets a row that it can never process."""
    poison = threading.Event()

    def start(_: HandDrivenEngine, operator: OperatorId, folder: Path, handler: BatchHandler) -> Query:
        return Poisoned(poison) if operator == TOTALS else IdleQuery()

    monkeypatch.setattr(HandDrivenEngine, "start", start)
    return poison


def poisoned(storage: Path, poison: threading.Event, **settings: Any) -> SparklessFlow:
    """Checkpoints complete all the time, far more often than the query is restarted."""
    flow = SparklessFlow(storage, checkpoint_interval="5ms", restart_limit=3, restart_backoff="30ms", **settings)
    flow.emit(2)
    flow.checkpoint()
    flow.step(NUMBERS)
    poison.set()
    return flow


@pytest.mark.parametrize("mode", ["unaligned", "per-operator"])
def test_a_permanently_failing_operator_ends_the_flow(tmp_path: Path, poison: threading.Event, mode: str) -> None:
    flow = poisoned(tmp_path, poison, mode=mode)
    seen: list[FlowStatus] = []
    while not flow.run._lifecycle.is_over.is_set():
        seen.append(flow.run.status())
        flow.run._lifecycle.is_over.wait(0.01)
    with pytest.raises(FlowFailedError) as ended:
        flow.run.await_termination(LONG_SECONDS)
    said = str(ended.value)
    assert said.startswith("ValueError: the key is null")
    assert "failed 4 times without finishing a batch (flow=counting" in said
    assert len(said.splitlines()) <= 3
    (trace,) = flow.layout.traces.glob("totals-*.txt")
    assert str(trace) in said
    assert trace.read_text() == TRACE
    failing = [one for one in seen if one.operators["totals"].failures > 1]
    assert failing
    assert not any(one.health.healthy for one in failing)
    assert "totals has failed" in failing[0].health.reason
    assert "ValueError: the key is null" in failing[0].health.reason
    assert {one.state for one in failing} <= {"unhealthy", "failed"}
    assert len({epoch for one in seen for epoch in one.checkpoints.complete}) > 2, "epochs went on meanwhile"
    assert sum(flow.run.status().recovery.counts.values()) <= 3, "one start, and a restore or two"
    assert flow.run.status().failure == said
    poison.clear()
    with running(tmp_path, mode=mode) as flow:
        flow.drain()
        assert_each_once(flow.sink.rows())
        assert len(flow.sink.rows()) == 3


def test_a_flow_that_cannot_continue_stays_by_option(tmp_path: Path, poison: threading.Event) -> None:
    flow = poisoned(tmp_path, poison, on_failure="stay")
    flow.run._lifecycle.is_over.wait(LONG_SECONDS)
    assert not flow.run.await_termination(0.2), "it stays"
    with pytest.raises(FlowFailedError, match="the key is null"):
        flow.run.trigger_checkpoint()
    status = flow.run.status()
    assert status.state == "failed"
    assert status.failure.startswith("ValueError: the key is null")
    flow.run.stop()
    with pytest.raises(FlowFailedError, match="the key is null"):
        flow.run.await_termination(0)
    assert msgspec.json.decode(flow.layout.status.read_bytes(), type=FlowStatus).state == "failed"


def test_the_status_of_a_failed_flow_shows_no_secret(tmp_path: Path) -> None:
    flow = SparklessFlow(tmp_path)
    flow.run.fail(ValueError("no answer from postgresql://bob:hunter2@db/x"))
    assert flow.run._lifecycle.ended.wait(LONG_SECONDS)
    assert flow.run.status().failure == "no answer from postgresql://***@db/x"
