"""Skips lost input: moves positions in a ``spark_checkpoint_dir`` to the earliest input that still exists.

Spark begins a batch where the offsets of the last committed batch end, so moving means rewriting these offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cutline.base import durable
from cutline.model.ids import NO_BATCH, BatchId
from cutline.model.plan import PlannedSource
from cutline.ports.inspection import FileProblem
from cutline.ports.source_guard import SourceGuard, SourceKind, Today
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.offsets import load_offsets
from cutline.spark_dir.recorded_sources import forget_recorded, load_recorded
from cutline.spark_dir.source_check import newest_positions


class _Movable(NamedTuple):
    """A source whose position can be moved."""

    name: str
    kind: SourceKind
    moved: Callable[[Sequence[bytes], Today], list[bytes]]
    #: The batch after which it continues, and the batches planned after that one; ``positions``: where each ends.
    batches: list[BatchId]
    positions: list[bytes]


def lost_ahead(
    guard: SourceGuard, spark_checkpoint_dir: Path, sources: Sequence[PlannedSource] = ()
) -> list[FileProblem]:
    """The lost input that sources would read next in this folder; only of kinds whose positions can be moved.

    ``sources``: what the operator reads now, if known.
    """
    problems: list[FileProblem] = []
    newest, recorded = newest_positions(spark_checkpoint_dir), load_recorded(spark_checkpoint_dir)
    for source in _movable(guard, spark_checkpoint_dir):
        folder = spark_checkpoint_dir / "sources" / source.name
        today = Today(newest.get(source.name), sources, recorded)
        problems += source.kind.check(source.positions[0], folder, today).problems
    return problems


def skip_lost(
    guard: SourceGuard, spark_checkpoint_dir: Path, live_dir: Path, sources: Sequence[PlannedSource] = ()
) -> None:
    """Move the positions whose input is lost. ``live_dir``: has the newest offsets, which contain the newest addresses.

    ``sources``: what the operator reads now, if known.
    """
    newest, recorded = newest_positions(live_dir), load_recorded(spark_checkpoint_dir)
    moves = [
        (batch, before, after, source)
        for source in _movable(guard, spark_checkpoint_dir)
        for batch, before, after in zip(
            source.batches,
            source.positions,
            source.moved(source.positions, Today(newest.get(source.name), sources, recorded)),
            strict=True,
        )
        if before != after
    ]
    # The last batch first: after a kill, the position that decides about the move still demands it.
    for batch, before, after, source in sorted(moves, key=lambda move: -move[0]):
        if batch != NO_BATCH:
            _replace_position(spark_checkpoint_dir, batch, before, after)
        elif source.kind.begin_at is not None:
            source.kind.begin_at(spark_checkpoint_dir / "sources" / source.name, after)
    # What the positions were positions in may be gone: the start records anew what they are in now.
    forget_recorded(spark_checkpoint_dir)


def _movable(guard: SourceGuard, spark_checkpoint_dir: Path) -> Iterator[_Movable]:
    planned, committed = last_batches(spark_checkpoint_dir)
    if planned == NO_BATCH:
        return
    batches = [BatchId(number) for number in range(max(committed, 0), planned + 1)]
    known = [load_offsets(str(spark_checkpoint_dir), batch).positions for batch in batches]
    for name, position in known[0].items():
        kind = guard.kind_of(position, spark_checkpoint_dir / "sources" / name)
        if kind is None or kind.moved is None or kind.beginning is None or position is None:
            continue
        positions = [there for one in known if (there := one.get(name)) is not None]
        if committed == NO_BATCH:
            # Spark records no position before the first batch; the end of that batch tells where it began.
            begun = kind.beginning(position, spark_checkpoint_dir / "sources" / name)
            yield _Movable(name, kind, kind.moved, [NO_BATCH, *batches], [begun, *positions])
        else:
            yield _Movable(name, kind, kind.moved, batches, positions)


def _replace_position(spark_checkpoint_dir: Path, batch: BatchId, before: bytes, after: bytes) -> None:
    path = spark_checkpoint_dir / "offsets" / str(batch)
    content = path.read_bytes()
    # The checksum first: a checksum that contradicts its file stops Hadoop, a missing one does not.
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    # Replaced, never written into: the file may be a hard link to a held or stored one.
    durable.replace(path, content.replace(before, after))
