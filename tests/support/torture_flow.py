"""A small flow of real parts on real storage, without Spark, whose sinks get real rows.

    events (every row once, appended) ── latest (per key: newest row and running total)

Whatever the batches and epochs were, what is right after the first ``n`` rows depends on ``n`` alone: ``all_rows(n)``
and ``with_totals(n)``. A row that is lost or comes twice, a state that does not fit its positions: both show in the
sinks.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa

from cutline.base import durable
from cutline.config.options import build_options
from cutline.errors import DamagedRecordError, StoreError
from cutline.flow import Flow
from cutline.model.entries import Segment
from cutline.model.ids import BatchId, Epoch, OperatorId, Position, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.staging import Piece
from cutline.ports.engine import StagedTask, StageJob
from cutline.ports.sinks import Sink, StageAttempt
from cutline.protocol.messages.coordinator import CheckpointOptions
from cutline.runtime import launch
from cutline.runtime.launch import current_request
from cutline.storage.local import LocalStore
from cutline.testing.twins.engine import MemoryEngine
from tests.support.spark_dirs import SparkDir

FLOW, EVENTS, LATEST = "torture", OperatorId("events"), OperatorId("latest")
SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.string()), ("value", pa.int64())])
ROWS_PER_BATCH, KEYS, TASKS = 4, 7, 2
LONG_SECONDS = 60.0
_TASK_TRIES, _TASK_PAUSE_SECONDS = 40, 0.1

#: id, key, value
Row = tuple[int, str, int]


def all_rows(count: int) -> list[Row]:
    """The first rows that ``events`` emits, in order."""
    # Keys are seen again and again, and new ones come up all the time.
    return [(number, f"k{number * 5 % (KEYS + number // KEYS)}", number * 37 % 101) for number in range(count)]


def with_totals(count: int) -> list[Row]:
    """What ``latest`` makes of each: the total of the key's values up to this row."""
    totals: dict[str, int] = {}
    rows = []
    for number, key, value in all_rows(count):
        totals[key] = totals.get(key, 0) + value
        rows.append((number, key, totals[key]))
    return rows


def newest_rows(rows: list[Row]) -> list[Row]:
    """The last row of each key."""
    return sorted({row[1]: row for row in rows}.values())


