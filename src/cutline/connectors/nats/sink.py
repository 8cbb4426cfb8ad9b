"""Rows as messages of a NATS JetStream stream, each exactly once.

Executors stage rows in a folder; when the epoch's checkpoint exists, the driver publishes them in atomic batches, each
together with the sink's ledger (see ``nats.ledger``).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import durable, records
from cutline.config.arguments import checked
from cutline.connectors.log_sink import LogSink
from cutline.connectors.nats.client import Connection, StreamState, check_url, stream_state
from cutline.connectors.nats.ledger import (
    EPOCH_HEADER,
    MOST_IN_BATCH,
    ROW_HEADER,
    Held,
    Outgoing,
    StreamLedger,
    claim_again,
    claim_ledger,
    epoch_key,
    ledger_subject,
    load_ledger,
    lost,
    write,
)
from cutline.connectors.sink_base import OpenedSink, not_opened
from cutline.connectors.staged_files import digest_of, pieces_of
from cutline.connectors.staging_folder import check_same_rows, values_of
from cutline.errors import CutlineError, InvariantViolation, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.sink_ledger import fenced

if TYPE_CHECKING:
    import os

    from cutline.model.staging import StagedBatch
    from cutline.ports.sinks import SinkContext
    from cutline.protocol.publish.commit import CommitPermit

#: A batch is held in memory on both sides.
_BATCH_BYTES = 4 << 20
_TARGET_KIND = "jetstream-target"


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """The stream with this sink's ledger, stored in the staging folder: a stream that lost it must not count as new."""

    stream: str
    created: str
    subject: str


