"""Channel logs with entries made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.channels.entry_files import data_dir
from cutline.channels.log import ChannelLog
from cutline.channels.segments import crc32_of
from cutline.model.entries import BarrierEntry, DataEntry, Segment
from cutline.model.ids import BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.model.staging import StagedBatch
from cutline.protocol.history.lineage import Lineage


def open_log(folder: Path, *forks: tuple[int, int], operator: str = "op") -> ChannelLog:
    """A log of generation 1, forked by (generation, position) pairs."""
    lineage = Lineage.begin(Generation(1))
    for generation, at in forks:
        lineage = lineage.fork(Generation(generation), Position(at))
    return ChannelLog.open(OperatorId(operator), folder, lineage)


def write_segment(log: ChannelLog, name: str, content: bytes = b"rows", *, rows: int = 1) -> Segment:
    path = data_dir(log.folder) / name
    path.write_bytes(content)
    return Segment(name=name, rows=rows, size_bytes=len(content), crc32=crc32_of(path))


def append_batch(
    log: ChannelLog,
    *,
    rows: int = 1,
    content: bytes = b"rows",
    positions: Mapping[str, int] | None = None,
    staged: Mapping[str, list[dict[str, object]]] | None = None,
) -> DataEntry:
    """The next batch, with one segment when it has rows."""
    batch, generation = BatchId(log.last_batch + 1), log.lineage.generation
    name = f"g{generation}-b{batch}.arrow"
    entry = DataEntry(
        seq=log.end,
        generation=generation,
        batch=batch,
        rows=rows,
        segments=[write_segment(log, name, content, rows=rows)] if rows else [],
        staged={
            SinkId(sink): StagedBatch(generation=generation, batch=batch, rows=rows, bytes=0, pieces=pieces)
            for sink, pieces in (staged or {}).items()
        },
        positions={OperatorId(channel): Position(at) for channel, at in (positions or {}).items()},
    )
    log.append(entry)
    return entry


def append_barrier(
    log: ChannelLog, epoch: int, *, positions: Mapping[str, int] | None = None, limit_ms: int | None = None
) -> BarrierEntry:
    read = log.last_positions if positions is None else positions
    entry = BarrierEntry(
        seq=log.end,
        generation=log.lineage.generation,
        epoch=Epoch(epoch),
        batch=log.last_batch,
        positions={OperatorId(channel): Position(at) for channel, at in read.items()},
        aligned=True,
        alignment_limit_ms=limit_ms,
    )
    log.append(entry)
    return entry


def segment_names(log: ChannelLog) -> set[str]:
    return {path.name for path in data_dir(log.folder).iterdir()}
