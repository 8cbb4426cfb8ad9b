"""An engine without Spark: it records gates, and tests create the batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.model.entries import Segment
from cutline.model.ids import BatchId, OperatorId, Position
from cutline.model.plan import OperatorPlan
from cutline.ports.engine import BatchHandler, LiveDirs, Query, StagedTask, StageJob
from cutline.protocol.history.lineage import Lineage


class IdleQuery:
    """See ``cutline.ports.Query``; the test itself runs its batches."""

    def __init__(self) -> None:
        self._is_active = True

    def is_active(self) -> bool:
        return self._is_active

    def is_idle(self) -> bool:
        return False

    def failure(self) -> str | None:
        return None

    def stop(self) -> None:
        self._is_active = False

    def wait_processed(self) -> None: ...

    def state_bytes(self) -> int | None:
        return None


class MemoryEngine:
    """See ``cutline.ports.Engine``; its queries do nothing by themselves."""

    def __init__(self) -> None:
        #: (operator, channel) → how far the operator may read.
        self.gates: dict[tuple[str, str], int] = {}
        #: (operator, channel) → where a query that has read nothing begins.
        self.beginnings: dict[tuple[str, str], int] = {}

    def plan(self) -> dict[OperatorId, OperatorPlan]:
        raise NotImplementedError

    def start(self, operator: OperatorId, spark_checkpoint_dir: Path, handler: BatchHandler) -> Query:
        return IdleQuery()

    def live_dirs(self) -> LiveDirs | None:
        return None

    def set_gate(
        self, operator: OperatorId, channel: OperatorId, admit: Position, lineage: Lineage, first: Position
    ) -> None:
        self.gates[operator, channel] = admit
        self.beginnings[operator, channel] = first

    def expect_restarts(self, operator: OperatorId, are_expected: bool) -> None: ...

    def begin_stop(self) -> None: ...

    def close(self) -> None: ...


class HandMadeBatch:
    """See ``cutline.ports.StreamingBatch``. One task, which writes one segment and one piece per sink."""

    def __init__(self, batch: int, positions: Mapping[str, int] | None = None, *, rows: int = 1) -> None:
        self.batch = BatchId(batch)
        self.rows = rows
        self.jobs: list[StageJob] = []
        self.runs_to_end = 0
        self._positions = {OperatorId(name): Position(at) for name, at in (positions or {}).items()}

    def positions(self) -> Mapping[OperatorId, Position]:
        return self._positions

    def watermark_ms(self) -> int:
        return 0

    def stage(self, job: StageJob) -> list[StagedTask]:
        self.jobs.append(job)
        segment = None
        if job.segments is not None and self.rows:
            name = f"g{job.generation}-b{job.batch}-{len(self.jobs)}.arrow"
            (Path(job.segments.url) / name).write_bytes(b"rows")
            segment = Segment(name=name, rows=self.rows, size_bytes=4, crc32=0)
        pieces = {sink: [{"path": f"b{job.batch}", "size_bytes": 10}] if self.rows else [] for sink in job.stagers}
        return [StagedTask(rows=self.rows, segment=segment, pieces=pieces)]

    def run_to_end(self) -> None:
        self.runs_to_end += 1
