"""How far a Kafka topic has been read, as stored in Spark's offsets, and whether it can be read again from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cutline.connectors.kafka.client import Bounds, bounds_of, consumer, partitions_of, topic_id
from cutline.connectors.source_options import SourcePosition, convert, parse
from cutline.errors import LostInputError
from cutline.ports.inspection import FileProblem, SourceReport

KIND = "cutline_kafka"


class KafkaPosition(SourcePosition, frozen=True, kw_only=True):
    """A position in every partition of a topic. Holds all that the replay guard needs to check it, and no secrets."""

    source: str = KIND
    servers: str
    topic: str
    #: Distinguishes topics with the same name; empty: the broker has no topic ids.
    topic_id: str
    #: Where reading began, per partition. Spark does not record where the first batch of a query begins.
    begin: dict[str, int]
    #: The next offset to read, per partition.
    offsets: dict[str, int]


def parse_position(position: bytes | None) -> KafkaPosition | None:
    """None: the offset of another source, or of none."""
    return parse(position, KafkaPosition, KIND)


def position_of(offset: Mapping[str, Any]) -> KafkaPosition:
    return convert(offset, KafkaPosition)


def ranges(start: KafkaPosition, end: KafkaPosition) -> dict[int, Bounds]:
    """What a batch reads. A partition added since the batch before begins where ``end`` says."""
    is_first = start.begin != {name: end.begin.get(name) for name in start.begin}
    found = {}
    for name, last in end.offsets.items():
        first = end.begin[name] if is_first else start.offsets.get(name, end.begin[name])
        found[int(name)] = Bounds(first, last)
    return found


def lost_between(
    there: Mapping[str, Bounds] | None, identity: str, start: KafkaPosition, end: KafkaPosition | None
) -> list[FileProblem]:
    """What of [start, end) the topic no longer holds; ``there`` None: the topic is gone."""
    is_other = bool(identity and start.topic_id and identity != start.topic_id)
    problems = []
    for name, first in sorted(start.offsets.items(), key=lambda item: int(item[0])):
        what = f"topic {start.topic}, partition {name}"
        read = max(first, end.offsets.get(name, first)) if end is not None else first
        bounds = None if there is None or is_other else there.get(name)
        if bounds is None or bounds.end < first:
            why = "another topic has this name now" if is_other or bounds is not None else "it does not exist any more"
            span = f"offsets {first} to {read - 1}" if read > first else f"everything from offset {first} on"
            problems.append(FileProblem(f"{what}: {span}", why, read - first))
            continue
        if bounds.first > first:
            text = f"{what}: offsets {first} to {bounds.first - 1}"
            problems.append(FileProblem(text, "the topic has dropped these messages", bounds.first - first))
        if bounds.end < read:
            text = f"{what}: offsets {bounds.end} to {read - 1}"
            problems.append(FileProblem(text, "the topic is shorter than it was", read - bounds.end))
    return problems


# ------------------------------------------------------------------------------------------------- the replay guard


def is_mine(position: bytes | None) -> bool:
    return parse_position(position) is not None


def check(position: bytes | None, latest: bytes | None) -> SourceReport:
    """Whether all after ``position`` can be read again. Raises NotDone if no broker can be asked."""
    start = parse_position(position)
    if start is None:
        return SourceReport()
    end = parse_position(latest)
    there, identity = _look(start, end)
    return SourceReport(lost_between(there, identity, start, end))


def beginning(position: bytes) -> bytes:
    """Where reading began."""
    found = parse_position(position)
    return position if found is None else msgspec.json.encode(msgspec.structs.replace(found, offsets=found.begin))


def moved(positions: Sequence[bytes], latest: bytes | None) -> list[bytes]:
    """The position, and those of batches planned after it, moved to where everything that exists can be read."""
    start, *planned = [one for one in map(parse_position, positions) if one is not None]
    there, identity = _look(start, parse_position(latest))
    if there is None:
        raise LostInputError(
            f"topic {start.topic} does not exist any more",
            next_step="create the topic again, then restart",
            servers=start.servers,
        )
    gone = {problem.path for problem in lost_between(there, identity, start, None)}
    begin, offsets = (
        {name: at for name, at in known.items() if name in there} for known in (start.begin, start.offsets)
    )
    for name, bounds in there.items():
        if name in offsets and any(path.startswith(f"topic {start.topic}, partition {name}:") for path in gone):
            begin[name] = offsets[name] = bounds.first
    known = identity or start.topic_id
    here = msgspec.structs.replace(start, begin=begin, offsets=offsets, topic_id=known)
    result = [here]
    for one in planned:
        if identity and one.topic_id and one.topic_id != identity:
            result.append(here)  # offsets planned in the other topic mean nothing in this one
            continue
        begins = {name: max(one.begin[name], there[name].first) for name in one.offsets if name in there} | begin
        ends = {
            name: min(max(one.offsets[name], offsets.get(name, first)), there[name].end)
            for name, first in begins.items()
            if name in one.offsets
        }
        result.append(msgspec.structs.replace(one, begin=begins, offsets=ends, topic_id=known))
    return [msgspec.json.encode(one) for one in result]


def _look(start: KafkaPosition, latest: KafkaPosition | None) -> tuple[dict[str, Bounds] | None, str]:
    # The brokers may have moved since the checkpoint; the newest offset knows the newest addresses.
    servers = (latest or start).servers
    with consumer(servers) as client:
        partitions = partitions_of(client, servers, start.topic)
        if partitions is None:
            return None, ""
        there = {str(one): bounds_of(client, servers, start.topic, one) for one in partitions}
    return there, topic_id(servers, start.topic) if start.topic_id else ""
