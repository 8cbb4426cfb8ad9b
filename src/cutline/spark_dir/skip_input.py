"""Going on without input that is gone: positions in a ``spark_checkpoint_dir`` are moved to the earliest that is there.

Spark begins a batch where the offsets of the last committed one say that it ended, so moving means rewriting these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cutline.base import durable
from cutline.connectors.replay_guard import SourceKind, Today, kind_of, newest_positions
from cutline.model.ids import NO_BATCH, BatchId
from cutline.ports import PlannedSource
from cutline.ports.inspection import FileProblem
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.offsets import load_offsets


class _Movable(NamedTuple):
    """A source whose position can be moved."""

    name: str
    kind: SourceKind
    moved: Callable[[Sequence[bytes], Today], list[bytes]]
    #: Where it goes on, after which batch, and where those end that are planned after it.
    batches: list[BatchId]
    positions: list[bytes]


def lost_ahead(spark_checkpoint_dir: Path, sources: Sequence[PlannedSource] = ()) -> list[FileProblem]:
    """What sources that go on in this folder would read next and cannot; only of kinds whose positions can be moved.

    ``sources``: what the operator reads now, if that is known.
    """
    problems: list[FileProblem] = []
    newest = newest_positions(spark_checkpoint_dir)
    for source in _movable(spark_checkpoint_dir):
        folder = spark_checkpoint_dir / "sources" / source.name
        problems += source.kind.check(source.positions[0], folder, Today(newest.get(source.name), sources)).problems
    return problems


def skip_lost(spark_checkpoint_dir: Path, live_dir: Path, sources: Sequence[PlannedSource] = ()) -> None:
    """Move what must be moved. ``live_dir``: where the newest offsets are, which know the newest addresses.

    ``sources``: what the operator reads now, if that is known.
    """
    newest = newest_positions(live_dir)
    moves = [
        (batch, before, after)
        for source in _movable(spark_checkpoint_dir)
        for batch, before, after in zip(
            source.batches,
            source.positions,
            source.moved(source.positions, Today(newest.get(source.name), sources)),
            strict=True,
        )
        if before != after and batch != NO_BATCH
    ]
    # The last batch first: killed on the way, the position that all are moved by still says that they must be.
    for batch, before, after in sorted(moves, key=lambda move: -move[0]):
        _replace_position(spark_checkpoint_dir, batch, before, after)


def _movable(spark_checkpoint_dir: Path) -> Iterator[_Movable]:
    planned, committed = last_batches(spark_checkpoint_dir)
    if planned == NO_BATCH:
        return
    batches = [BatchId(number) for number in range(max(committed, 0), planned + 1)]
    known = [load_offsets(str(spark_checkpoint_dir), batch).positions for batch in batches]
    for name, position in known[0].items():
        kind = kind_of(position, spark_checkpoint_dir / "sources" / name)
        if kind is None or kind.moved is None or kind.beginning is None or position is None:
            continue
        positions = [there for one in known if (there := one.get(name)) is not None]
        if committed == NO_BATCH:
            # Spark notes no position before the first batch; where that ends says where it began.
            yield _Movable(name, kind, kind.moved, [NO_BATCH, *batches], [kind.beginning(position), *positions])
        else:
            yield _Movable(name, kind, kind.moved, batches, positions)


def _replace_position(spark_checkpoint_dir: Path, batch: BatchId, before: bytes, after: bytes) -> None:
    path = spark_checkpoint_dir / "offsets" / str(batch)
    content = path.read_bytes()
    # The checksum first: a twin that contradicts its file would stop Hadoop, a missing one does not.
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    # Replaced, never written into: the file may be a link to a pinned one.
    durable.replace(path, content.replace(before, after))
