"""Whether the channels' logs fit what others know of them: cheap checks, made at every start."""

from __future__ import annotations

from collections.abc import Mapping

from cutline.channels.entries import data_dir
from cutline.channels.log import ChannelLog
from cutline.ids import OperatorId, Position
from cutline.ports import Manifest
from cutline.service.manifests import newest_of


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
                path = data_dir(channel.folder) / segment.name
                if not path.is_file() or path.stat().st_size != segment.size_bytes:
                    problems.append(f"{name}: segment {segment.name} of batch {entry.batch} is gone or cut short")
    return problems
