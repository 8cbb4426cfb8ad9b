"""The channels' logs at a start: whether their segments are there, and how they continue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.channels.segment_store import SegmentStore, whereabouts
from cutline.errors import DamagedRecordError, MissingObject, RecoveryError, StoreError
from cutline.model.entries import DataEntry, Segment
from cutline.model.ids import FlowName, Generation, OperatorId, Position
from cutline.objects.waiting import wait_for_store

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


def missing_segments(channel: ChannelLog, first: Position, *, flow: FlowName) -> tuple[str, ...]:
    """Segments from ``first`` on that are missing or truncated: a cheap check, made at every start."""
    problems = []
    for entry in channel.data_entries(first):
        for segment in entry.segments:
            try:
                ensure(channel, segment, deep=False, flow=flow)
            except DamagedRecordError as error:
                problems.append(f"batch {entry.batch}: {error}")
    return tuple(problems)


def check_segments(channel: ChannelLog, entry: DataEntry, *, flow: FlowName) -> None:
    """Raise DamagedRecordError unless every byte of the entry's rows is there."""
    for segment in entry.segments:
        ensure(channel, segment, deep=True, flow=flow)


def ensure(channel: ChannelLog, segment: Segment, *, deep: bool, flow: FlowName) -> None:
    """Ensure that executors find the segment. Waits for a channel store that is briefly unavailable.

    Raises DamagedRecordError if there is no intact copy, RecoveryError if that remains unknown: a checkpoint must not
    count as damaged because a store does not answer.
    """
    try:
        wait_for_store(lambda: channel.segments.ensure(segment, deep=deep), flow=flow)
    except MissingObject as error:
        raise DamagedRecordError("the segment is missing", segment=segment.name) from error
    except StoreError as error:
        raise RecoveryError(
            f"whether segment {segment.name} is intact is unknown: {error}",
            next_step="make the channel store reachable; nothing has been changed",
            flow=flow,
            operator=channel.operator,
        ) from error


def continued(channels: Mapping[OperatorId, ChannelLog], generation: Generation) -> dict[OperatorId, ChannelLog]:
    """The logs, forked at their ends: nothing is given up, and no reader sees what an old process still writes."""
    lineages = {name: old.lineage.fork(generation, old.end) for name, old in channels.items()}
    opened = {name: ChannelLog.open(name, old.folder, lineages[name]) for name, old in channels.items()}
    for channel in opened.values():
        # The generation's record will say that the log goes on after these entries, and their writer may have died.
        channel.sync_barriers()
    return opened
