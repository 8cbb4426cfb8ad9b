"""The ledger of a JetStream sink: messages in the stream itself that record which of the sink's rows it holds.

Rows and ledger are written in *atomic batches* (NATS 2.12): the server stores all messages of a batch or none. Each
batch ends with the ledger as of that batch, and is accepted only if the ledger's last message is the one that the
writer knows. So the ledger always says exactly how many rows of which epoch the stream holds, whenever a process died;
and a process that has written a *claim* into it fences all earlier writers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cutline.base import records
from cutline.base.retry import Retry
from cutline.connectors.log_sink import ledger_of, with_published
from cutline.connectors.nats.client import Connection, import_nats, is_refusal
from cutline.errors import NotDone, Refused, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.model.validation import Problem, of_numbers
from cutline.protocol.publish.sink_ledger import SinkLedger, fenced

if TYPE_CHECKING:
    from nats.aio.client import Client

EPOCH_HEADER, ROW_HEADER = "Cutline-Epoch", "Cutline-Row"
_KIND = "jetstream-ledger"
#: Most messages that a server accepts in one batch, unless configured otherwise.
MOST_IN_BATCH = 1_000
_WRONG_LAST_SEQUENCE = 10_071
#: Retries when other processes write to the ledger at the same time.
_RACES = Retry(limit=5)


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that is partly in the stream."""

    epoch: Epoch
    digest: str
    rows: int


class StreamLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the stream while this message is the newest of the ledger's subject."""

    flow: FlowName
    sink: SinkId
    subject: str
    #: The current writer; random for each start of the sink.
    claim: str
    #: The Arrow schema of the rows.
    schema_ipc: bytes
    #: The newest published epoch, and the newest ones with their digests.
    epoch: Epoch = NO_EPOCH
    published: dict[str, str] = {}
    begun: Begun | None = None
    #: The epoch that this message ends, if any.
    ends: Begun | None = None

    def problems(self) -> Iterator[Problem]:
        """Epochs that are no numbers."""
        yield from of_numbers("published", self.published)

    def claimed(self, claim: str) -> StreamLedger:
        return msgspec.structs.replace(self, claim=claim, ends=None)

    def with_part(self, epoch: Epoch, digest: str, rows: int) -> StreamLedger:
        return msgspec.structs.replace(self, begun=Begun(epoch=epoch, digest=digest, rows=rows), ends=None)

    def with_end(self, epoch: Epoch, digest: str, rows: int) -> StreamLedger:
        ends = Begun(epoch=epoch, digest=digest, rows=rows)
        published = with_published(self.published, epoch, digest)
        return msgspec.structs.replace(self, epoch=epoch, published=published, begun=None, ends=ends)

    def sink_ledger(self) -> SinkLedger:
        return ledger_of(self.flow, self.sink, claim=self.claim, published=self.published, newest=self.epoch)

    def rows_there(self, epoch: Epoch, digest: str) -> int:
        """How many of the epoch's rows are in the stream, counted from the first."""
        begun = self.begun
        return begun.rows if begun is not None and (begun.epoch, begun.digest) == (epoch, digest) else 0


class Held(NamedTuple):
    """A ledger, and the sequence of its message."""

    ledger: StreamLedger
    sequence: int


class Outgoing(NamedTuple):
    """One message of a batch."""

    subject: str
    data: bytes
    headers: dict[str, str]


def ledger_subject(stream: str, flow: str, sink: str) -> str:
    return f"_cutline.{stream}.{flow}.{sink}"


def epoch_key(flow: str, sink: str, epoch: Epoch, digest: str) -> str:
    """In the header of every row."""
    return f"{flow}/{sink}/{epoch}/{digest[:16]}"


def decode_ledger(data: bytes, subject: str) -> StreamLedger:
    return records.decode(_KIND, data, StreamLedger, path=subject)


def load_ledger(connection: Connection, stream: str, subject: str) -> Held | None:
    """The newest ledger; None: there is none."""

    async def look(client: Client) -> Any:
        from nats.js.errors import NotFoundError

        try:
            return await client.jetstream(timeout=connection.timeout_s).get_last_msg(stream, subject)
        except NotFoundError:
            return None

    message = connection.ask(look)
    if message is None:
        return None
    return Held(decode_ledger(message.data or b"", subject), int(message.seq))


