"""Where a query began to read, for a restore to before its first batch.

Spark does not record where a Python source began: it asks again, and "latest" is another position by then. The offsets
of every later batch tell where it was. So the query gets a first batch that reads nothing and ends there.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cutline.errors import DamagedRecordError
from cutline.model.ids import NO_BATCH, BatchId
from cutline.ports.source_guard import SourceGuard
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.offsets import format_offsets, parse_offsets
from cutline.spark_dir.planned_batch import put_plan


def begin_as_before(guard: SourceGuard, spark_checkpoint_dir: Path, live_dir: Path) -> None:
    """``live_dir``: where the query has run since. Spark chooses the positions that it does not contain."""
    planned, _ = last_batches(live_dir)
    if planned == NO_BATCH:
        return
    path = live_dir / "offsets" / str(planned)
    try:
        content = path.read_bytes()
        positions = parse_offsets(content, str(path), planned).positions
    except (DamagedRecordError, OSError):
        return
    begun: dict[str, bytes | None] = dict.fromkeys(positions)
    for name, position in positions.items():
        kind = guard.kind_of(position, live_dir / "sources" / name)
        if kind is not None and kind.beginning is not None and position is not None:
            begun[name] = kind.beginning(position, live_dir / "sources" / name)
    if any(begun.values()):
        version, head, *_ = content.split(b"\n")
        head = msgspec.json.encode(msgspec.json.decode(head) | {"batchWatermarkMs": 0})
        put_plan(spark_checkpoint_dir, BatchId(0), {"offsets/0": format_offsets(version, head, begun)})