class _Batch:
    """A planned batch whose rows are known. Its tasks write real record batches through the sinks' stagers."""

    def __init__(self, batch: int, positions: dict[str, int], rows: list[Row]) -> None:
        self.batch = BatchId(batch)
        self._positions = {OperatorId(name): Position(at) for name, at in positions.items()}
        self._rows = rows

    def positions(self) -> Mapping[OperatorId, Position]:
        return self._positions

    def watermark_ms(self) -> int:
        return 0

    def stage(self, job: StageJob) -> list[StagedTask]:
        tasks = []
        for partition in range(TASKS):
            rows = self._rows[partition::TASKS]
            pieces = {sink: self._try_task(job, sink, partition, rows) for sink in job.stagers}
            # The consumer needs the order in which the rows came: the first task writes all of the segment.
            segment = self._segment(job) if partition == 0 and job.segments is not None and self._rows else None
            tasks.append(StagedTask(rows=len(rows), segment=segment, pieces=pieces))
        return tasks

    def _try_task(self, job: StageJob, sink: SinkId, partition: int, rows: list[Row]) -> list[Piece]:
        """Spark runs a task again that has failed, a few times."""
        for _ in range(_TASK_TRIES):
            try:
                return self._stage_task(job, sink, partition, rows)
            except StoreError:
                time.sleep(_TASK_PAUSE_SECONDS)
        return self._stage_task(job, sink, partition, rows)

    def _stage_task(self, job: StageJob, sink: SinkId, partition: int, rows: list[Row]) -> list[Piece]:
        writer = job.stagers[sink].open(
            StageAttempt(
                flow=job.flow,
                operator=job.operator,
                generation=job.generation,
                batch=job.batch,
                partition=partition,
                attempt=secrets.token_hex(6),
            )
        )
        for half in (rows[::2], rows[1::2]):
            if half:
                columns = [pa.array(column, field.type) for column, field in zip(zip(*half), SCHEMA)]  # noqa: B905
                writer.write(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
        # What a sink reports must survive being stored as JSON.
        pieces: list[Piece] = json.loads(json.dumps(writer.close()))
        return pieces

    def _segment(self, job: StageJob) -> Segment:
        assert job.segments is not None
        name, content = f"g{job.generation}-b{job.batch}.arrow", json.dumps(self._rows).encode()
        durable.replace(Path(job.segments.url) / name, content, sync=False)
        return Segment(name=name, rows=len(self._rows), size_bytes=len(content), crc32=zlib.crc32(content))

    def run_to_end(self) -> None: ...


class _Engine(MemoryEngine):
    def plan(self) -> dict[OperatorId, OperatorPlan]:
        message = SCHEMA.serialize().to_pybytes()
        return {
            name: OperatorPlan(operator=name, subtasks=1, is_stateful=True, schema_ipc=message)
            for name in (EVENTS, LATEST)
        }


class TortureFlow:
    """Started anew by every instance; what an earlier one left in the folder is taken up."""

    def __init__(
        self,
        folder: Path,
        sinks: Mapping[str, Sink],
        *,
        only_newest: bool,
        restore_to: int | None = None,
        publish: str = "checkpoint",
        rejoin: bool = False,
        **settings: Any,
    ) -> None:
        """``sinks``: for each operator's rows, by the operator's name; more of them as <name>-<anything>.

        ``only_newest``: ``latest`` emits one row per key and batch.
        """
        self.folder = folder
        self._only_newest = only_newest
        self.options = build_options(
            {"checkpoint_interval": 0, "retain_checkpoints": 6, "retain": "", "mode": "unaligned"},
            settings,
        )
        self.layout = layout_of(folder)
        durable.make_dir(self.layout.root)
        (folder / "seen").mkdir(exist_ok=True)
        flow = Flow(FLOW)
        flow.operator(EVENTS)(_unused)
        flow.operator(LATEST, inputs=[EVENTS], subtasks=1)(_unused)
        for name, sink in sinks.items():
            flow.sink(name.partition("-")[0], sink, name=f"{name}-out", publish=publish)
        self.engine = _Engine()
        self.run = launch.run_on(
            self.engine,
            flow,
            flow.graph(),
            self.options,
            self.layout,
            release_lock=lambda: None,
            request=current_request(self.layout, restore_to, None, allow_dropped=False, flow=flow.name),
            rejoin=rejoin,
        )
        self.coordinator = self.run._parts.coordinator
        # The first thing a query does is to run again what it had planned and not committed.
        for operator in (EVENTS, LATEST):
            spark = self._spark(operator)
            if spark.planned(spark.committed + 1) is not None:
                self.step(operator)

    def stop(self) -> None:
        self.run.stop()

    def batches(self) -> int:
        """How many batches ``events`` has run."""
        return self._spark(EVENTS).committed + 1

    def is_behind(self) -> bool:
        """Whether ``latest`` has something to read; ``events`` must not run away, or it waits for room forever."""
        return self._plan(LATEST) is not None

    def epochs(self) -> list[Epoch]:
        """The complete epochs of the present history, oldest first."""
        return list(self.coordinator.snapshot().checkpoints.complete)

    def _spark(self, operator: OperatorId) -> SparkDir:
        generation = self.run._parts.settled.recovered.spark_dirs[operator]
        return SparkDir(self.layout.spark_checkpoint_dir(operator, generation), subtasks=1)

    def step(self, operator: OperatorId) -> bool:
        """What Spark does next: re-run the batch that was planned and not committed, or plan one if there is input."""
        spark = self._spark(operator)
        batch = spark.committed + 1
        positions = spark.planned(batch)
        if positions is None:
            positions = self._plan(operator)
            if positions is None:
                return False
            spark.plan(batch, positions)
        rows, position, seen = self._compute(operator, spark, batch, positions)
        if operator == LATEST:
            # Which rows an epoch must show is told by the batch at which it was cut: see ``rows_at_epochs``.
            durable.replace(
                self.folder / "seen" / f"{batch}-{self.run._parts.settled.recovered.generation}", str(seen).encode()
            )
        self.run._parts.workers.operators[operator].handle_batch(_Batch(batch, positions, rows))
        spark.commit(batch, state=f"{position}:{seen}")
        return True

    def _plan(self, operator: OperatorId) -> dict[str, int] | None:
        if operator == EVENTS:
            return {}
        before = self._spark(operator)
        at = (before.planned(before.committed) or {}).get(EVENTS, 0)
        admit = self.engine.gates[operator, EVENTS]
        return {EVENTS: admit} if admit > at else None

    def _compute(
        self, operator: OperatorId, spark: SparkDir, batch: int, positions: dict[str, int]
    ) -> tuple[list[Row], int, int]:
        """The batch's rows, how far the operator has read with them, and how many it has seen in all."""
        if operator == EVENTS:
            end = (batch + 1) * ROWS_PER_BATCH
            return all_rows(end)[-ROWS_PER_BATCH:], 0, end
        # "<position>:<rows seen>-<subtask>": the state knows how far it was read, so a state that does not fit shows.
        state = spark.root / "state/0/0" / f"{batch}.delta"
        first, seen = map(int, state.read_text().partition("-")[0].split(":")) if batch else (0, 0)
        log = self.run._parts.workers.operators[EVENTS].channel
        if positions[EVENTS] > first and log.start > first:
            raise FileNotFoundError(f"entry {first} was truncated away")
        given = [
            tuple(row)
            for entry in log.data_entries(Position(first), Position(positions[EVENTS]))
            for segment in entry.segments
            for row in json.loads((Path(log.segments.place.url) / segment.name).read_bytes())
        ]
        # What comes is passed on, not what ought to come; the totals are those of the rows that were seen.
        totals = {row[0]: row[2] for row in with_totals(seen + len(given))[seen:]}
        rows = [(row[0], row[1], totals.get(row[0], -1)) for row in given]
        return newest_rows(rows) if self._only_newest else rows, positions[EVENTS], seen + len(given)

    # ------------------------------------------------------------------ checkpoints

    def request(self, *, aligned: bool = False) -> Future[Epoch]:
        if self.options.is_per_operator:
            return self.coordinator.request_checkpoint(None)
        return self.coordinator.request_checkpoint(CheckpointOptions(alignment_limit_ms=None if aligned else 0))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"not in time: {self.coordinator.snapshot()}"
            threading.Event().wait(0.001)

    def check(self) -> None:
        if self.run._lifecycle.failure is not None:
            raise self.run._lifecycle.failure

    def drain(self) -> None:
        """Everything emitted is read and published."""
        self.wait(lambda: not self.step(LATEST) and self.run._parts.workers.operators[EVENTS].credits.is_drained())
        future = self.request()
        self.wait(lambda: future.done() or (not self.step(LATEST) and future.done()))
        future.result(0)
        self.wait(self.coordinator.is_settled)


def layout_of(folder: Path) -> Layout:
    return Layout(folder / "storage", FLOW)


#: Of events and of latest; None: not part of it, in per-operator mode.
Cut = tuple[int | None, int | None]


def rows_at_epochs(folder: Path, *, but: Collection[int] = ()) -> dict[int, Cut]:
    """For each checkpoint that is stored now: how many rows each operator had seen at its cut."""
    if not layout_of(folder).checkpoints.exists():
        return {}  # it was killed before it had begun
    store = LocalStore.reading(layout_of(folder))
    found = {}
    for epoch in store.checkpoints.epochs():
        if epoch in but:
            continue
        events: int | None = None
        latest: int | None = None
        try:
            manifest = store.checkpoints.load_manifest(epoch)
            if EVENTS in manifest.operators:
                events = (manifest.operators[EVENTS].batch + 1) * ROWS_PER_BATCH
            if LATEST in manifest.operators:
                generation = store.checkpoints.load_record(manifest, LATEST).generation
                latest = _seen(folder, manifest.operators[LATEST].batch, generation)
        except DamagedRecordError:
            continue  # collected while we look; it was noted while it was new
        found[int(epoch)] = (events, latest)
    return found


def _seen(folder: Path, batch: int, generation: int) -> int:
    """What the last generation up to this one had seen after the batch; after a rollback batches have other rows."""
    if batch < 0:
        return 0
    tries = [int(path.name.partition("-")[2]) for path in (folder / "seen").glob(f"{batch}-*")]
    return int((folder / "seen" / f"{batch}-{max(tried for tried in tries if tried <= generation)}").read_bytes())


def _unused(*_: Any) -> Any:
    raise NotImplementedError
