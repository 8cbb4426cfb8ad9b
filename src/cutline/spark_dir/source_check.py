"""Checks, by their offsets, whether the sources of a query can read again what they have read since a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutline.errors import DamagedRecordError
from cutline.model.plan import PlannedSource, RecordedSource
from cutline.ports.inspection import FileProblem, SourceReport
from cutline.ports.source_guard import SourceGuard, Today
from cutline.spark_dir.file_set import last_batches
from cutline.spark_dir.offsets import load_offsets


def check_sources(
    guard: SourceGuard,
    positions: Mapping[str, bytes | None],
    live_dir: Path | None,
    planned: Sequence[PlannedSource] = (),
    recorded: Sequence[RecordedSource] = (),
) -> SourceReport:
    """``positions``: the offset of every source at the checkpoint; sources that only the live folder has came later.

    A source that had read nothing yet at the checkpoint reads again from where it has begun since.
    ``planned``: what the operator reads now, if known. ``recorded``: beside the offsets of the checkpoint.
    """
    if live_dir is None:
        return SourceReport(notes=["its sources are not guarded: its live directory is unknown"])
    problems: list[FileProblem] = []
    notes: list[str] = []
    newest = newest_positions(live_dir)
    names = sorted({*positions, *newest, *_folders(live_dir / "sources")})
    for name in names:
        position, folder = positions.get(name), live_dir / "sources" / name
        if position is None:
            position = _beginning(guard, newest.get(name), folder)
        kind = guard.kind_of(position, folder)
        if kind is None:
            notes.append(f"source {name} is not guarded: whether its input still exists is unknown")
            continue
        report = kind.check(position, folder, Today(newest.get(name), planned, recorded))
        problems += report.problems
        notes += [f"source {name} ({kind.name}) {note}" for note in report.notes]
    if not names:
        notes.append("its sources are not guarded: they have recorded no offsets")
    return SourceReport(problems, notes)


def newest_positions(live_dir: Path) -> dict[str, bytes | None]:
    """How far every source was read, if known."""
    planned, _ = last_batches(live_dir)
    try:
        return load_offsets(str(live_dir), planned).positions
    except (DamagedRecordError, OSError):
        return {}


def _beginning(guard: SourceGuard, newest: bytes | None, folder: Path) -> bytes | None:
    kind = None if newest is None else guard.kind_of(newest, folder)
    return None if kind is None or kind.beginning is None or newest is None else kind.beginning(newest, folder)


def _folders(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
