"""A sink under test, driven the way a flow drives it, and what the suites need to know about it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest

from cutline.connectors.reading import read
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.staging import StagedBatch
from cutline.ports.reading import Readable
from cutline.ports.sinks import Sink, SinkContext, StageAttempt
from cutline.protocol.publish.commit import CommitPermit

Row = dict[str, Any]

FIRST = Generation(1)

SIMPLE = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
RICH = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int8()),
        pa.field("real", pa.float64()),
        pa.field("flag", pa.bool_()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("price", pa.decimal128(20, 4)),
        pa.field("point", pa.struct([pa.field("x", pa.int32()), pa.field("at", pa.timestamp("us", tz="UTC"))])),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("counts", pa.map_(pa.string(), pa.int64())),
    ]
)
RICH_ROW: Row = {
    "id": 1,
    "small": -7,
    "real": 0.25,
    "flag": True,
    "text": "naïve — ☃ 'quoted' \\ %20",
    "raw": b"\x00\xff\x10",
    "day": date(1969, 7, 20),
    "at": datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC),
    "price": Decimal("-1234567890123456.7891"),
    "point": {"x": None, "at": datetime(1999, 12, 31, 12, 0, 0, 1, tzinfo=UTC)},
    "tags": ["a", None, ""],
    "counts": [("k", 1), ("n", None)],
}


@dataclass(slots=True)
class Case:
    """A sink under test, driven the way the service drives it."""

    sink: Sink
    context: SinkContext
    #: Batches of earlier epochs; the next permit begins after them.
    through: BatchId = NO_BATCH
    previous: Epoch = NO_EPOCH
    generation: Generation = FIRST
    attempts: int = 0
    #: Epochs that the flow may be restored to; None: not known.
    rewind_points: tuple[Epoch, ...] | None = None

    def open(self, sink: Sink) -> None:
        """Continue with a new instance over the same target, as after a restart."""
        sink.open(self.context)
        self.sink = sink

    def stage(self, batch: int, *parts: Iterable[Row]) -> StagedBatch:
        """Stage a batch; each part holds the rows of one task."""
        schema = pa.ipc.read_schema(pa.BufferReader(self.context.schema_ipc))
        stager = pickle.loads(pickle.dumps(self.sink.stager()))
        pieces, rows = [], 0
        for partition, part in enumerate(parts):
            self.attempts += 1
            attempt = StageAttempt(
                flow=self.context.flow,
                operator=self.context.operator,
                generation=self.generation,
                batch=BatchId(batch),
                partition=partition,
                attempt=f"{id(self):x}-{self.attempts}",
            )
            writer = stager.open(attempt)
            content = list(part)
            for start in range(0, len(content), 2):
                writer.write(pa.RecordBatch.from_pylist(content[start : start + 2], schema=schema))
            rows += len(content)
            pieces += writer.close()
        # A sink's report must survive being stored as JSON.
        pieces = msgspec.json.decode(msgspec.json.encode(pieces))
        return StagedBatch(generation=self.generation, batch=BatchId(batch), rows=rows, bytes=0, pieces=pieces)

    def permit(self, epoch: int, staged: Sequence[StagedBatch]) -> CommitPermit:
        return CommitPermit(
            flow=self.context.flow,
            operator=self.context.operator,
            sink=self.context.sink,
            epoch=Epoch(epoch),
            generation=self.generation,
            previous_epoch=self.previous,
            after_batch=self.through,
            through_batch=max((batch.batch for batch in staged), default=self.through),
            rewind_points=self.rewind_points,
        )

    def commit(self, epoch: int, *staged: StagedBatch) -> CommitPermit:
        """Prepare and commit an epoch; later batches belong to later epochs."""
        token = self.sink.prepare(Epoch(epoch), staged)
        permit = self.permit(epoch, staged)
        self.sink.commit(permit, staged, token)
        self.previous, self.through = Epoch(epoch), permit.through_batch
        return permit

    def publish(self, epoch: int, batch: int, *parts: Iterable[Row]) -> None:
        """Stage one batch and commit it as the epoch."""
        self.commit(epoch, self.stage(batch, *parts))


def rows(*ids: int) -> list[Row]:
    return [{"id": number, "name": f"row {number}"} for number in ids]


class SinkSuite:
    """What the suites need from a sink. Each test gets an empty ``tmp_path``."""

    #: Points at which the commit of this sink can be killed.
    commit_crash_points: ClassVar[tuple[str, ...]] = ("sink-commit-begun", "sink-commit-half", "sink-commit-done")
    #: Points at which its rewind can be killed.
    rewind_crash_points: ClassVar[tuple[str, ...]] = ()
    #: Whether several flows may write to the same target.
    can_be_shared: ClassVar[bool] = False
    #: Rows of every type, and what ``read_rows`` returns for them.
    rich_schema: ClassVar[pa.Schema] = RICH
    rich_rows: ClassVar[list[Row]] = [RICH_ROW, {**dict.fromkeys(RICH_ROW), "id": 2}]

    def make_sink(self, tmp_path: Path) -> Sink:
        """A new instance over the same target each time, as after a restart. Not opened."""
        raise NotImplementedError

    def read_rows(self, tmp_path: Path) -> list[Row]:
        """The rows that a reader of the target sees now, without columns that the sink adds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ for the suites

    def context(self, schema: pa.Schema = SIMPLE, flow: str = "orders") -> SinkContext:
        return SinkContext(
            flow=FlowName(flow),
            operator=OperatorId("totals"),
            sink=SinkId("totals-out"),
            output_mode="append",
            schema_ipc=schema.serialize().to_pybytes(),
        )

    def start(self, tmp_path: Path, schema: pa.Schema = SIMPLE, flow: str = "orders") -> Case:
        context = self.context(schema, flow)
        sink = self.make_sink(tmp_path)
        sink.open(context)
        return Case(sink=sink, context=context)

    def ids(self, tmp_path: Path) -> list[int]:
        """The ids that readers see, sorted, with duplicates."""
        return sorted(row["id"] for row in self.read_rows(tmp_path))

    def seen(self, tmp_path: Path, *, after: int | None = None, as_of: int | None = None) -> tuple[int, list[int]]:
        """The result of ``cutline.read``: the epoch, and the ids."""
        found = read(self.make_sink(tmp_path), after=after, as_of=as_of)
        return found.epoch, sorted(found.to_arrow()["id"].to_pylist())

    def readable(self, tmp_path: Path) -> Case:
        case = self.start(tmp_path)
        if not isinstance(case.sink, Readable):
            pytest.skip("readers read its target directly")
        return case

    def rewindable(self, tmp_path: Path) -> Case:
        case = self.start(tmp_path)
        if not case.sink.can_rewind:
            pytest.skip("the sink declares that it cannot rewind")
        return case
