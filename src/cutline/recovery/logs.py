"""Whether the channels' logs fit what others know of them: cheap checks, made at every start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.channels.segment_store import SegmentStore, whereabouts
from cutline.coordinator.manifests import newest_of
from cutline.errors import DamagedRecordError
from cutline.model import entries as codec
from cutline.model.entries import DataEntry
from cutline.model.ids import OperatorId, Position
from cutline.ports import Manifest

log = get_logger(__name__)


def missing_ends(channels: Mapping[OperatorId, ChannelLog], manifests: list[Manifest]) -> list[str]:
    """Logs that others have seen more of: a log lost as a whole looks like one that was never written."""
    problems = []
    for name, channel in channels.items():
        newest = newest_of(manifests, name)
        if newest is not None and channel.end <= newest.channels[name].barrier:
            barrier = newest.channels[name].barrier
            problems.append(f"{name}: log ends at {channel.end}, but its barrier was at {barrier}")
    for consumer, channel in channels.items():
        for name, position in channel.last_positions.items():
            if name in channels and position > channels[name].end:
                problems.append(f"{name}: log ends at {channels[name].end}, but {consumer} has read up to {position}")
    return problems


def gather_segments(channels_dir: Path) -> None:
    """Bring what lies at a former place to where executors look now. Raises StoreError.

    Of every entry there is: checkpoints from before a change need logs that nobody writes any more.
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
        except DamagedRecordError as error:  # what is read next was looked at before: this is of an older checkpoint
            log.warning("segment_lost", operator=path.parents[1].name, entry=path.name, reason=str(error))


def missing_input(channels: Mapping[OperatorId, ChannelLog], unread: Mapping[OperatorId, Position | None]) -> list[str]:
    """What consumers have yet to read and is gone or cut short: the beginning of a log, or a segment."""
    problems = []
    for name, first in unread.items():
        channel = channels[name]
        if first is None:
            continue
        if channel.start > first:
            problems.append(f"{name}: log begins at {channel.start}, but is read from {first} on")
        for entry in channel.data_entries(first):
            for segment in entry.segments:
                try:
                    channel.segments.ensure(segment, deep=False)
                except DamagedRecordError as error:
                    problems.append(f"{name}: batch {entry.batch}: {error}")
    return problems
