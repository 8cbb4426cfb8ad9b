"""The steps of a batch: it waits for credit, the executors stage it, it is appended to the log and reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cutline.base.crashpoints import crashpoint
from cutline.model.entries import Segment
from cutline.model.ids import BatchId, OperatorId, Position, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.engine import StagedTask, StageJob, StreamingBatch
from cutline.protocol.messages.wire import ProgressMade
from cutline.worker.backpressure import Credits
from cutline.worker.operator_spec import OperatorSpec, OperatorStart
from cutline.worker.outbox import Outbox


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedBatch:
    """A batch that is staged and about to be appended."""

    batch: BatchId
    #: How far it has read each input.
    positions: Mapping[OperatorId, Position]
    rows: int
    segments: list[Segment]
    staged: Mapping[SinkId, StagedBatch]


class Batches:
    """Runs one operator's new batches, on the query's own thread."""

    def __init__(
        self,
        spec: OperatorSpec,
        start: OperatorStart,
        credits: Credits,
        outbox: Outbox,
    ) -> None:
        self._spec = spec
        self._generation = start.generation
        self._channel = start.channel
        self._credits = credits
        self._outbox = outbox
        #: What the coordinator was last told about this operator's channel; the lock covers telling and changing it.
        self._is_said_full = False
        self._progress_lock = threading.Lock()
        self.rows_total = 0
        self.batches_total = 0
        self._has_made_rows = False
        self.last_batch_ms = 0.0
        #: The time of all batches together.
        self.busy_ms = 0.0

    @contextmanager
    def staged(self, batch: StreamingBatch) -> Iterator[FinishedBatch]:
        """The batch, staged when there is room for it. The caller appends it; then it counts."""
        self._credits.begin_batch()
        started = time.perf_counter()
        try:
            positions = dict(batch.positions())
            tasks = batch.stage(self._job(batch.batch))
            crashpoint("after-stage", self._spec.operator)
            finished = self._finished(batch.batch, positions, tasks)
            if finished.segments:
                self._channel.segments.appended()
            yield finished
            self.rows_total += finished.rows
            self.batches_total += 1
            self._report_progress(finished.rows, batch)
        finally:
            self._credits.end_batch()
        self.last_batch_ms = (time.perf_counter() - started) * 1000
        self.busy_ms += self.last_batch_ms

    def _job(self, batch: BatchId) -> StageJob:
        spec = self._spec
        return StageJob(
            flow=spec.flow,
            operator=spec.operator,
            generation=self._generation,
            batch=batch,
            schema_ipc=spec.plan.schema_ipc,
            segments=self._channel.segments.place if spec.consumers else None,
            stagers={name: sink.stager() for name, sink in spec.sinks.items()},
        )

    def _finished(
        self, batch: BatchId, positions: Mapping[OperatorId, Position], tasks: list[StagedTask]
    ) -> FinishedBatch:
        rows = sum(task.rows for task in tasks)
        staged = {
            name: StagedBatch(
                generation=self._generation,
                batch=batch,
                rows=rows,
                bytes=sum(int(piece.get("size_bytes", 0)) for task in tasks for piece in task.pieces.get(name, ())),
                pieces=[piece for task in tasks for piece in task.pieces.get(name, ())],
            )
            for name in self._spec.sinks
        }
        return FinishedBatch(
            batch=batch,
            positions=positions,
            rows=rows,
            segments=[task.segment for task in tasks if task.segment],
            staged={name: value for name, value in staged.items() if value.pieces},
        )

    # ------------------------------------------------------------------ progress

    def credit_changed(self) -> None:
        """A consumer has read: tell the coordinator if it believes that the channel is full."""
        with self._progress_lock:
            if self._is_said_full and self._credits.has_room():
                self._is_said_full = False
                self._outbox.tell(ProgressMade(operator=self._spec.operator, is_source=not self._spec.inputs))

    def _report_progress(self, rows: int, batch: StreamingBatch) -> None:
        # The first checkpoint of a new flow waits for the first rows of every operator with a sink.
        is_first = bool(self._spec.sinks) and rows > 0 and not self._has_made_rows
        self._has_made_rows |= rows > 0
        if not self._spec.reports_progress and not is_first:
            return
        watermark_ms = batch.watermark_ms()
        with self._progress_lock:
            self._is_said_full = not self._credits.has_room()
            self._outbox.tell(
                ProgressMade(
                    operator=self._spec.operator,
                    is_source=not self._spec.inputs,
                    batches=1,
                    rows=rows,
                    watermark_ms=watermark_ms,
                    is_without_room=self._is_said_full,
                )
            )
