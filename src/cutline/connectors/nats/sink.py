"""Rows as messages of a NATS JetStream stream, each exactly once.

Executors stage rows in a folder; when the epoch's checkpoint exists, the driver publishes them in atomic batches, each
together with the sink's ledger (see ``jetstream_ledger``). A log cannot be taken back, so the sink cannot rewind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.connectors.nats.client import Connection, Message, StreamState, check_url, read_range, stream_state
from cutline.connectors.nats.ledger import (
    MOST_IN_BATCH,
    Held,
    Ledger,
    Outgoing,
    claim_ledger,
    decode_ledger,
    epoch_key,
    ledger_subject,
    load_ledger,
    lost,
    overtaken,
    write,
)
from cutline.connectors.rows import rows_schema, storable_schema
from cutline.connectors.staged_files import check_commit, digest_of, pieces_of
from cutline.connectors.staging_folder import StagingFolder, check_message, check_same_rows, values_of
from cutline.errors import CutlineError, InvariantViolation, NotDone, SinkError
from cutline.model.ids import NO_EPOCH, Epoch

if TYPE_CHECKING:
    import os

    from cutline.ports import SinkContext, StagedBatch, Stager
    from cutline.protocol.publish.commit import CommitPermit

EPOCH_HEADER, ROW_HEADER = "Cutline-Epoch", "Cutline-Row"
#: A batch is held in memory on both sides.
_BATCH_BYTES = 4 << 20
_TARGET_KIND = "jetstream-target"


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """Which stream has a ledger of this sink: one that has lost it must not be taken for new. In the staging folder."""

    stream: str
    created: str
    subject: str


class JetStream:
    """Exactly-once messages. Several flows, and other publishers, may use the stream."""

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = False

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
        """``staging``: a folder that driver and executors share; sinks of several flows may have the same one.

        ``value``: the column (text or bytes) that is the message; None: the whole row as JSON. ``batch_messages``: most
        that are published at once, for servers that take fewer.
        """
        if batch_messages < 2:
            raise SinkError("a batch holds at least a row and the ledger", next_step="use 2 batch_messages or more")
        self.url = check_url(url)
        self.stream = stream
        self.subject = subject
        self.value = value
        self.batch_messages = batch_messages
        self._staging = StagingFolder(staging, sink="JetStream")
        self._lock = threading.Lock()
        self._context: SinkContext | None = None
        self._schema_ipc = b""
        self._held: Held | None = None
        #: The last thing that was written may be there or not: the ledger must be claimed and read first.
        self._is_doubtful = False

    def __repr__(self) -> str:
        return f"JetStream({self.url!r}, {self.stream!r}, {self.subject!r})"

    def open(self, context: SinkContext) -> None:
        """Make the stream if there is none, check that it will do, and shut out earlier starts of this flow."""
        schema = storable_schema(rows_schema(context))
        check_message(schema, self.value)
        self._schema_ipc = schema.serialize().to_pybytes()
        subject = ledger_subject(self.stream, context.flow, context.sink)
        fresh = Ledger(
            flow=context.flow, sink=context.sink, subject=self.subject, claim="", schema_ipc=self._schema_ipc
        )
        self._staging.enter(context)
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
            self._held = claim_ledger(connection, self.stream, subject, fresh, None)
            self._is_doubtful = False
        # Only now: where none was ever written, none can be lost.
        durable.replace(self._staging.file("target.json"), records.encode(_TARGET_KIND, target))
        self._context = context

    def stager(self) -> Stager:
        return self._staging.stager(self._opened().sink, self._schema_ipc)

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        self._staging.check(staged, hint="take another checkpoint; who deletes in the staging folder?")
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish what of the epoch is not there yet. An epoch without rows leaves no trace."""
        context = self._opened()
        check_commit(context, permit, staged)
        with self._lock:
            if pieces_of(staged):
                self._publish(permit, staged)
            self._staging.sweep(permit, staged)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        self._opened()
        self._staging.abort(staged)

    def published(self) -> Epoch | None:
        context = self._opened()
        with Connection(self.url) as connection:
            held = load_ledger(connection, self.stream, ledger_subject(self.stream, context.flow, context.sink))
        return None if held is None or held.ledger.epoch == NO_EPOCH else held.ledger.epoch

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        raise SinkError(
            "what is in a stream cannot be taken back",
            next_step='choose on_rollback="keep" or "fail" for this sink',
            stream=self.stream,
            epoch=epoch,
        )

    # ------------------------------------------------------------------ the stream

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", stream=self.stream)
        return self._context

    def _make_stream(self, connection: Connection) -> StreamState:
        async def make(client: Any) -> None:
            await client.jetstream(timeout=connection.timeout_s).add_stream(
                name=self.stream, subjects=[self.subject, f"_cutline.{self.stream}.>"], allow_atomic=True
            )

        connection.ask(make)
        state = stream_state(connection, self.stream)
        if state is None:
            raise NotDone("the stream was made and is not there", stream=self.stream)
        return state

    def _check_stream(self, state: StreamState, subject: str) -> None:
        problems = [
            f"its subjects do not hold {wanted}: add {add}"
            for wanted, add in ((self.subject, self.subject), (subject, f"_cutline.{self.stream}.>"))
            if not any(_covers(pattern, wanted) for pattern in state.config.get("subjects") or ())
        ]
        if not state.config.get("allow_atomic"):
            problems.append("it takes no atomic batches: set allow_atomic (NATS 2.12 or newer)")
        if state.config["retention"] != "limits":
            problems.append("it drops what was acknowledged, the sink's ledger too: its retention must be limits")
        if problems:
            raise SinkError(
                f"the stream cannot take the sink's rows: {'; '.join(problems)}",
                next_step="change the stream, or name one that does not exist yet: the sink then makes it",
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
            if _is_published(held.ledger, permit, digest):
                return
            self._staging.check(staged, hint="restore the flow to an older checkpoint")
            crashpoint("sink-commit-begun", permit.sink)
            total = sum(piece["rows"] for piece in pieces_of(staged))
            there = held.ledger.rows_there(permit.epoch, digest)
            for rows in self._batches(permit, digest, staged, there):
                there += len(rows)
                if there == total:
                    break
                held = self._write(connection, rows, held.ledger.with_part(permit.epoch, digest, there), held)
                crashpoint("sink-commit-half", permit.sink)
            else:
                rows = []  # all were there, only the end was not
            if there != total:
                raise InvariantViolation("the staged files hold other rows than they say", epoch=permit.epoch)
            self._write(connection, rows, held.ledger.with_end(permit.epoch, digest, total), held)
            crashpoint("sink-commit-done", permit.sink)

    def _certain(self, connection: Connection) -> Held:
        """The ledger as it is. After a doubtful write nothing that is still under way may land behind it."""
        held = self._held
        if held is None:
            raise InvariantViolation("the sink is used before it was opened", stream=self.stream)
        if self._is_doubtful:
            subject = ledger_subject(self.stream, held.ledger.flow, held.ledger.sink)
            held = self._held = claim_ledger(connection, self.stream, subject, held.ledger, held.ledger.claim)
            self._is_doubtful = False
        return held

    def _write(self, connection: Connection, rows: Sequence[Outgoing], ledger: Ledger, before: Held) -> Held:
        subject = ledger_subject(self.stream, ledger.flow, ledger.sink)
        try:
            sequence = write(connection, self.stream, subject, rows, ledger, expected=before.sequence)
        except CutlineError:
            self._is_doubtful = True
            raise
        if sequence is None:
            self._is_doubtful = True
            raise overtaken(ledger) if load_ledger(connection, self.stream, subject) else lost(self.stream)
        self._held = Held(ledger, sequence)
        return self._held

    def _batches(
        self, permit: CommitPermit, digest: str, staged: Sequence[StagedBatch], there: int
    ) -> Iterator[list[Outgoing]]:
        """The rows that are missing, in lots that fit into one batch together with the ledger."""
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


def _is_published(ledger: Ledger, permit: CommitPermit, digest: str) -> bool:
    if ledger.published.get(str(permit.epoch)) == digest:
        return True
    if permit.epoch <= ledger.epoch:
        raise SinkError(
            "the stream holds an epoch of this number, or a later one, with other rows: it belongs to another history",
            next_step="was the flow's storage deleted? Give the sink another name, or a new stream",
            flow=permit.flow,
            sink=permit.sink,
            epoch=permit.epoch,
        )
    return False


def _covers(pattern: str, subject: str) -> bool:
    """Whether a subject of a stream, with wildcards, takes this one."""
    wanted = subject.split(".")
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        if token == ">":
            return len(wanted) > index
        if index >= len(wanted) or token not in ("*", wanted[index]):
            return False
    return len(tokens) == len(wanted)


# ------------------------------------------------------------------------------------------------- reading


class PublishedEpoch(NamedTuple):
    """An epoch that is published as a whole."""

    epoch: Epoch
    rows: list[Message]
    #: Reading goes on after this sequence: keep it together with what was made of the rows.
    sequence: int


def read_published(url: str, stream: str, *, flow: str, sink: str, after: int = 0) -> Iterator[PublishedEpoch]:
    """The epochs that one sink has published after a sequence, in order, each whole; ends where the stream ends now."""
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
                        f"of {ends.rows} rows of the epoch only {len(rows)} are in the stream: the others were dropped",
                        next_step="read sooner, keep messages for longer, or begin after this sequence",
                        stream=stream,
                        epoch=ends.epoch,
                        sequence=message.sequence,
                    )
                held.clear()  # what else there is belongs to a try that was given up
                yield PublishedEpoch(ends.epoch, [rows[number] for number in sorted(rows)], message.sequence)
