"""The ledger of a JetStream sink: messages in the stream itself that say what of the sink's rows is there.

Rows and ledger are written in *atomic batches* (NATS 2.12): the server stores all messages of a batch or none. Each
batch ends with the ledger as it is after it, and is accepted only if the ledger's last message is the one that the
writer knows. So the ledger always tells exactly how many rows of which epoch are there, whoever died when; and whoever
has written a *claim* into it shuts out everybody who wrote before.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cutline.base import records
from cutline.connectors.nats.client import Connection, import_nats
from cutline.errors import FencedError, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId

if TYPE_CHECKING:
    from nats.aio.client import Client

_KIND = "jetstream-ledger"
#: So many published epochs can be told from others of the same number.
_REMEMBERED = 100
#: Most messages that a server takes as one batch, unless it is told otherwise.
MOST_IN_BATCH = 1_000
_WRONG_LAST_SEQUENCE = 10_071
_RACES = 5


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch of which a part is in the stream."""

    epoch: Epoch
    digest: str
    rows: int


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of the stream when this message is its newest of the ledger's subject."""

    flow: FlowName
    sink: SinkId
    subject: str
    #: Who writes now; random for each start of the sink.
    claim: str
    #: The Arrow schema of the rows.
    schema_ipc: bytes
    #: The newest published epoch, and the newest ones with their digests.
    epoch: Epoch = NO_EPOCH
    published: dict[str, str] = {}
    begun: Begun | None = None
    #: Of a message that ends an epoch: this one.
    ends: Begun | None = None

    def claimed(self, claim: str) -> Ledger:
        return msgspec.structs.replace(self, claim=claim, ends=None)

    def with_part(self, epoch: Epoch, digest: str, rows: int) -> Ledger:
        return msgspec.structs.replace(self, begun=Begun(epoch=epoch, digest=digest, rows=rows), ends=None)

    def with_end(self, epoch: Epoch, digest: str, rows: int) -> Ledger:
        kept = list(self.published.items())[-_REMEMBERED + 1 :]
        ends = Begun(epoch=epoch, digest=digest, rows=rows)
        return msgspec.structs.replace(
            self, epoch=epoch, published=dict([*kept, (str(epoch), digest)]), begun=None, ends=ends
        )

    def rows_there(self, epoch: Epoch, digest: str) -> int:
        """How many of the epoch's rows are in the stream, from the first on."""
        begun = self.begun
        return begun.rows if begun is not None and (begun.epoch, begun.digest) == (epoch, digest) else 0


class Held(NamedTuple):
    """A ledger, and the sequence of its message."""

    ledger: Ledger
    sequence: int


class Outgoing(NamedTuple):
    """One message of a batch."""

    subject: str
    data: bytes
    headers: dict[str, str]


def ledger_subject(stream: str, flow: str, sink: str) -> str:
    return f"_cutline.{stream}.{flow}.{sink}"


def epoch_key(flow: str, sink: str, epoch: Epoch, digest: str) -> str:
    """Stands in the header of every row."""
    return f"{flow}/{sink}/{epoch}/{digest[:16]}"


def decode_ledger(data: bytes, subject: str) -> Ledger:
    return records.decode(_KIND, data, Ledger, path=subject)


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


def claim_ledger(connection: Connection, stream: str, subject: str, fresh: Ledger, mine: str | None) -> Held:
    """Shut out whoever wrote before, and return the ledger as it is from now on.

    ``mine``: a claim that must not have been overtaken by somebody else's since, and is made again: its writer may not
    have heard of it. None: this is a new start.
    """
    claim = mine or secrets.token_hex(8)
    for _ in range(_RACES):
        held = load_ledger(connection, stream, subject)
        if mine is not None and (held is None or held.ledger.claim != mine):
            raise overtaken(fresh) if held is not None else lost(stream)
        claimed = (held.ledger if held is not None else fresh).claimed(claim)
        expected = held.sequence if held is not None else 0
        sequence = write(connection, stream, subject, (), claimed, expected=expected)
        if sequence is not None:
            return Held(claimed, sequence)
    raise NotDone("other processes write to the sink's ledger all the time", stream=stream, subject=subject)


def overtaken(ledger: Ledger) -> FencedError:
    return FencedError("a newer start of this flow writes to the stream now", flow=ledger.flow, sink=ledger.sink)


def lost(stream: str) -> SinkError:
    return SinkError(
        "the stream has lost the sink's ledger, or is not the one that the staging folder belongs to: "
        "what was published last is not known any more",
        next_step="give the sink a new staging folder if the last epoch may be published twice",
        stream=stream,
    )


def write(
    connection: Connection, stream: str, subject: str, rows: Sequence[Outgoing], ledger: Ledger, *, expected: int
) -> int | None:
    """Store rows and ledger, or nothing; the sequence of the ledger's message.

    None: the ledger's last message is not the expected one. Raises OutcomeUnknown if the server has not answered.
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
            # The first is answered too: with nothing, or with why there can be no batch.
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
            "a row is larger than the NATS server takes",
            next_step="make the rows smaller, or raise max_payload of the server",
            stream=stream,
        ) from error
    problem = answer.get("error")
    if problem is None:
        return int(answer["seq"])
    if problem.get("err_code") == _WRONG_LAST_SEQUENCE:
        return None
    raise NotDone(f"the NATS server refuses the rows: {problem.get('description')}", stream=stream)
