"""The channels' logs at a start: whether their segments are there, and how they continue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.channels.segment_store import SegmentStore, whereabouts
from cutline.errors import DamagedRecordError
from cutline.model.entries import DataEntry
from cutline.model.ids import Generation, OperatorId, Position

log = get_logger(__name__)


def gather_segments(channels_dir: Path) -> None:
    """Copy segments from former places to where executors look now. Raises StoreError.

    Those of every entry: checkpoints from before a change need logs that no operator writes any more.
    """
    if not whereabouts(channels_dir).before:
        return
    for path in sorted(channels_dir.glob("*/g*/*.json")):
        if durable.is_temporary(path.name):
            continue
        try:
            entry = codec.load(path)
            segments = SegmentStore.of(path.parents[1])
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                segments.ensure(segment, deep=False)
        except (
            DamagedRecordError
        ) as error:  # segments that are read next were checked before: this one belongs to an older checkpoint
            log.warning("segment_lost", operator=path.parents[1].name, entry=path.name, reason=str(error))


def missing_segments(channel: ChannelLog, first: Position) -> tuple[str, ...]:
    """Segments from ``first`` on that are missing or truncated: a cheap check, made at every start."""
    problems = []
    for entry in channel.data_entries(first):
        for segment in entry.segments:
            try:
                channel.segments.ensure(segment, deep=False)
            except DamagedRecordError as error:
                problems.append(f"batch {entry.batch}: {error}")
    return tuple(problems)


def check_segments(channel: ChannelLog, entry: DataEntry) -> None:
    """Raise DamagedRecordError unless every byte of the entry's rows is there."""
    for segment in entry.segments:
        channel.segments.ensure(segment, deep=True)


def continued(channels: Mapping[OperatorId, ChannelLog], generation: Generation) -> dict[OperatorId, ChannelLog]:
    """The logs, forked at their ends: nothing is given up, and no reader sees what an old process still writes."""
    lineages = {name: old.lineage.fork(generation, old.end) for name, old in channels.items()}
    return {name: ChannelLog.open(name, old.folder, lineages[name]) for name, old in channels.items()}
