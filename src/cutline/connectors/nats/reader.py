"""Reads the epochs that a JetStream sink has published, each as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cutline.connectors.nats.client import Connection, Message, read_range, stream_state
from cutline.connectors.nats.ledger import (
    EPOCH_HEADER,
    ROW_HEADER,
    decode_ledger,
    epoch_key,
    ledger_subject,
    load_ledger,
)
from cutline.errors import SinkError
from cutline.model.ids import Epoch


class PublishedEpoch(NamedTuple):
    """A completely published epoch."""

    epoch: Epoch
    rows: list[Message]
    #: The next read continues after this sequence: store it together with what was derived from the rows.
    sequence: int


def read_published(url: str, stream: str, *, flow: str, sink: str, after: int = 0) -> Iterator[PublishedEpoch]:
    """The complete epochs that one sink has published after a sequence, in order, up to the stream's current end."""
    subject = ledger_subject(stream, flow, sink)
    held: dict[str, dict[int, Message]] = {}
    with Connection(url) as connection:
        state = stream_state(connection, stream)
        newest = load_ledger(connection, stream, subject) if state is not None else None
        if state is None or newest is None:
            return
        subjects = (newest.ledger.subject, subject)
        for page in read_range(connection, stream, max(after + 1, state.first), newest.sequence + 1, subjects):
            for message in page:
                if message.subject != subject:
                    key = message.headers.get(EPOCH_HEADER, "")
                    if key.startswith(f"{flow}/{sink}/"):
                        held.setdefault(key, {})[int(message.headers[ROW_HEADER])] = message
                    continue
                ends = decode_ledger(message.data, subject).ends
                if ends is None:
                    continue
                rows = held.get(epoch_key(flow, sink, ends.epoch, ends.digest), {})
                if len(rows) != ends.rows:
                    raise SinkError(
                        f"only {len(rows)} of the epoch's {ends.rows} rows are in the stream: the others were dropped",
                        next_step="read sooner, keep messages longer, or begin after this sequence",
                        stream=stream,
                        epoch=ends.epoch,
                        sequence=message.sequence,
                    )
                held.clear()  # the rest belongs to an abandoned attempt
                yield PublishedEpoch(ends.epoch, [rows[number] for number in sorted(rows)], message.sequence)
