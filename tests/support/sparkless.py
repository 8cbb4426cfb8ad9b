"""A whole flow on real storage, with everything but Spark: queries are steps that the test takes one at a time.

    numbers ── totals ── (sink table)

``numbers`` emits one number per batch, 0, 1, 2 …; ``totals`` counts what it has seen and passes each number on with its
count. A number that is lost or comes twice, and a state that does not fit the positions, show in the sink.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cutline.base import durable
from cutline.base.crashpoints import crashpoint
from cutline.config.compatibility import check_options
from cutline.config.options import build_options
from cutline.errors import FencedError, FlowFailedError
from cutline.flow import Flow
from cutline.model.entries import Segment
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, BatchId, Epoch, FlowName, OperatorId, Position, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.staging import StagedBatch
from cutline.model.status import RemoteStatus
from cutline.objects import open_store
from cutline.ports.engine import SegmentPlace, StagedTask, StageJob
from cutline.ports.executors import Executors
from cutline.ports.progress import Progress
from cutline.ports.sinks import Sink
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.protocol.publish.commit import CommitPermit
from cutline.runtime import launch
from cutline.runtime.launch import current_request
from cutline.storage.local import LocalStore
from cutline.testing.twins.engine import MemoryEngine
from cutline.testing.twins.sink import MemorySink
from cutline.worker.backpressure import StopAtBoundary
from tests.support.spark_dirs import SparkDir

NUMBERS, TOTALS, TABLE = OperatorId("numbers"), OperatorId("totals"), SinkId("table")
LONG_SECONDS = 20.0
#: [number, how many had been seen with it]
Row = list[int]


class FolderSink(MemorySink):
    """Publishes one file per epoch with rows; it outlives the process."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def claimed(self) -> str:
        path = self.folder / "claim"
        return path.read_text() if path.exists() else ""

    def claim(self, history: str, *, expected: str) -> None:
        if self.claimed() != expected:
            raise FencedError("another start has taken the sink over meanwhile")
        self.newest_claim = f"{secrets.token_hex(8)} {history}"
        durable.replace(self.folder / "claim", self.newest_claim.encode())

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        if self.newest_claim != self.claimed():
            raise FencedError("another process has taken the sink over")
        if self.commit_failures:
            raise self.commit_failures.pop(0)
        crashpoint("sink-commit-begun", permit.sink)
        rows = [row for batch in staged for piece in batch.pieces for row in piece["rows"]]
        crashpoint("sink-commit-half", permit.sink)
        if rows:
            durable.create(self.folder / f"{permit.epoch:018d}.json", json.dumps(rows).encode())
        crashpoint("sink-commit-done", permit.sink)

    def published(self) -> Epoch | None:
        return Epoch(max((int(path.stem) for path in self.folder.glob("*.json")), default=0)) or None

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            if int(path.stem) > epoch:
                crashpoint("sink-rewind-half")
                path.unlink()

    def rows(self) -> list[Row]:
        return [row for path in sorted(self.folder.glob("*.json")) for row in json.loads(path.read_bytes())]


class HandDrivenBatch:
    """A planned batch whose rows are known."""

    def __init__(self, batch: int, positions: dict[str, int], rows: list[Row], watermark_ms: int) -> None:
        self.batch = BatchId(batch)
        self._watermark_ms = watermark_ms
        self._positions = {OperatorId(name): Position(at) for name, at in positions.items()}
        self._rows = rows

    def positions(self) -> Mapping[OperatorId, Position]:
        return self._positions

    def watermark_ms(self) -> int:
        return self._watermark_ms

    def stage(self, job: StageJob) -> list[StagedTask]:
        segment = None
        if job.segments is not None and self._rows:
            name, content = f"g{job.generation}-b{job.batch}.arrow", json.dumps(self._rows).encode()
            if job.segments.is_folder:
                durable.replace(Path(job.segments.url) / name, content, sync=False)
            else:
                open_store(job.segments.url, job.segments.options).replace(name, content)
            segment = Segment(name=name, rows=len(self._rows), size_bytes=len(content), crc32=zlib.crc32(content))
        pieces = {sink: [{"rows": self._rows, "size_bytes": 1}] if self._rows else [] for sink in job.stagers}
        return [StagedTask(rows=len(self._rows), segment=segment, pieces=pieces)]

    def run_to_end(self) -> None: ...


