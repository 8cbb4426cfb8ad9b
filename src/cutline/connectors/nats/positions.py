"""How far a NATS stream has been read, as stored in Spark's offsets, and whether it can be read again from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cutline.base.clock import now_ms
from cutline.connectors.nats.client import Connection, StreamState, read_range, stream_state
from cutline.connectors.source_options import SourcePosition, convert, parse
from cutline.errors import LostInputError
from cutline.ports.inspection import Expiry, FileProblem, PartitionProgress, SourceProgress, SourceReport
from cutline.protocol.recovery.restorable import kept_until

KIND = "cutline_nats"


class NatsPosition(SourcePosition, frozen=True, kw_only=True):
    """A position in a stream. Holds all that the replay guard needs to check it, and no secrets."""

    source: str = KIND
    url: str
    stream: str
    #: When the stream was created: distinguishes streams with the same name.
    created: str
    #: The sequence that reading began with. Spark does not record where the first batch of a query begins.
    begin: int
    #: The next sequence to read.
    sequence: int
    #: How many messages, of any subject, were read: if a second reading finds fewer, some were deleted.
    messages: int = 0


def parse_position(position: bytes | None) -> NatsPosition | None:
    """None: the offset of another source, or of none."""
    return parse(position, NatsPosition, KIND)


def position_of(offset: Mapping[str, Any]) -> NatsPosition:
    return convert(offset, NatsPosition)


def where_batch_begins(start: NatsPosition, end: NatsPosition) -> NatsPosition:
    """Spark asks for the beginning of a query's first batch again at each attempt, and it may have moved.

    The end, which Spark has stored, records it.
    """
    if (start.begin, start.created) == (end.begin, end.created):
        return start
    return _begun(end)


def _begun(position: NatsPosition) -> NatsPosition:
    return msgspec.structs.replace(position, sequence=position.begin, messages=0)


def lost_between(state: StreamState | None, start: NatsPosition, end: NatsPosition | None) -> list[FileProblem]:
    """What of [start, end) the stream no longer holds; ``end`` None: how far it was read is unknown."""
    name = f"stream {start.stream}"
    last = None if end is None or end.created != start.created else end
    if state is None or state.created != start.created:
        why = "it does not exist any more" if state is None else "another stream has this name now"
        if last is None or last.sequence <= start.sequence:
            # No message is known to be lost, but the next messages are not those of the original stream.
            return [FileProblem(f"{name}: everything from sequence {start.sequence} on", f"{why}", 0)]
        count = last.messages - start.messages
        return [FileProblem(f"{name}: sequences {start.sequence} to {last.sequence - 1}", f"{why}", count)]
    problems = []
    reached = start.sequence if last is None else max(start.sequence, last.sequence)
    first = max(start.sequence, state.first)
    if first > start.sequence:
        text = f"{name}: sequences {start.sequence} to {first - 1}"
        problems.append(FileProblem(text, "the stream has dropped these messages", first - start.sequence))
    if state.end < reached:
        text = f"{name}: sequences {state.end} to {reached - 1}"
        why = "the stream was reset to before them, and assigns their sequences to other messages"
        problems.append(FileProblem(text, why, reached - state.end))
    if last is not None:
        # At most this many of the messages that were read are explained by the problems above.
        dropped = min(first, reached) - start.sequence + max(reached - max(state.end, first), 0)
        deleted = last.messages - start.messages - dropped - state.messages_between(first, reached)
        if deleted > 0:
            text = f"{name}: {deleted} of the sequences {first} to {min(reached, state.end) - 1}"
            problems.append(FileProblem(text, "these messages were deleted", deleted))
    return problems


# ------------------------------------------------------------------------------------------------- the replay guard


def is_mine(position: bytes | None) -> bool:
    return parse_position(position) is not None


def check(position: bytes | None, latest: bytes | None) -> SourceReport:
    """Whether all after ``position`` can be read again. Raises NotDone if the server cannot be asked."""
    start = parse_position(position)
    if start is None:
        return SourceReport()
    end = parse_position(latest)
    return SourceReport(lost_between(_look(start, end), start, end))


def progress(position: bytes, stored: Sequence[bytes]) -> SourceProgress | None:
    """Raises NotDone if the server cannot be asked."""
    newest, known = parse_position(position), [parse_position(one) for one in stored]
    if newest is None:
        return None
    with Connection(newest.url) as connection:
        state = stream_state(connection, newest.stream)
        if state is None:
            return None
        expiries = [_expiry(connection, state, one) for one in known]
    own = PartitionProgress(newest.stream, newest.sequence, max(state.end, newest.sequence))
    return SourceProgress(f"stream {newest.stream}", [own], expiries)


def _expiry(connection: Connection, state: StreamState, position: NatsPosition | None) -> Expiry:
    """By the first message that the position needs, if the stream has it."""
    if position is None or position.created != state.created or not state.first <= position.sequence < state.end:
        return Expiry(None)
    page = next(read_range(connection, state.name, position.sequence, state.end), [])
    if not page:
        return Expiry(None)
    written_ms, at_ms, ahead = page[0].published_ns // 1_000_000, now_ms(), state.end - position.sequence
    size_bytes = sum(len(one.data) + len(one.subject) for one in page) // len(page)
    limits = {name: max(int(state.config.get(name) or 0), 0) or None for name in ("max_age", "max_msgs", "max_bytes")}
    age_ms = None if limits["max_age"] is None else limits["max_age"] // 1_000_000
    ends = {
        "max_age": kept_until(written_ms, at_ms, age_ms=age_ms),
        "max_msgs": kept_until(written_ms, at_ms, most_bytes=limits["max_msgs"], ahead_bytes=ahead),
        "max_bytes": kept_until(written_ms, at_ms, most_bytes=limits["max_bytes"], ahead_bytes=ahead * size_bytes),
    }
    known = {name: until_ms for name, until_ms in ends.items() if until_ms is not None}
    if not known:
        return Expiry(None)
    first = min(known, key=lambda name: known[name])
    return Expiry(known[first], f"{first} of stream {state.name}")


def beginning(position: bytes) -> bytes:
    """Where reading began."""
    found = parse_position(position)
    return position if found is None else msgspec.json.encode(_begun(found))


def moved(positions: Sequence[bytes], latest: bytes | None) -> list[bytes]:
    """The position, and those of batches planned after it, moved to where everything that exists can be read."""
    start, *planned = [one for one in map(parse_position, positions) if one is not None]
    state = _look(start, parse_position(latest))
    if state is None:
        raise LostInputError(
            f"stream {start.stream} does not exist any more",
            next_step="create the stream again, then restart",
            url=start.url,
        )
    here = start.sequence if state.created == start.created else state.first
    here = min(max(here, state.first), state.end)
    if (state.created, here) != (start.created, start.sequence):
        start = msgspec.structs.replace(start, created=state.created, begin=here, sequence=here)
    result = [start]
    for one in planned:
        end = min(max(one.sequence, here), state.end) if one.created == state.created else here
        messages = start.messages + state.messages_between(start.sequence, end)
        result.append(msgspec.structs.replace(start, sequence=end, messages=messages))
    return [msgspec.json.encode(one) for one in result]


def _look(start: NatsPosition, latest: NatsPosition | None) -> StreamState | None:
    # The server may have moved since the checkpoint; the newest offset knows the newest address.
    with Connection((latest or start).url) as connection:
        return stream_state(connection, start.stream, with_deleted=True)
