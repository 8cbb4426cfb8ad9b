"""A whole flow on real storage without Spark, whose operators change from one start to the next.

Sources emit one number per batch, 0, 1, 2 …; every other operator counts what it has read and passes each number on
with its count. What is lost, comes twice, or is counted by a state that does not fit shows in the sinks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutline.base import durable
from cutline.channels.entry_files import data_dir
from cutline.config.options import build_options
from cutline.flow import Flow
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.model.layout import Layout
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.runtime import launch
from cutline.runtime.launch import current_request
from tests.support.spark_dirs import SparkDir
from tests.support.sparkless import LONG_SECONDS, FolderSink, HandDrivenBatch, HandDrivenEngine, Row

#: Operator → what it reads.
Edges = Mapping[str, tuple[str, ...]]
#: Sink → the operator whose rows it publishes.
Tables = Mapping[str, str]


class ChangingFlow:
    """Started anew by every instance, with the operators it is given."""

    def __init__(
        self,
        storage: Path,
        edges: Edges,
        tables: Tables,
        *,
        restore_to: int | str | None = None,
        rename: Mapping[str, str] | None = None,
        allow_dropped: bool = False,
        **settings: Any,
    ) -> None:
        self.sinks = {name: FolderSink(storage / "tables" / name) for name in tables}
        self.options = build_options(
            {"checkpoint_interval": 0, "retain_checkpoints": 9, "retain": "", "mode": "unaligned"},
            settings,
        )
        self.layout = Layout(storage / "storage", "changing")
        durable.make_dir(self.layout.root)
        flow = Flow("changing")
        for name, inputs in edges.items():
            flow.operator(name, inputs=list(inputs), subtasks=1)(_unused)
        for name, operator in tables.items():
            flow.sink(operator, self.sinks[name], name=name)
        self.graph = flow.graph()
        self.engine = HandDrivenEngine(self.graph)
        request = current_request(self.layout, restore_to, rename, allow_dropped=allow_dropped, flow=flow.name)
        self.run = launch.run_on(
            self.engine, flow, self.graph, self.options, self.layout, release_lock=lambda: None, request=request
        )
        self.recovered = self.run._parts.settled.recovered
        self.coordinator = self.run._parts.coordinator
        self.operators = self.run._parts.workers.operators
        self.checkpoints = self.coordinator._ports.checkpoints
        for operator in self.graph.names:
            spark = self.spark(operator)
            if spark.planned(spark.committed + 1) is not None:
                self.step(operator)

    def stop(self) -> None:
        self.run.stop()

    def spark(self, operator: str) -> SparkDir:
        name = OperatorId(operator)
        return SparkDir(self.layout.spark_checkpoint_dir(name, self.recovered.spark_dirs[name]), subtasks=1)

    def fates(self) -> dict[str, str]:
        """What became of every operator, by its name now, or by what it was called."""
        return {str(row.now or row.was): row.fate for row in self.run.status().recovery.operators}

    # ------------------------------------------------------------------ the queries

    def step(self, operator: str) -> bool:
        """What Spark does next: re-run the batch that was planned and not committed, or plan one if there is input."""
        name, spark = OperatorId(operator), self.spark(operator)
        batch = spark.committed + 1
        positions = spark.planned(batch)
        if positions is None:
            positions = self._plan(name, spark)
            if positions is None:
                return False
            spark.plan(batch, positions)
        rows, state = self._compute(name, spark, batch, positions)
        self.operators[name].handle_batch(HandDrivenBatch(batch, positions, rows, 0))
        spark.commit(batch, state=state)
        return True

    def _begins(self, name: OperatorId) -> dict[str, int]:
        return {one: self.engine.beginnings[name, one] for one in self.graph.node(name).inputs}

    def _plan(self, name: OperatorId, spark: SparkDir) -> dict[str, int] | None:
        inputs = self.graph.node(name).inputs
        if not inputs:
            return {}
        before = spark.planned(spark.committed) or self._begins(name)
        assert set(before) == set(inputs), f"{name} was told of {sorted(before)}, it reads {sorted(inputs)}"
        admitted = {str(one): self.engine.gates[name, one] for one in inputs}
        return admitted if any(admitted[one] > before[one] for one in admitted) else None

    def _compute(
        self, name: OperatorId, spark: SparkDir, batch: int, positions: Mapping[str, int]
    ) -> tuple[list[Row], str]:
        if not positions:
            return [[batch, 0]], ""
        before = spark.root / "state/0/0" / f"{batch}.delta"
        # The state holds how much was counted; where it was read up to is what Spark has noted.
        seen = int(before.read_text().partition("-")[0]) if batch else 0
        read = spark.planned(batch - 1) if batch else self._begins(name)
        rows: list[Row] = []
        for channel, end in positions.items():
            first = (read or {})[channel]
            log = self.operators[OperatorId(channel)].channel
            if end > first and log.start > first:
                raise FileNotFoundError(f"entry {first} of {channel} was truncated away")
            for entry in log.data_entries(Position(first), Position(end)):
                for segment in entry.segments:
                    for number, _ in json.loads((data_dir(log.folder) / segment.name).read_bytes()):
                        seen += 1
                        rows.append([number, seen])
        return rows, str(seen)

    def emit(self, count: int, *sources: str) -> None:
        """These sources run so many batches (all, if none is named); nobody reads yet."""
        for source in sources or sorted(self.graph.sources):
            for _ in range(count):
                self.step(source)

    def read_all(self) -> None:
        """Everything emitted is counted."""
        readers = [name for name in self.graph.names if self.graph.node(name).inputs]

        def is_read() -> bool:
            for name in readers:
                self.step(name)
            return all(self.operators[name].credits.is_drained() for name in self.graph.names)

        self.wait(is_read)

    def settle(self) -> Epoch:
        """Everything emitted is counted and published; returns the epoch."""
        self.read_all()
        epoch = self.checkpoint()
        self.wait(self.coordinator.is_settled)
        return epoch

    def checkpoint(self) -> Epoch:
        """Take one as everything stands, with what is in flight."""
        return self.coordinator.request_checkpoint(CheckpointOptions(alignment_limit_ms=0)).result(LONG_SECONDS)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not condition():
            if self.run._lifecycle.failure is not None:
                raise self.run._lifecycle.failure
            assert time.monotonic() < deadline, f"not in time: {self.coordinator.snapshot()}"
            threading.Event().wait(0.001)

    def table(self, name: str) -> list[Row]:
        return self.sinks[name].rows()


@contextmanager
def changing(storage: Path, edges: Edges, tables: Tables, **more: Any) -> Iterator[ChangingFlow]:
    flow = ChangingFlow(storage, edges, tables, **more)
    try:
        yield flow
    finally:
        flow.stop()


def counted(first: int, end: int, *, seen: int | None = None) -> list[Row]:
    """The rows of a counter that has read the numbers in [first, end), ``seen`` before them."""
    offset = first if seen is None else seen
    return [[number, number - first + offset + 1] for number in range(first, end)]


def _unused(*_: Any) -> Any:
    raise NotImplementedError
