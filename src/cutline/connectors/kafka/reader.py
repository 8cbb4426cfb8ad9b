"""Reads the messages of whole epochs that a Kafka sink has published: up to the cuts in its ledger.

A transaction's markers reach the partitions one after the other, so readers of several partitions may see an epoch in
one and not yet in another. The ledger's own marker proves that the transaction is committed: then its end is awaited in
every partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cutline.connectors.kafka.client import (
    Bounds,
    Record,
    administrator,
    bounds_of,
    consumer,
    ends_of,
    finished_bounds,
    partitions_of,
    read_range,
    topic_id,
)
from cutline.connectors.kafka.ledger import Cut, Held, LedgerTopic
from cutline.connectors.reading import check_still_published, nothing_published, refuse_after, refuse_as_of
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.reading import ReadRequest, ReadResult

if TYPE_CHECKING:
    import pyarrow as pa


def read_topic(ledgers: LedgerTopic, topic: str, request: ReadRequest, *, timeout_s: float) -> ReadResult:
    """All messages up to a cut, and after another one. Messages of other writers between the cuts are among them."""
    held = _owner(_candidates(ledgers, request, timeout_s=timeout_s), ledgers, topic, request)
    if held is None:
        check_still_published(request, (), rewound=NO_EPOCH)
        return _result("", "", NO_EPOCH, lambda: iter(()))
    start, newest = _start(held, request), _newest(held, request)
    flow, sink = held.ledger.flow, held.ledger.sink
    if newest is None:
        return _result(flow, sink, NO_EPOCH, lambda: iter(()))
    ranges = _ranges(ledgers.servers, topic, start, newest, timeout_s=timeout_s)

    def batches() -> Iterator[pa.RecordBatch]:
        with consumer(ledgers.servers) as client:
            for partition, bounds in ranges.items():
                for page in read_range(client, ledgers.servers, topic, partition, bounds):
                    yield record_batch(partition, page)

    return _result(flow, sink, newest.epoch, batches)


def _candidates(ledgers: LedgerTopic, request: ReadRequest, *, timeout_s: float) -> list[Held]:
    """The ledgers that may be meant; if flow and sink are named, damaged ones of others do no harm."""
    if request.flow is None or request.sink is None:
        return ledgers.load_all(timeout_s=timeout_s)
    named = ledgers.load(request.flow, request.sink, timeout_s=timeout_s)
    return ledgers.load_all(timeout_s=timeout_s) if named is None else [named]


def _result(flow: str, sink: str, epoch: Epoch, batches: object) -> ReadResult:
    return ReadResult(flow=flow, sink=sink, epoch=epoch, schema=record_schema(), batches=batches)  # type: ignore[arg-type]


def _owner(all_held: Sequence[Held], ledgers: LedgerTopic, topic: str, request: ReadRequest) -> Held | None:
    """Whose epochs count. None: no sink has begun to write to the topic."""
    owners = [one for one in all_held if one.ledger.topic == topic]
    fitting = [
        one for one in owners if request.flow in (None, one.ledger.flow) and request.sink in (None, one.ledger.sink)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not owners:
        with consumer(ledgers.servers) as client:
            if partitions_of(client, ledgers.servers, topic) is None:
                raise nothing_published(topic)
        return None
    known = ", ".join(f"{one.ledger.flow}/{one.ledger.sink}" for one in owners)
    raise SinkError(
        f"several sinks write to the topic ({known})" if fitting else f"no such sink writes to it, but {known}",
        next_step="name the flow= and the sink's name=",
        topic=topic,
    )


def _newest(held: Held, request: ReadRequest) -> Cut | None:
    """The newest cut that the request reaches. None: nothing was published by then."""
    newest = max((epoch for epoch in held.cuts if request.reaches(epoch)), default=None)
    if newest is not None:
        return held.cuts[newest]
    if held.forgotten:
        raise refuse_as_of(f"the ledger knows the epochs after {held.forgotten} only")
    return None


def _start(held: Held, request: ReadRequest) -> Cut | None:
    """Where the rows after ``request.after`` begin. None: at the beginning of the topic."""
    if request.after == NO_EPOCH:
        return None
    known = [*held.cuts, *([held.forgotten] if held.forgotten else [])]
    check_still_published(request, known, rewound=NO_EPOCH)
    before = max((epoch for epoch in held.cuts if epoch <= request.after), default=None)
    if before is None and held.forgotten:
        raise refuse_after(f"the ledger knows the epochs after {held.forgotten} only")
    return None if before is None else held.cuts[before]


def _ranges(servers: str, topic: str, start: Cut | None, end: Cut, *, timeout_s: float) -> dict[int, Bounds]:
    """The offsets to read, per partition; waits until every partition shows the end."""
    found: dict[int, Bounds] = {}
    admin = administrator(servers)
    identity = topic_id(servers, topic, admin)
    for cut in (start, end):
        if cut is not None and cut.topic_id and identity and cut.topic_id != identity:
            raise SinkError(
                f"the topic was deleted and created again since epoch {cut.epoch}",
                next_step="read without after= once the sink has published again",
                topic=topic,
            )
    begins: Mapping[str, int] = {} if start is None else start.ends
    _check_all_there(ends_of(admin, servers, topic), end, topic)
    with consumer(servers) as client:
        for name, last in end.ends.items():
            partition, first = int(name), begins.get(name, 0)
            there = bounds_of(client, servers, topic, partition)
            if first >= last:
                continue
            if there.end < last:
                there = finished_bounds(client, servers, topic, partition, timeout_s=timeout_s, end=last)
            if start is not None and there.first > first:
                raise SinkError(
                    f"partition {partition} has dropped messages of later epochs: offsets {first} to {there.first - 1}",
                    next_step="read sooner, keep messages longer, or read without after=",
                    topic=topic,
                )
            found[partition] = Bounds(max(first, there.first), last)
    return found


def _check_all_there(ends: Mapping[int, int], cut: Cut, topic: str) -> None:
    """Refuse a topic that is shorter than it was."""
    if lost := cut.lost_in(ends):
        raise SinkError(
            f"the brokers have lost messages of epoch {cut.epoch} or earlier: {lost}",
            next_step="compare the rows with those of the flow's other sinks, or with its input",
            topic=topic,
        )


# ------------------------------------------------------------------------------------------------- rows


def record_schema() -> pa.Schema:
    """Messages as rows, in the columns that Cutline's Kafka source has."""
    import pyarrow as pa

    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.schema(
        [
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("published_at", pa.timestamp("us", tz="UTC")),
            ("headers", pa.list_(header)),
        ]
    )


def record_batch(partition: int, page: Sequence[Record]) -> pa.RecordBatch:
    import pyarrow as pa

    schema = record_schema()
    columns = (
        [partition] * len(page),
        [one.offset for one in page],
        [one.key for one in page],
        [one.value for one in page],
        [one.timestamp_ms * 1_000 for one in page],
        [[{"key": key, "value": value} for key, value in one.headers] for one in page],
    )
    arrays = [pa.array(values, field.type) for field, values in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
