"""Rows as messages of a Kafka topic, each exactly once for readers of finished transactions (``read_committed``).

Executors make the messages and stage them in a folder; when the epoch's checkpoint exists, the driver publishes the
whole epoch in one Kafka transaction, together with the sink's ledger (see ``kafka.ledger``). Readers see both or
neither. The transactional id is the sink's own: a process that claims the sink fences every process that had it before.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cutline.base import durable, records
from cutline.base.redaction import address_without_secrets
from cutline.config.arguments import checked
from cutline.connectors.kafka.client import HiddenEndError, administrator, ends_of
from cutline.connectors.kafka.ledger import LEDGER_TOPIC, Cut, Held, LedgerTopic, TopicLedger
from cutline.connectors.kafka.messages import (
    ROLES,
    Columns,
    Limits,
    MessageStager,
    check_columns,
    message_schema,
    messages_of,
)
from cutline.connectors.kafka.topics import MESSAGE_BYTES, Topic, check_ledger_topic, check_target, load_topic
from cutline.connectors.kafka.transactions import ProducerFencedError, Transactions
from cutline.connectors.log_sink import LogSink
from cutline.connectors.sink_base import OpenedSink, not_opened
from cutline.connectors.staged_files import digest_of, pieces_of
from cutline.connectors.staging_folder import check_same_rows
from cutline.errors import CutlineError, FencedError, FlowDefinitionError, NotDone, SinkError, StoreError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.sink_ledger import SinkLedger, fenced

if TYPE_CHECKING:
    import os

    import pyarrow as pa

    from cutline.model.staging import StagedBatch
    from cutline.ports.reading import ReadRequest, ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit

_TARGET_KIND = "kafka-target"
_ANOTHER_NAME = "give the sink another name: it then begins with the next epoch"
_LOST_FILES = "restore the flow to an older checkpoint"
#: How long an unfinished transaction of this sink itself is left alone: its process may be about to commit it.
_OWN_S = 2.0


class Kafka(LogSink):
    """Exactly-once messages for readers of finished transactions. Several flows may write to the topic."""

    @checked("sinks.Kafka")
    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        staging: str | os.PathLike[str],
        value: str | None = None,
        key: str | None = None,
        columns: Mapping[str, str] | None = None,
        ledger_topic: str = LEDGER_TOPIC,
        timeout_s: float = 60.0,
    ) -> None:
        """``staging``: a folder that driver and executors share; sinks of several flows may use the same one.

        ``value``: the column (text or bytes) that is the message, None: the whole row as JSON. ``key``: the column that
        is the message's key. ``columns``: those that are its "headers", "partition" and "timestamp". ``timeout_s``: the
        broker aborts a transaction that takes longer, and so does the sink.
        """
        super().__init__(
            OpenedSink(f"topic {topic}", topic=topic), kind="Kafka", target="a topic", staging=staging, value=value
        )
        self.servers = servers
        self.topic = topic
        self.key = key
        self.columns = dict(columns or {})
        self.ledger_topic = ledger_topic
        self.timeout_s = timeout_s
        self._message = _message_columns(value, key, self.columns)
        self._ledgers = LedgerTopic(servers, ledger_topic)
        self._target: Topic | None = None
        #: The largest batch that the ledger topic accepts.
        self._ledger_bytes = MESSAGE_BYTES
        self._producer: Transactions | None = None
        self._held: Held | None = None

    def __repr__(self) -> str:
        return f"Kafka({address_without_secrets(self.servers)!r}, {self.topic!r})"

    def open(self, context: SinkContext) -> None:
        """Check the topics and the ledger."""
        schema = self._take_schema(context)
        check_columns(schema, self._message)
        with self._lock:
            self._opened.enter(context)
            self._producer = None
            self._ledgers = self._ledgers._replace(admin=administrator(self.servers))
            self._target = self._check_topics()
            before = self._load(context)
            self._check_lost(before, self._target)
            if before is not None:
                check_same_rows(context, schema, before.ledger.schema_ipc, before.ledger.topic, self.topic)
            fresh = TopicLedger(
                flow=context.flow,
                sink=context.sink,
                topic=self.topic,
                claim="",
                schema_ipc=self._schema_ipc,
                topic_id=self._target.id,
            )
            self._held = before or Held(fresh, {})

    def stager(self) -> Stager:
        context, target = self._opened.context, self._known_target()
        files = self._staging.stager(context.sink, message_schema().serialize().to_pybytes())
        return MessageStager(
            files=files,
            schema_ipc=self._schema_ipc,
            columns=self._message,
            limits=Limits(self.topic, target.message_bytes, target.partitions, target.is_compacted),
        )

    def claimed(self) -> str:
        held = self._load(self._opened.context)
        return held.ledger.claim if held is not None else ""

    def claim(self, history: str, *, expected: str) -> None:
        """Fence earlier starts of this flow, then store the claim."""
        context = self._opened.context
        with self._lock:
            # A start that comes too late does not disturb the owner.
            self._check_expected(self._ledgers.load(context.flow, context.sink, timeout_s=None), expected)
            # First the producer: it ends the transaction of an earlier one, and only then is the ledger final.
            self._producer = self._new_producer(context)
            before = self._load(context)
            try:
                self._check_expected(before, expected)
            except FencedError:
                # The new producer has fenced the owner for a moment; the owner finds its claim unchanged and continues.
                self._producer = None
                raise
            known = before or self._known()
            claimed = known.claimed(f"{secrets.token_hex(8)} {history}", self._known_target().id)
            self._transact(claimed, since=known)
            self._opened.claim = claimed.ledger.claim
            # Only now: a ledger that was never written cannot be lost.
            durable.replace(self._staging.file("target.json"), records.encode(_TARGET_KIND, self._target_record()))

    def _check_expected(self, found: Held | None, expected: str) -> None:
        self._opened.check_expected(found.ledger.claim if found is not None else "", expected)

    def read(self, request: ReadRequest) -> ReadResult:
        """Messages of whole epochs; see ``kafka.reader``."""
        from cutline.connectors.kafka.reader import read_topic

        return read_topic(self._ledgers, self.topic, request, timeout_s=1.5 * self.timeout_s)

    def _newest(self) -> Epoch:
        held = self._load(self._opened.context)
        return NO_EPOCH if held is None else held.ledger.epoch

    def _known(self) -> Held:
        if self._held is None:
            raise not_opened(topic=self.topic)
        return self._held

    def _known_target(self) -> Topic:
        if self._target is None:
            raise not_opened(topic=self.topic)
        return self._target

    # ------------------------------------------------------------------ topics and ledger

    def _check_topics(self) -> Topic:
        ledger = load_topic(self.servers, self.ledger_topic, self._ledgers.admin)
        self._ledger_bytes = check_ledger_topic(ledger, self.ledger_topic, servers=self.servers).batch_bytes
        return check_target(
            load_topic(self.servers, self.topic, self._ledgers.admin),
            self.topic,
            servers=self.servers,
            has_key=self.key is not None,
            has_timestamp=self._message.timestamp is not None,
        )

    def _load(self, context: SinkContext) -> Held | None:
        """The ledger, once no unfinished transaction hides a part of it."""
        # Brokers check for expired transactions only periodically.
        limit_s = 1.5 * self.timeout_s
        try:
            return self._visible(context, min(_OWN_S, limit_s))
        except HiddenEndError as error:
            is_own = error.where.get("written_by") == f"{context.flow}/{context.sink}"
        if is_own and not self._opened.claim:
            # A process of this sink died, or froze, while it committed: no need to wait for the broker.
            self._new_producer(context)
        return self._visible(context, limit_s)

    def _visible(self, context: SinkContext, timeout_s: float) -> Held | None:
        try:
            return self._ledgers.load(context.flow, context.sink, timeout_s=timeout_s)
        except HiddenEndError as error:
            if error.message is not None and error.message.key:
                owner = error.message.key.partition(b"@")[0]
                error.add_where(written_by=owner.decode(errors="replace"))
            raise

    def _target_record(self) -> dict[str, str]:
        return {"topic": self.topic, "ledger_topic": self.ledger_topic}

    def _check_lost(self, before: Held | None, target: Topic) -> None:
        """A ledger topic that has lost this sink's ledger must not count as a new one, nor a topic made again."""
        path = self._staging.file("target.json")
        if path.exists() and (before is None or records.load(_TARGET_KIND, path, dict) != self._target_record()):
            raise SinkError(
                "the ledger of the sink is gone, or the staging folder belongs to another topic: "
                "the last published epoch is unknown",
                next_step="give the sink a new staging folder if the last epoch may be published twice",
                topic=self.topic,
                path=path,
            )
        known = before.ledger.topic_id if before is not None and before.ledger.epoch else ""
        if known and target.id and known != target.id:
            raise SinkError(
                f"the topic was deleted and created again: the rows of all epochs up to "
                f"{before.ledger.epoch if before is not None else 0} are gone",
                next_step=_ANOTHER_NAME,
                topic=self.topic,
                servers=self.servers,
            )
        newest = max(before.cuts.items())[1] if before is not None and before.cuts else None
        if newest is not None and (lost := newest.lost_in(ends_of(self._ledgers.admin, self.servers, self.topic))):
            raise SinkError(
                f"the brokers have lost acknowledged messages of epoch {newest.epoch} or earlier: {lost}",
                next_step=_ANOTHER_NAME,
                topic=self.topic,
                servers=self.servers,
            )

    # ------------------------------------------------------------------ transactions

    def _new_producer(self, context: SinkContext) -> Transactions:
        limits = (self._known_target().batch_bytes, self._ledger_bytes)
        return Transactions(
            self.servers,
            f"cutline/{context.flow}/{context.sink}",
            topic=self.topic,
            ledger_topic=self.ledger_topic,
            timeout_s=self.timeout_s,
            batch_bytes=min(limits),
            message_bytes=max(limits),
        )

    def _certain(self, context: SinkContext) -> Held:
        """The ledger as it is; after a failure a new producer first commits or aborts the open transaction."""
        if self._producer is None:
            self._check_visible_claim(context)
            self._producer = self._new_producer(context)
            found, mine = self._load(context), self._known()
            if (found.ledger.claim if found is not None else "") != mine.ledger.claim:
                # The new producer has fenced the owner for a moment; the owner finds its claim unchanged and continues.
                self._producer = None
                raise fenced(SinkLedger(flow=context.flow, sink=context.sink), topic=self.topic)
            self._held = found or mine
        return self._known()

    def _check_visible_claim(self, context: SinkContext) -> None:
        """Raise FencedError if another start has claimed the sink: it is not to be disturbed by a new producer."""
        found = self._ledgers.load(context.flow, context.sink, timeout_s=None)
        if found is not None and found.ledger.claim != self._known().ledger.claim:
            raise fenced(SinkLedger(flow=context.flow, sink=context.sink), topic=self.topic)

    def _publish(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        """The whole epoch in one transaction."""
        try:
            self._publish_once(permit, staged)
        except ProducerFencedError:
            # A start that did not succeed, or an administrator, has fenced this producer; the claim is still the same.
            self._publish_once(permit, staged)

    def _publish_once(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        digest = digest_of(pieces_of(staged))
        held = self._certain(self._opened.context)
        if not self._opened.is_to_publish(held.sink_ledger(), permit, digest):
            return
        try:
            self._staging.check(staged, hint=_LOST_FILES)
            self._opened.reach("sink-commit-begun")
            self._transact(held, staged=staged, epoch=permit.epoch, digest=digest)
        except (ProducerFencedError, SinkError, FileNotFoundError) as error:
            # A process that has taken the sink over has published the epoch, and deleted its files.
            with contextlib.suppress(StoreError):
                self._check_visible_claim(self._opened.context)
            if isinstance(error, FileNotFoundError):
                self._staging.check(staged, hint=_LOST_FILES)
            raise
        self._opened.reach("sink-commit-done")

    def _transact(
        self,
        held: Held,
        *,
        since: Held | None = None,
        staged: Sequence[StagedBatch] = (),
        epoch: Epoch = NO_EPOCH,
        digest: str = "",
    ) -> None:
        """All rows and the ledger, or nothing. After any failure the producer is not reused: see ``_certain``.

        ``since``: what the ledger topic says, if ``held`` is to replace it; otherwise the epoch is added to ``held``.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            raise not_opened(topic=self.topic)
        before, after = since or held, held
        try:
            producer.begin()
            if staged:
                producer.send_rows(self._messages(staged))
                producer.flush()
                self._opened.reach("sink-commit-half")
                after = held.with_cut(self._cut(epoch, digest, staged, producer))
            producer.send_ledger(after.messages_after(before))
            producer.commit()
        except CutlineError as error:
            error.add_where(epoch=epoch or None)
            raise
        self._held = after
        self._producer = producer

    def _messages(self, staged: Sequence[StagedBatch]) -> Iterator[pa.RecordBatch]:
        schema = message_schema()
        for batch in self._staging.rows(staged):
            # Earlier versions staged rows.
            yield batch if batch.schema.names == schema.names else messages_of(batch, self._message)

    def _cut(self, epoch: Epoch, digest: str, staged: Sequence[StagedBatch], producer: Transactions) -> Cut:
        """Where every partition ends now that all rows of the epoch are in the topic."""
        try:
            ends = ends_of(self._ledgers.admin, self.servers, self.topic)
            if not ends:
                # Without ends, readers of whole epochs would take the epoch for an empty one.
                raise NotDone("the topic is gone, so nothing is published", topic=self.topic, servers=self.servers)
        except CutlineError:
            producer.abort()
            raise
        return Cut(
            epoch=epoch,
            digest=digest,
            rows=sum(batch.rows for batch in staged),
            topic_id=self._known_target().id,
            ends={str(number): end for number, end in ends.items()},
        )


def _message_columns(value: str | None, key: str | None, columns: Mapping[str, str]) -> Columns:
    unknown = sorted(set(columns) - set(ROLES))
    if unknown:
        raise FlowDefinitionError(
            f"sinks.Kafka: columns={unknown} is not known", next_step=f"name columns for: {', '.join(ROLES)}"
        )
    return Columns(value=value, key=key, **columns)