class JetStream(LogSink):
    """Exactly-once messages. Several flows, and other publishers, may use the stream."""

    @checked("sinks.JetStream")
    def __init__(
        self,
        url: str,
        stream: str,
        subject: str,
        *,
        staging: str | os.PathLike[str],
        value: str | None = None,
        batch_messages: int = MOST_IN_BATCH,
    ) -> None:
        """``staging``: a folder that driver and executors share; sinks of several flows may use the same one.

        ``value``: the column (text or bytes) that is the message; None: the whole row as JSON. ``batch_messages``: most
        messages per batch, for servers that accept fewer.
        """
        if batch_messages < 2:
            raise SinkError("a batch holds at least a row and the ledger", next_step="use 2 batch_messages or more")
        super().__init__(
            OpenedSink(f"stream {stream}", stream=stream),
            kind="JetStream",
            target="a stream",
            staging=staging,
            value=value,
        )
        self.url = check_url(url)
        self.stream = stream
        self.subject = subject
        self.batch_messages = batch_messages
        self._held: Held | None = None
        self._target: _Target | None = None
        #: Whether the outcome of the last write is unknown: the ledger must be claimed and read first.
        self._is_uncertain = False

    def __repr__(self) -> str:
        return f"JetStream({self.url!r}, {self.stream!r}, {self.subject!r})"

    def open(self, context: SinkContext) -> None:
        """Create the stream if there is none, and check it."""
        schema = self._take_schema(context)
        subject = ledger_subject(self.stream, context.flow, context.sink)
        fresh = StreamLedger(
            flow=context.flow, sink=context.sink, subject=self.subject, claim="", schema_ipc=self._schema_ipc
        )
        with self._lock, Connection(self.url) as connection:
            state = stream_state(connection, self.stream)
            if state is None:
                state = self._make_stream(connection)
            self._check_stream(state, subject)
            before = load_ledger(connection, self.stream, subject)
            target = _Target(stream=self.stream, created=state.created, subject=subject)
            self._check_target(target, before)
            if before is not None:
                check_same_rows(context, schema, before.ledger.schema_ipc, before.ledger.subject, self.subject)
            self._held = before if before is not None else Held(fresh, 0)
            self._is_uncertain = False
        self._opened.enter(context)
        self._target = target

    def claimed(self) -> str:
        with Connection(self.url) as connection:
            held = load_ledger(connection, self.stream, self._ledger_subject())
        return held.ledger.claim if held is not None else ""

    def claim(self, history: str, *, expected: str) -> None:
        """Fence earlier starts of this flow: they must know the newest message of the ledger to write one."""
        claim = f"{secrets.token_hex(8)} {history}"
        with self._lock, Connection(self.url) as connection:
            held = self._known()
            self._held = claim_ledger(
                connection,
                self.stream,
                self._ledger_subject(),
                held.ledger,
                claim,
                check=lambda found: self._opened.check_expected(found, expected),
            )
            self._is_uncertain = False
            self._opened.claim = claim
        # Only now: a ledger that was never written cannot be lost.
        durable.replace(self._staging.file("target.json"), records.encode(_TARGET_KIND, self._target))

    def _ledger_subject(self) -> str:
        context = self._opened.context
        return ledger_subject(self.stream, context.flow, context.sink)

    def _known(self) -> Held:
        if self._held is None:
            raise not_opened(stream=self.stream)
        return self._held

    def _newest(self) -> Epoch:
        with Connection(self.url) as connection:
            held = load_ledger(connection, self.stream, self._ledger_subject())
        return NO_EPOCH if held is None else held.ledger.epoch

    # ------------------------------------------------------------------ the stream

    def _make_stream(self, connection: Connection) -> StreamState:
        async def make(client: Any) -> None:
            await client.jetstream(timeout=connection.timeout_s).add_stream(
                name=self.stream, subjects=[self.subject, f"_cutline.{self.stream}.>"], allow_atomic=True
            )

        connection.ask(make)
        state = stream_state(connection, self.stream)
        if state is None:
            raise NotDone("the stream was created and does not exist", stream=self.stream)
        return state

    def _check_stream(self, state: StreamState, subject: str) -> None:
        problems = [
            f"its subjects do not include {wanted}: add {add}"
            for wanted, add in ((self.subject, self.subject), (subject, f"_cutline.{self.stream}.>"))
            if not any(_covers(pattern, wanted) for pattern in state.config.get("subjects") or ())
        ]
        if not state.config.get("allow_atomic"):
            problems.append("it accepts no atomic batches: set allow_atomic (NATS 2.12 or newer)")
        if state.config["retention"] != "limits":
            problems.append("it drops acknowledged messages, including the sink's ledger: its retention must be limits")
        if problems:
            raise SinkError(
                f"the stream cannot take the sink's rows: {'; '.join(problems)}",
                next_step="change the stream, or name one that does not exist yet: the sink then creates it",
                stream=self.stream,
            )

    def _check_target(self, wanted: _Target, before: Held | None) -> None:
        path = self._staging.file("target.json")
        if path.exists() and (before is None or records.load(_TARGET_KIND, path, _Target) != wanted):
            raise lost(self.stream)

    # ------------------------------------------------------------------ publishing

    def _publish(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        digest = digest_of(pieces_of(staged))
        with Connection(self.url) as connection:
            held = self._certain(connection)
            if not self._opened.is_to_publish(held.ledger.sink_ledger(), permit, digest):
                return
            self._staging.check(staged, hint="restore the flow to an older checkpoint")
            self._opened.reach("sink-commit-begun")
            total = sum(piece["rows"] for piece in pieces_of(staged))
            there = held.ledger.rows_there(permit.epoch, digest)
            for rows in self._batches(permit, digest, staged, there):
                there += len(rows)
                if there == total:
                    break
                held = self._write(connection, rows, held.ledger.with_part(permit.epoch, digest, there), held)
                self._opened.reach("sink-commit-half")
            else:
                rows = []  # all rows are there, only the end is missing
            if there != total:
                raise InvariantViolation("the staged files hold fewer or more rows than recorded", epoch=permit.epoch)
            self._write(connection, rows, held.ledger.with_end(permit.epoch, digest, total), held)
            self._opened.reach("sink-commit-done")

    def _certain(self, connection: Connection) -> Held:
        """The ledger as it is. After a write with unknown outcome, a new claim keeps that write from landing later."""
        held = self._known()
        if self._is_uncertain:
            held = self._held = claim_again(connection, self.stream, self._ledger_subject(), held.ledger)
            self._is_uncertain = False
        return held

    def _write(self, connection: Connection, rows: Sequence[Outgoing], ledger: StreamLedger, before: Held) -> Held:
        subject = ledger_subject(self.stream, ledger.flow, ledger.sink)
        try:
            sequence = write(connection, self.stream, subject, rows, ledger, expected=before.sequence)
        except CutlineError:
            self._is_uncertain = True
            raise
        if sequence is None:
            self._is_uncertain = True
            raise fenced(ledger.sink_ledger()) if load_ledger(connection, self.stream, subject) else lost(self.stream)
        self._held = Held(ledger, sequence)
        return self._held

    def _batches(
        self, permit: CommitPermit, digest: str, staged: Sequence[StagedBatch], there: int
    ) -> Iterator[list[Outgoing]]:
        """The missing rows, in lots that fit into one batch together with the ledger."""
        key = epoch_key(permit.flow, permit.sink, permit.epoch, digest)
        lot: list[Outgoing] = []
        size_bytes = 0
        for batch in self._staging.rows(staged, skip=there):
            for message in values_of(batch, self.value):
                value = message or b""  # a stream has no null
                if lot and (len(lot) == self.batch_messages - 1 or size_bytes + len(value) > _BATCH_BYTES):
                    yield lot
                    lot, size_bytes = [], 0
                # The id is for the server's own window of duplicates; the ledger does not need it.
                headers = {EPOCH_HEADER: key, ROW_HEADER: str(there), "Nats-Msg-Id": f"{key}/{there}"}
                lot.append(Outgoing(self.subject, value, headers))
                there += 1
                size_bytes += len(value)
        if lot:
            yield lot


def _covers(pattern: str, subject: str) -> bool:
    """Whether a stream's subject pattern matches this subject."""
    wanted = subject.split(".")
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        if token == ">":
            return len(wanted) > index
        if index >= len(wanted) or token not in ("*", wanted[index]):
            return False
    return len(tokens) == len(wanted)
