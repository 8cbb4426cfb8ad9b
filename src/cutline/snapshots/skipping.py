"""Going on without input that is gone: positions in a ``spark_checkpoint_dir`` are moved to the earliest that is there.

Spark begins a batch where the offsets of the last committed one say that it ended, so moving means rewriting these.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cutline import durable
from cutline.ids import NO_BATCH, BatchId
from cutline.ports import PlannedSource
from cutline.ports.inspection import FileProblem
from cutline.snapshots.closure import last_batches
from cutline.snapshots.source_check import Today, kind_of, newest_positions
from cutline.snapshots.spark_logs import load_offsets


def lost_ahead(spark_checkpoint_dir: Path, sources: Sequence[PlannedSource] = ()) -> list[FileProblem]:
    """What sources that go on in this folder would read next and cannot; only of kinds whose positions can be moved.

    ``sources``: what the operator reads now, if that is known.
    """
    _, committed = last_batches(spark_checkpoint_dir)
    if committed == NO_BATCH:
        return []
    problems: list[FileProblem] = []
    newest = newest_positions(spark_checkpoint_dir)
    for name, position in load_offsets(str(spark_checkpoint_dir), committed).positions.items():
        folder = spark_checkpoint_dir / "sources" / name
        kind = kind_of(position, folder)
        if kind is not None and kind.moved is not None and position is not None:
            problems += kind.check(position, folder, Today(newest.get(name), sources)).problems
    return problems


def skip_lost(spark_checkpoint_dir: Path, live_dir: Path, sources: Sequence[PlannedSource] = ()) -> None:
    """Move what must be moved. ``live_dir``: where the newest offsets are, which know the newest addresses.

    ``sources``: what the operator reads now, if that is known.
    """
    planned, committed = last_batches(spark_checkpoint_dir)
    if committed == NO_BATCH:
        return
    batches = [BatchId(number) for number in range(committed, planned + 1)]
    known = [load_offsets(str(spark_checkpoint_dir), batch).positions for batch in batches]
    newest = newest_positions(live_dir)
    for name, position in known[0].items():
        kind = kind_of(position, spark_checkpoint_dir / "sources" / name)
        if kind is None or kind.moved is None or position is None:
            continue
        old = [there for one in known if (there := one.get(name)) is not None]
        new = kind.moved(old, Today(newest.get(name), sources))
        for batch, before, after in zip(batches, old, new, strict=True):
            if before != after:
                _replace_position(spark_checkpoint_dir, batch, before, after)


def _replace_position(spark_checkpoint_dir: Path, batch: BatchId, before: bytes, after: bytes) -> None:
    path = spark_checkpoint_dir / "offsets" / str(batch)
    content = path.read_bytes()
    # The checksum first: a twin that contradicts its file would stop Hadoop, a missing one does not.
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    # Replaced, never written into: the file may be a link to a pinned one.
    durable.replace(path, content.replace(before, after))
