"""One record of every kind that is stored, with every field set to something that stands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutline.base import records
from cutline.model.checkpoint import (
    ChannelCut,
    Manifest,
    OperatorCut,
    OperatorRecord,
    SinkRecord,
    SnapshotFile,
    SubtaskCut,
    SubtaskRecord,
    Tombstone,
)
from cutline.model.cut import InFlight, Timings
from cutline.model.entries import BarrierEntry, DataEntry, Segment
from cutline.model.generation import GenerationRecord
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, Position, SinkId, Subtask
from cutline.model.remote import EarlyUploadRecord
from cutline.model.staging import StagedBatch

#: Where the samples of the current format lie.
SAMPLES = Path(__file__).parents[1] / "unit" / "samples" / f"format-{records.FORMAT_VERSION}"

SOURCE, TOTALS, TABLE = OperatorId("source"), OperatorId("totals"), SinkId("table")
STAGED = StagedBatch(
    generation=Generation(2), batch=BatchId(41), rows=5, bytes=900, pieces=[{"path": "part-0.parquet"}]
)


def _file(path: str, digit: str) -> SnapshotFile:
    return SnapshotFile(path=path, sha256=digit * 64, size_bytes=17)


def _cut(barrier: int, positions: dict[OperatorId, Position]) -> OperatorCut:
    return OperatorCut(
        generation=Generation(2),
        batch=BatchId(41),
        after_batch=BatchId(39),
        barrier=Position(barrier),
        positions=positions,
        mode="unaligned",
        watermark_ms=1_704_067_200_000,
        record_sha256="e" * 64,
        files=7,
        size_bytes=4_096,
        new_bytes=128,
        start_delay_ms=4.0,
        alignment_ms=50.25,
        sync_ms=0.5,
        async_ms=12.75,
        total_ms=67.5,
        subtasks=[
            SubtaskCut(subtask=Subtask(0), files=4, size_bytes=4_000, new_bytes=128, async_ms=3.25),
            SubtaskCut(subtask=Subtask(1), files=3, size_bytes=96, new_bytes=0, async_ms=0.125),
        ],
    )


EXAMPLES: dict[str, Any] = {
    "ahead": EarlyUploadRecord(
        names=["blobs/ab/" + "ab" * 32, "channels/cards/data/g000003-b00000041-p0000-0a1b2c.arrow"]
    ),
    "flow": {"name": "payments", "created_ms": 1_704_067_200_000},
    "generation": GenerationRecord(
        generation=Generation(3),
        started_ms=1_704_067_200_000,
        path="local",
        restored_epoch=Epoch(9),
        reason="totals: offsets/41 is missing",
        lineage={
            SOURCE: [(Generation(1), Position(0)), (Generation(3), Position(44))],
            TOTALS: [(Generation(3), Position(0))],
        },
        spark_dirs={SOURCE: Generation(3), TOTALS: Generation(3)},
        inputs={SOURCE: [], TOTALS: [SOURCE]},
        schemas={SOURCE: "/////w==", TOTALS: "AAAA"},
    ),
    "manifest": Manifest(
        flow=FlowName("payments"),
        epoch=Epoch(9),
        generation=Generation(2),
        previous_epoch=Epoch(7),
        started_ms=1_704_067_200_000,
        completed_ms=1_704_067_200_321,
        operators={SOURCE: _cut(43, {}), TOTALS: _cut(44, {SOURCE: Position(40)})},
        channels={
            SOURCE: ChannelCut(
                barrier=Position(43),
                lineage=[(Generation(1), Position(0)), (Generation(2), Position(12))],
                in_flight={
                    TOTALS: InFlight(first=Position(40), end=Position(43), entries=2, rows=99, size_bytes=1_000)
                },
            ),
            TOTALS: ChannelCut(barrier=Position(44), lineage=[(Generation(2), Position(0))], in_flight={}),
        },
    ),
    "operator": OperatorRecord(
        flow=FlowName("payments"),
        operator=TOTALS,
        epoch=Epoch(9),
        generation=Generation(2),
        batch=BatchId(41),
        barrier=Position(44),
        positions={SOURCE: Position(40)},
        aligned=False,
        watermark_ms=1_704_067_200_000,
        subtasks=[
            SubtaskRecord(
                subtask=Subtask(0), files=[_file("state/0/0/42.zip", "a")], size_bytes=17, new_bytes=17, async_ms=3.25
            ),
            SubtaskRecord(subtask=Subtask(1), files=[], size_bytes=0, new_bytes=0),
        ],
        shared=[_file("metadata", "b"), _file("commits/41", "c")],
        sinks={TABLE: SinkRecord(staged=[STAGED], token={"version": 12})},
        timings=Timings(start_delay_ms=4.0, alignment_ms=50.25, sync_ms=0.5, async_ms=12.75),
    ),
    "tombstone": Tombstone(epoch=Epoch(8), generation=Generation(3), reason="subsumed by epoch 9"),
    "entry-data": DataEntry(
        seq=Position(42),
        generation=Generation(2),
        batch=BatchId(41),
        rows=5,
        segments=[Segment(name="g000002-b00000041-p0000-beef.arrow", rows=5, size_bytes=512, crc32=4_294_967_295)],
        staged={TABLE: STAGED},
        positions={SOURCE: Position(40)},
    ),
    "entry-barrier": BarrierEntry(
        seq=Position(43),
        generation=Generation(2),
        epoch=Epoch(9),
        batch=BatchId(41),
        positions={SOURCE: Position(40)},
        aligned=False,
        alignment_limit_ms=50,
        is_binding=True,
        started_ms=1_704_067_200_000,
    ),
}

#: Sample → the kind its record is stored as, and its type.
KINDS: dict[str, tuple[str, type[Any]]] = {
    "flow": ("flow", dict),
    "generation": ("generation", GenerationRecord),
    "manifest": ("manifest", Manifest),
    "operator": ("operator", OperatorRecord),
    "tombstone": ("aborted", Tombstone),
    "entry-data": ("entry", DataEntry),
    "entry-barrier": ("entry", BarrierEntry),
    "ahead": ("ahead", EarlyUploadRecord),
}
