"""Rows as messages of a Kafka topic, each exactly once for readers of finished transactions (``read_committed``).

Executors stage rows in a folder; when the epoch's checkpoint exists, the driver publishes the whole epoch in one Kafka
transaction, together with the sink's ledger, a message in a compacted topic. Readers see both or neither.
The transactional id is the sink's own: a process that opens the sink fences every process that had opened it before.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import durable, records
from cutline.base.redaction import address_without_secrets
from cutline.base.retry import Retry
from cutline.config.arguments import checked
from cutline.connectors.kafka.client import (
    Record,
    client_config,
    consumer,
    failure_kind,
    finished_bounds,
    import_kafka,
    partitions_of,
    read_range,
)
from cutline.connectors.log_sink import LogSink, ledger_of, with_published
from cutline.connectors.sink_base import OpenedSink, not_opened
from cutline.connectors.staged_files import digest_of, pieces_of
from cutline.connectors.staging_folder import check_same_rows, check_value_column, values_of
from cutline.errors import FencedError, OutcomeUnknown, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.model.validation import Problem, of_numbers
from cutline.protocol.publish.sink_ledger import SinkLedger, fenced

if TYPE_CHECKING:
    import os

    from cutline.model.staging import StagedBatch
    from cutline.ports.sinks import SinkContext
    from cutline.protocol.publish.commit import CommitPermit

LEDGER_TOPIC = "cutline-ledger"
_LEDGER_KIND, _TARGET_KIND = "kafka-ledger", "kafka-target"
#: Attempts of a commit, as long as the broker says that it may be retried.
_COMMITS = Retry(limit=3)


class TopicLedger(msgspec.Struct, frozen=True, kw_only=True):
    """What the sink has published; the newest message of its key counts."""

    flow: FlowName
    sink: SinkId
    topic: str
    #: The current writer; random for each start of the sink.
    claim: str
    schema_ipc: bytes
    epoch: Epoch = NO_EPOCH
    #: The newest published epochs and their digests.
    published: dict[str, str] = {}

    def problems(self) -> Iterator[Problem]:
        """Epochs that are no numbers."""
        yield from of_numbers("published", self.published)

    def with_epoch(self, epoch: Epoch, digest: str) -> TopicLedger:
        return msgspec.structs.replace(self, epoch=epoch, published=with_published(self.published, epoch, digest))

    def sink_ledger(self) -> SinkLedger:
        return ledger_of(self.flow, self.sink, claim=self.claim, published=self.published, newest=self.epoch)


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
        ledger_topic: str = LEDGER_TOPIC,
        timeout_s: float = 60.0,
    ) -> None:
        """``staging``: a folder that driver and executors share; sinks of several flows may use the same one.

        ``value``: the column (text or bytes) that is the message, None: the whole row as JSON. ``key``: the column that
        is the message's key. ``timeout_s``: the broker aborts a transaction that takes longer, and so does the sink.
        """
        super().__init__(
            OpenedSink(f"topic {topic}", topic=topic), kind="Kafka", target="a topic", staging=staging, value=value
        )
        self.servers = servers
        self.topic = topic
        self.key = key
        self.ledger_topic = ledger_topic
        self.timeout_s = timeout_s
        self._producer: Any = None
        self._ledger: TopicLedger | None = None

    def __repr__(self) -> str:
        return f"Kafka({address_without_secrets(self.servers)!r}, {self.topic!r})"

    def open(self, context: SinkContext) -> None:
        """Check the topics and the ledger."""
        schema = self._take_schema(context)
        check_value_column(schema, self.key, role="key")
        with self._lock:
            self._opened.enter(context)
            self._check_topics()
            before = self._load_ledger(context)
            self._check_target(before)
            if before is not None:
                check_same_rows(context, schema, before.schema_ipc, before.topic, self.topic)
            fresh = TopicLedger(
                flow=context.flow, sink=context.sink, topic=self.topic, claim="", schema_ipc=self._schema_ipc
            )
            self._ledger, self._producer = before or fresh, None

    def claimed(self) -> str:
        ledger = self._load_ledger(self._opened.context)
        return ledger.claim if ledger is not None else ""

    def claim(self, history: str, *, expected: str) -> None:
        """Fence earlier starts of this flow, then store the claim."""
        context = self._opened.context
        with self._lock:
            if self._ledger is None:
                raise not_opened(topic=self.topic)
            # First the producer: it ends the transaction of an earlier one, and only then is the ledger final.
            self._producer = self._new_producer(context)
            before = self._load_ledger(context)
            try:
                self._opened.check_expected(before.claim if before is not None else "", expected)
            except FencedError:
                # The new producer has fenced the owner for a moment; the owner finds its claim unchanged and continues.
                self._producer = None
                raise
            claimed = msgspec.structs.replace(before or self._ledger, claim=f"{secrets.token_hex(8)} {history}")
            self._transact([], claimed)
            self._ledger = claimed
            self._opened.claim = claimed.claim
            # Only now: a ledger that was never written cannot be lost.
            durable.replace(self._staging.file("target.json"), records.encode(_TARGET_KIND, self._target()))

    def _newest(self) -> Epoch:
        ledger = self._load_ledger(self._opened.context)
        return NO_EPOCH if ledger is None else ledger.epoch

    # ------------------------------------------------------------------ topics and ledger

    def _check_topics(self) -> None:
        with consumer(self.servers) as client:
            topics = (self.topic, self.ledger_topic)
            missing = [one for one in topics if partitions_of(client, self.servers, one) is None]
        if missing:
            raise SinkError(
                f"there is no topic {missing[0]}",
                next_step=f"create it; {self.ledger_topic} with one partition and cleanup.policy=compact",
                servers=self.servers,
            )

    def _load_ledger(self, context: SinkContext) -> TopicLedger | None:
        key = f"{context.flow}/{context.sink}".encode()
        found: list[tuple[Epoch, int, TopicLedger]] = []
        with consumer(self.servers) as client:
            for partition in partitions_of(client, self.servers, self.ledger_topic) or ():
                newest: Record | None = None
                # Brokers check for expired transactions only periodically.
                limit_s = 1.5 * self.timeout_s
                bounds = finished_bounds(client, self.servers, self.ledger_topic, partition, timeout_s=limit_s)
                for page in read_range(client, self.servers, self.ledger_topic, partition, bounds):
                    newest = next((one for one in reversed(page) if one.key == key), newest)
                if newest is not None:
                    ledger = records.decode(_LEDGER_KIND, newest.value or b"", TopicLedger, path=self.ledger_topic)
                    found.append((ledger.epoch, newest.timestamp_ms, ledger))
        # All messages of one key are in one partition, unless partitions were added since.
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _target(self) -> dict[str, str]:
        return {"topic": self.topic, "ledger_topic": self.ledger_topic}

    def _check_target(self, before: TopicLedger | None) -> None:
        """A ledger topic that has lost this sink's ledger must not count as a new one."""
        path = self._staging.file("target.json")
        if path.exists() and (before is None or records.load(_TARGET_KIND, path, dict) != self._target()):
            raise SinkError(
                "the ledger of the sink is gone, or the staging folder belongs to another topic: "
                "the last published epoch is unknown",
                next_step="give the sink a new staging folder if the last epoch may be published twice",
                topic=self.topic,
                path=path,
            )

    # ------------------------------------------------------------------ transactions

    def _new_producer(self, context: SinkContext) -> Any:
        kafka = import_kafka()
        producer = kafka.Producer(
            client_config(self.servers)
            | {
                "transactional.id": f"cutline/{context.flow}/{context.sink}",
                "transaction.timeout.ms": round(self.timeout_s * 1_000),
                "enable.idempotence": True,
                "acks": "all",
            }
        )
        try:
            producer.init_transactions(self.timeout_s)
        except kafka.KafkaException as error:
            raise failure_kind(error)(f"no transaction can begin: {error}", servers=self.servers) from error
        return producer

    def _certain(self, context: SinkContext) -> TopicLedger:
        """The ledger as it is; after a failure a new producer first commits or aborts the open transaction."""
        if self._producer is None:
            self._producer = self._new_producer(context)
            found, mine = self._load_ledger(context), self._ledger
            if mine is None or (found.claim if found is not None else "") != mine.claim:
                # The new producer has fenced the owner for a moment; the owner finds its claim unchanged and continues.
                self._producer = None
                raise fenced(SinkLedger(flow=context.flow, sink=context.sink), topic=self.topic)
            self._ledger = found or mine
        if self._ledger is None:
            raise not_opened(topic=self.topic)
        return self._ledger

    def _publish(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        """The whole epoch in one transaction."""
        digest = digest_of(pieces_of(staged))
        ledger = self._certain(self._opened.context)
        if not self._opened.is_to_publish(ledger.sink_ledger(), permit, digest):
            return
        self._staging.check(staged, hint="restore the flow to an older checkpoint")
        self._opened.reach("sink-commit-begun")
        after = ledger.with_epoch(permit.epoch, digest)
        self._transact(staged, after)
        self._ledger = after
        self._opened.reach("sink-commit-done")

    def _transact(self, staged: Sequence[StagedBatch], ledger: TopicLedger) -> None:
        """All rows and the ledger, or nothing. After any failure the producer is not reused: see ``_certain``."""
        kafka = import_kafka()
        producer, self._producer = self._producer, None
        is_committing = False
        try:
            producer.begin_transaction()
            for batch in self._staging.rows(staged):
                keys = values_of(batch, self.key) if self.key is not None else [None] * batch.num_rows
                for key, value in zip(keys, values_of(batch, self.value), strict=True):
                    self._produce(producer, self.topic, key, value)
            if staged:
                self._opened.reach("sink-commit-half")
            key = f"{ledger.flow}/{ledger.sink}".encode()
            self._produce(producer, self.ledger_topic, key, records.encode(_LEDGER_KIND, ledger))
            is_committing = True
            self._end(producer)
        except kafka.KafkaException as error:
            if not is_committing:
                with contextlib.suppress(kafka.KafkaException):
                    producer.abort_transaction(self.timeout_s)
                raise failure_kind(error)(f"the transaction was aborted: {error}", topic=self.topic) from error
            raise OutcomeUnknown(f"the transaction may have been committed: {error}", topic=self.topic) from error
        self._producer = producer

    def _end(self, producer: Any) -> None:
        """Retries the commit as long as the broker says that it may be retried."""
        _COMMITS.call(
            lambda: producer.commit_transaction(self.timeout_s),
            on=import_kafka().KafkaException,
            is_final=lambda error: not error.args[0].retriable(),
        )

    def _produce(self, producer: Any, topic: str, key: bytes | None, value: bytes | None) -> None:
        while True:
            try:
                producer.produce(topic, value=value, key=key)
            except BufferError:
                producer.poll(0.1)  # the queue is full: send some of it
                continue
            producer.poll(0)
            return
