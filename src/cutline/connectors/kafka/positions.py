"""How far a Kafka topic has been read, as stored in Spark's offsets, and whether it can be read again from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cutline.connectors.kafka.client import Bounds, bounds_of, consumer, partitions_of, topic_id
from cutline.connectors.source_options import SourcePosition, convert, parse
from cutline.errors import LostInputError
from cutline.ports.inspection import FileProblem, SourceProgress, SourceReport

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


class TopicNow(NamedTuple):
    """What a topic holds now."""

    #: Per partition.
    bounds: Mapping[str, Bounds]
    #: Empty: the broker has no topic ids.
    identity: str = ""


def lost_between(
    there: Mapping[str, Bounds] | None, identity: str, start: KafkaPosition, end: KafkaPosition | None
) -> list[FileProblem]:
    """What of [start, end) the topic no longer holds; ``there`` None: the topic is gone."""
    now = None if there is None else TopicNow(there, identity)
    if end is None:
        return lost_of_topic(start.topic, now, start.topic_id, start.offsets)
    return lost_of_topic(start.topic, now, start.topic_id, start.offsets, end=end.offsets, begin=end.begin)


def lost_of_topic(
    topic: str,
    now: TopicNow | None,
    identity: str,
    start: Mapping[str, int],
    *,
    end: Mapping[str, int] | None = None,
    begin: Mapping[str, int] | None = None,
) -> list[FileProblem]:
    """What of [start, end) a topic no longer holds; ``now`` None: it is gone. ``identity``: when it was read.

    ``begin``: where reading began in partitions that were added after ``start``; others begin at their first offset.
    """
    is_other = now is not None and is_another(now, identity)
    firsts = dict(start)
    if now is not None and not is_other:
        firsts |= {name: (begin or {}).get(name, 0) for name in now.bounds if name not in start}
    problems = []
    for name, first in sorted(firsts.items(), key=lambda item: int(item[0])):
        what = f"topic {topic}, partition {name}"
        read = max(first, end.get(name, first)) if end is not None else first
        bounds = None if now is None or is_other else now.bounds.get(name)
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


def is_another(now: TopicNow, identity: str) -> bool:
    """Whether a topic that was read under this id has been replaced; without ids, it cannot be told."""
    return bool(now.identity and identity and now.identity != identity)


def moved_in_topic(now: TopicNow, identity: str, offsets: Mapping[str, int]) -> dict[str, int]:
    """The next offsets to read, moved to where everything that the topic holds can be read.

    Partitions that are gone are left out. Added ones whose first messages are gone are put in: they begin at their
    earliest message; the others begin at their first one anyway.
    """
    if is_another(now, identity):
        return {name: bounds.first for name, bounds in now.bounds.items()}
    here = {}
    for name, bounds in now.bounds.items():
        at = offsets.get(name)
        if at is None and bounds.first > 0:
            here[name] = bounds.first
        elif at is not None:
            here[name] = at if bounds.first <= at <= bounds.end else bounds.first
    return here


def moved_plan(now: TopicNow, identity: str, here: Mapping[str, int], planned: Mapping[str, int]) -> dict[str, int]:
    """Where a batch ends that was planned after positions which are ``here`` now.

    Of another topic it takes nothing: its output may be in the log already, and what it would read would be dropped.
    """
    if is_another(now, identity):
        return dict(here)
    ends = dict(here)
    for name, bounds in now.bounds.items():
        if name in planned:
            ends[name] = min(max(planned[name], here.get(name, bounds.first)), bounds.end)
    return ends


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


def progress(position: bytes, stored: Sequence[bytes]) -> SourceProgress | None:
    """Raises NotDone if no broker can be asked."""
    from cutline.connectors.kafka.retention import progress_of

    newest, known = parse_position(position), [parse_position(one) for one in stored]
    if newest is None:
        return None
    offsets = [{} if one is None or one.topic != newest.topic else {one.topic: one.offsets} for one in known]
    return progress_of(newest.servers, {newest.topic: newest.offsets}, offsets)


def beginning(position: bytes) -> bytes:
    """Where reading began."""
    found = parse_position(position)
    return position if found is None else msgspec.json.encode(msgspec.structs.replace(found, offsets=found.begin))


def moved(positions: Sequence[bytes], latest: bytes | None) -> list[bytes]:
    """The position, and those of batches planned after it, moved to where everything that exists can be read."""
    start, *planned = [one for one in map(parse_position, positions) if one is not None]
    there, identity = _look(start, parse_position(latest))
    if there is None:
        raise gone_topic(start.topic, start.servers)
    now = TopicNow(there, identity)
    known = identity or start.topic_id
    offsets = moved_in_topic(now, start.topic_id, start.offsets)
    begin = {name: start.begin[name] if at == start.offsets.get(name) else at for name, at in offsets.items()}
    result = [msgspec.structs.replace(start, begin=begin, offsets=offsets, topic_id=known)]
    for one in planned:
        ends = moved_plan(now, one.topic_id, offsets, one.offsets)
        begins = {name: max(one.begin.get(name, 0), there[name].first) for name in ends} | begin
        result.append(msgspec.structs.replace(one, begin=begins, offsets=ends, topic_id=known))
    return [msgspec.json.encode(one) for one in result]


def gone_topic(topic: str, servers: str) -> LostInputError:
    return LostInputError(
        f"topic {topic} does not exist any more",
        next_step="create the topic again, then restart",
        servers=servers,
    )


def topic_bounds(client: Any, servers: str, topic: str) -> dict[str, Bounds] | None:
    """What every partition holds; None: there is no such topic."""
    partitions = partitions_of(client, servers, topic)
    if partitions is None:
        return None
    return {str(one): bounds_of(client, servers, topic, one) for one in partitions}


def _look(start: KafkaPosition, latest: KafkaPosition | None) -> tuple[dict[str, Bounds] | None, str]:
    # The brokers may have moved since the checkpoint; the newest offset knows the newest addresses.
    servers = (latest or start).servers
    with consumer(servers) as client:
        there = topic_bounds(client, servers, start.topic)
    return there, topic_id(servers, start.topic) if start.topic_id and there is not None else ""