class HandDrivenEngine(MemoryEngine):
    """Plans the counting flow; the batches are steps of ``SparklessFlow``."""

    def __init__(self, graph: FlowGraph) -> None:
        super().__init__()
        self._graph = graph

    def plan(self) -> dict[OperatorId, OperatorPlan]:
        return {
            name: OperatorPlan(operator=name, subtasks=1, is_stateful=True, schema_ipc=b"numbers")
            for name in self._graph.names
        }


class SparklessFlow:
    """Started anew by every instance; what an earlier one left in the folder is taken up."""

    engine_type: type[HandDrivenEngine] = HandDrivenEngine
    batch_type: type[HandDrivenBatch] = HandDrivenBatch

    def __init__(
        self,
        storage: Path,
        *,
        own: Mapping[OperatorId, Mapping[str, Any]] | None = None,
        restore_to: int | str | None = None,
        on_rollback: str = "rewind",
        publish: str = "checkpoint",
        executors: Executors | None = None,
        rejoin: bool = False,
        name: str = "counting",
        functions: Mapping[OperatorId, Callable[..., Any]] | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """``own``: what the code of the flow says of single operators; ``on_rollback``, ``publish``: of its sink.

        ``functions``: other code for single operators; nothing calls it.
        """
        self.sink = FolderSink(storage / "table")
        self.options = build_options(
            {
                "checkpoint_interval": 0,
                "checkpoint_timeout": "60s",
                "retain_checkpoints": 1,
                "retain": "",
                "mode": "unaligned",
            },
            settings,
        )
        self.layout = Layout(storage / "storage", FlowName(name))
        durable.make_dir(self.layout.root)
        #: Event time, as the batches to come will tell it.
        self.watermark_ms = 0
        own, functions = own or {}, functions or {}
        flow = Flow(name)
        flow.operator("numbers", **own.get(NUMBERS, {}))(functions.get(NUMBERS, _unused))
        totals = functions.get(TOTALS, _unused)
        flow.operator("totals", inputs=["numbers"], subtasks=1, **own.get(TOTALS, {}))(totals)
        for sink_name, sink in self.sinks(storage).items():
            flow.sink("totals", sink, name=sink_name, on_rollback=on_rollback, publish=publish)
        self.graph = flow.graph()
        self.engine = self.engine_type(self.graph)
        check_options(self.options, flow=self.graph.flow, own=self.graph.own_options(self.options))
        self.run = launch.run_on(
            self.engine,
            flow,
            self.graph,
            self.options,
            self.layout,
            executors=executors,
            release_lock=lambda: None,
            request=current_request(self.layout, restore_to, None, allow_dropped=False, flow=flow.name),
            rejoin=rejoin,
            progress=progress,
        )
        self.recovered = self.run._parts.settled.recovered
        self.coordinator = self.run._parts.coordinator
        self.operators = self.run._parts.workers.operators
        self.metadata = self.coordinator._ports.metadata
        self.checkpoints = self.coordinator._ports.checkpoints
        reading = LocalStore.reading(self.layout)
        self.query_dirs, self.generations = reading.query_dirs, reading.generations
        # The first thing a query does is to run again what it had planned and not committed.
        for operator in self.graph.names:
            spark = SparkDir(self.spark_dir(operator), subtasks=1)
            if spark.planned(spark.committed + 1) is not None:
                self.step(operator)

    def sinks(self, storage: Path) -> dict[str, Sink]:
        return {"table": self.sink}

    def stop(self) -> None:
        self.run.stop()

    def remote_status(self) -> RemoteStatus:
        """Of a flow that has a remote tier."""
        remote = self.run.status().remote
        assert remote is not None
        return remote

    def fail(self, operator: OperatorId) -> None:
        """Its query fails however often it is started; wait until its region is back, or the flow has ended."""
        service = self.operators[operator]
        self.run._parts.regions.operator_failed(
            service, FlowFailedError("it fails", flow="counting", operator=operator)
        )
        self.wait(lambda: self.run._lifecycle.failure is not None or self.operators[operator] is not service)
        self.wait(lambda: self.run._lifecycle.failure is not None or not self.run._parts.regions._lock.locked())

    def spark_dir(self, operator: OperatorId) -> Path:
        return self.layout.spark_checkpoint_dir(operator, self.recovered.spark_dirs[operator])

    # ------------------------------------------------------------------ the queries

    def step(self, operator: OperatorId, *, commit: bool = True) -> bool:
        """What Spark does next: re-run the batch that was planned and not committed, or plan one if there is input."""
        spark = SparkDir(self.spark_dir(operator), subtasks=1)
        batch = spark.committed + 1
        positions = spark.planned(batch)
        if positions is None:
            positions = self._plan(operator)
            if positions is None:
                return False
            spark.plan(batch, positions)
        rows, state = self._compute(operator, spark, batch, positions)
        try:
            self.operators[operator].handle_batch(self.batch_type(batch, positions, rows, self.watermark_ms))
        except StopAtBoundary:
            if not self.operators[operator].replay.is_plan_wrong():
                raise
            # As the supervisor does it: the query is started again, and finds the plan that the log remembers.
            self.operators[operator].replay.prepare_query()
            return self.step(operator, commit=commit)
        if commit:
            spark.commit(batch, state=state)
        return True

    def _plan(self, operator: OperatorId) -> dict[str, int] | None:
        if operator == NUMBERS:
            return {}
        before = SparkDir(self.spark_dir(operator), subtasks=1)
        at = (before.planned(before.committed) or {}).get(NUMBERS, 0)
        admit = self.engine.gates[operator, NUMBERS]
        return {NUMBERS: admit} if admit > at else None

    def _compute(
        self, operator: OperatorId, spark: SparkDir, batch: int, positions: dict[str, int]
    ) -> tuple[list[Row], str]:
        if operator == NUMBERS:
            return [[batch, 0]], ""
        before = spark.root / "state/0/0" / f"{batch}.delta"
        # "<position>:<count>-<subtask>": the state knows how far it was read, so a state that does not fit shows.
        first, seen = map(int, before.read_text().partition("-")[0].split(":")) if batch else (0, 0)
        log = self.operators[NUMBERS].channel
        if positions[NUMBERS] > first and log.start > first:
            raise FileNotFoundError(f"entry {first} was truncated away")
        rows: list[Row] = []
        for entry in log.data_entries(Position(first), Position(positions[NUMBERS])):
            for segment in entry.segments:
                for number in self.numbers_in(log.segments.place, segment.name):
                    seen += 1
                    rows.append([number, seen])
        return rows, f"{positions[NUMBERS]}:{seen}"

    def numbers_in(self, place: SegmentPlace, name: str) -> list[int]:
        return [number for number, _ in json.loads(_content(place, name))]

    def emit(self, count: int) -> None:
        """``numbers`` runs so many batches, ``totals`` follows."""
        for _ in range(count):
            self.step(NUMBERS)
            self.wait(lambda: self.step(TOTALS))

    # ------------------------------------------------------------------ checkpoints

    def request(self, *, aligned: bool = False) -> Future[Epoch]:
        if self.options.is_per_operator:
            return self.coordinator.request_checkpoint(None)
        return self.coordinator.request_checkpoint(CheckpointOptions(alignment_limit_ms=None if aligned else 0))

    def checkpoint(self, *, aligned: bool = False) -> Epoch:
        """Take one and wait until it is published; ``totals`` goes on reading meanwhile."""
        future = self.request(aligned=aligned)
        self.wait(lambda: future.done() or (not self.step(TOTALS) and future.done()))
        return future.result(0)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not condition():
            if self.run._lifecycle.failure is not None:
                raise self.run._lifecycle.failure
            assert time.monotonic() < deadline, f"not in time: {self.coordinator.snapshot()}"
            threading.Event().wait(0.001)

    def drain(self) -> None:
        """Everything emitted is counted and published."""

        def is_read() -> bool:
            self.step(TOTALS)
            return self.operators[NUMBERS].credits.is_drained() and self.coordinator.is_settled()

        self.wait(is_read)
        self.checkpoint()
        self.wait(self.coordinator.is_settled)


def _content(place: SegmentPlace, name: str) -> bytes:
    if place.is_folder:
        return (Path(place.url) / name).read_bytes()
    return open_store(place.url, place.options).read(name)


def _unused(*_: Any) -> Any:
    raise NotImplementedError
