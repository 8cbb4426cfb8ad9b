"""A function as a sink: the suite, with a function that is idempotent by its key, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, Generation
from cutline.sinks import Foreach
from cutline.testing.conformance.sinks import Case, SinkBehaviour, rows
from tests.support.sink_targets import ForeachTarget


class TestForeach(ForeachTarget, SinkBehaviour):
    pass


class Calls:
    """A function that remembers what it was called with, and fails when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int, str]] = []
        self.failures: list[Exception] = []

    def __call__(self, batches: Iterator[pa.RecordBatch], epoch: int, key: str) -> None:
        ids = [number for batch in batches for number in batch["id"].to_pylist()]
        self.calls.append((ids, epoch, key))
        if self.failures:
            raise self.failures.pop()


def start(tmp_path: Path, function: Any) -> Case:
    sink = Foreach(function, staging=tmp_path / "staging")
    context = TestForeach().context()
    sink.open(context)
    return Case(sink=sink, context=context)


def test_the_function_gets_the_rows_of_an_epoch_in_order_with_its_key(tmp_path: Path) -> None:
    calls = Calls()
    case = start(tmp_path, calls)
    case.commit(3, case.stage(0, rows(5, 4, 9), rows(1)), case.stage(1, rows(2)))
    case.commit(4)
    case.generation = Generation(2)
    case.publish(7, 2, rows(3))
    assert calls.calls == [([5, 4, 9, 1, 2], 3, "orders/totals-out/1/3"), ([3], 7, "orders/totals-out/2/7")]


def test_a_call_that_fails_is_repeated_with_the_same_key(tmp_path: Path) -> None:
    calls = Calls()
    calls.failures = [ConnectionError("no route")]
    case = start(tmp_path, calls)
    staged = case.stage(0, rows(1))
    with pytest.raises(ConnectionError):
        case.commit(1, staged)
    assert case.sink.published() is None
    permit = case.commit(1, staged)
    assert calls.calls == [([1], 1, "orders/totals-out/1/1")] * 2
    case.sink.commit(permit, [staged], {})
    assert len(calls.calls) == 2


def test_it_says_that_it_cannot_go_back(tmp_path: Path) -> None:
    case = start(tmp_path, Calls())
    case.sink.rewind(NO_EPOCH)
    case.publish(1, 0, rows(1))
    assert not case.sink.can_rewind
    with pytest.raises(SinkError, match="on_rollback"):
        case.sink.rewind(NO_EPOCH)


def test_the_ledger_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.foreach.sink.EPOCHS_REMEMBERED", 3)
    case = start(tmp_path, Calls())
    for epoch in range(1, 6):
        case.publish(epoch, epoch, rows(epoch))
    assert case.sink.published() == Epoch(5)
    anew = start(tmp_path, Calls())
    with pytest.raises(SinkError, match="another history"):
        anew.publish(1, 0, rows(1))