def claim_ledger(
    connection: Connection, stream: str, subject: str, fresh: StreamLedger, claim: str, *, check: Callable[[str], None]
) -> Held:
    """Fence all earlier writers, and return the ledger with the new claim. ``fresh``: if there is none yet.

    ``check``: raises FencedError for a claim that this one must not replace.
    """
    for _ in _RACES.attempts():
        held = load_ledger(connection, stream, subject) or Held(fresh.claimed(""), 0)
        check(held.ledger.claim)
        done = _claimed(connection, stream, subject, held, claim)
        if done is not None:
            return done
    raise _raced(stream, subject)


def claim_again(connection: Connection, stream: str, subject: str, mine: StreamLedger) -> Held:
    """Write the ledger once more after a write whose outcome is unknown, so that that write cannot land later.

    Raises FencedError if another instance has claimed the sink meanwhile.
    """
    for _ in _RACES.attempts():
        held = load_ledger(connection, stream, subject)
        if held is None and mine.claim:
            raise lost(stream)
        held = held or Held(mine, 0)
        if held.ledger.claim != mine.claim:
            raise fenced(mine.sink_ledger())
        done = _claimed(connection, stream, subject, held, mine.claim)
        if done is not None:
            return done
    raise _raced(stream, subject)


def _claimed(connection: Connection, stream: str, subject: str, held: Held, claim: str) -> Held | None:
    """None: another writer was faster."""
    ledger = held.ledger.claimed(claim)
    sequence = write(connection, stream, subject, (), ledger, expected=held.sequence)
    return Held(ledger, sequence) if sequence is not None else None


def _raced(stream: str, subject: str) -> NotDone:
    return NotDone("other processes keep writing to the sink's ledger", stream=stream, subject=subject)


def lost(stream: str) -> SinkError:
    return SinkError(
        "the stream has lost the sink's ledger, or the staging folder belongs to another stream: "
        "the last published epoch is unknown",
        next_step="give the sink a new staging folder if the last epoch may be published twice",
        stream=stream,
    )


def write(
    connection: Connection, stream: str, subject: str, rows: Sequence[Outgoing], ledger: StreamLedger, *, expected: int
) -> int | None:
    """Store rows and ledger, or nothing; returns the sequence of the ledger's message.

    None: the ledger's last message is not the expected one. Raises OutcomeUnknown if the server does not answer.
    """
    messages = [*rows, Outgoing(subject, records.encode(_KIND, ledger), {})]
    fence = {
        "Nats-Expected-Stream": stream,
        "Nats-Expected-Last-Subject-Sequence": str(expected),
        "Nats-Expected-Last-Subject-Sequence-Subject": subject,
    }
    batch = secrets.token_hex(8)

    async def send(client: Client) -> Any:
        for number, message in enumerate(messages, 1):
            headers = {**message.headers, "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number == 1:
                headers |= fence
            if number == len(messages):
                headers["Nats-Batch-Commit"] = "1"
            if 1 < number < len(messages):
                await client.publish(message.subject, message.data, headers=headers)
                continue
            # The server answers the first message too: empty, or with the reason why it refuses the batch.
            answer = await client.request(message.subject, message.data, timeout=connection.timeout_s, headers=headers)
            if answer.data:
                return json.loads(answer.data)
        return {"error": {"description": "the batch was not acknowledged"}}

    import_nats()
    from nats.errors import MaxPayloadError

    try:
        answer = connection.tell(send)
    except MaxPayloadError as error:
        raise SinkError(
            "a row is larger than the NATS server accepts",
            next_step="make the rows smaller, or raise max_payload of the server",
            stream=stream,
        ) from error
    problem = answer.get("error")
    if problem is None:
        return int(answer["seq"])
    if problem.get("err_code") == _WRONG_LAST_SEQUENCE:
        return None
    kind = Refused if is_refusal(problem) else NotDone
    raise kind(f"the NATS server refuses the rows: {problem.get('description')}", stream=stream)
