"""Rows as messages of a Kafka topic, each exactly once for readers of finished transactions (``read_committed``).

Executors stage rows in a folder; when the epoch's checkpoint exists, the driver publishes the whole epoch in one Kafka
transaction, together with the sink's ledger, which is a message in a compacted topic. Either both are there or neither.
The transactional id is the sink's own: whoever opens the sink later shuts out whoever had it open before.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.connectors.kafka.client import (
    Record,
    client_config,
    consumer,
    finished_bounds,
    import_kafka,
    partitions_of,
    read_range,
)
from cutline.connectors.rows import rows_schema, storable_schema
from cutline.connectors.staged_files import check_commit, digest_of, pieces_of
from cutline.connectors.staging_folder import (
    StagingFolder,
    check_message,
    check_same_rows,
    check_value_column,
    values_of,
)
from cutline.errors import FencedError, InvariantViolation, NotDone, OutcomeUnknown, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId

if TYPE_CHECKING:
    import os

    from cutline.ports import SinkContext, StagedBatch, Stager
    from cutline.protocol.publish.commit import CommitPermit

LEDGER_TOPIC = "cutline-ledger"
_LEDGER_KIND, _TARGET_KIND = "kafka-ledger", "kafka-target"
#: So many published epochs can be told from others of the same number.
_REMEMBERED = 100
_TRIES = 3


class KafkaLedger(msgspec.Struct, frozen=True, kw_only=True):
    """What the sink has published; the newest message of its key counts."""

    flow: FlowName
    sink: SinkId
    topic: str
    #: Who writes now; random for each start of the sink.
    claim: str
    schema_ipc: bytes
    epoch: Epoch = NO_EPOCH
    #: The newest published epochs, and what identifies them.
    published: dict[str, str] = {}

    def with_epoch(self, epoch: Epoch, digest: str) -> KafkaLedger:
        kept = list(self.published.items())[-_REMEMBERED + 1 :]
        return msgspec.structs.replace(self, epoch=epoch, published=dict([*kept, (str(epoch), digest)]))


class Kafka:
    """Exactly-once messages for readers of finished transactions. Several flows may write to the topic."""

    output_modes: frozenset[str] = frozenset({"append", "update"})
    can_rewind: bool = False

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
        """``staging``: a folder that driver and executors share; sinks of several flows may have the same one.

        ``value``: the column (text or bytes) that is the message, None: the whole row as JSON. ``key``: the column that
        is the message's key. ``timeout_s``: the broker aborts a transaction that takes longer, and so does the sink.
        """
        self.servers = servers
        self.topic = topic
        self.value = value
        self.key = key
        self.ledger_topic = ledger_topic
        self.timeout_s = timeout_s
        self._staging = StagingFolder(staging, sink="Kafka")
        self._lock = threading.Lock()
        self._context: SinkContext | None = None
        self._schema_ipc = b""
        self._producer: Any = None
        self._ledger: KafkaLedger | None = None

    def __repr__(self) -> str:
        return f"Kafka({self.servers!r}, {self.topic!r})"

    def open(self, context: SinkContext) -> None:
        """Check the topics, shut out earlier starts of this flow, and claim the ledger."""
        schema = storable_schema(rows_schema(context))
        check_message(schema, self.value)
        check_value_column(schema, self.key, role="key")
        self._schema_ipc = schema.serialize().to_pybytes()
        self._staging.enter(context)
        with self._lock:
            self._context = context
            self._check_topics()
            # First the producer: it ends what an earlier one has begun, and the ledger is final only then.
            self._producer = self._new_producer(context)
            before = self._load_ledger(context)
            self._check_target(before)
            if before is not None:
                check_same_rows(context, schema, before.schema_ipc, before.topic, self.topic)
            fresh = KafkaLedger(
                flow=context.flow, sink=context.sink, topic=self.topic, claim="", schema_ipc=self._schema_ipc
            )
            claimed = msgspec.structs.replace(before or fresh, claim=secrets.token_hex(8))
            self._transact([], claimed)
            self._ledger = claimed
            # Only now: where none was ever written, none can be lost.
            durable.replace(self._staging.file("target.json"), records.encode(_TARGET_KIND, self._target()))

    def stager(self) -> Stager:
        return self._staging.stager(self._opened().sink, self._schema_ipc)

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        self._staging.check(staged, hint="take another checkpoint; who deletes in the staging folder?")
        return {}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch in one transaction. An epoch without rows leaves no trace."""
        context = self._opened()
        check_commit(context, permit, staged)
        with self._lock:
            if pieces_of(staged):
                self._publish(context, permit, staged)
            self._staging.sweep(permit, staged)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        self._opened()
        self._staging.abort(staged)

    def published(self) -> Epoch | None:
        ledger = self._load_ledger(self._opened())
        return None if ledger is None or ledger.epoch == NO_EPOCH else ledger.epoch

    def highest(self) -> Epoch:
        return self.published() or NO_EPOCH

    def rewind(self, epoch: Epoch) -> None:
        raise SinkError(
            "what is in a topic cannot be taken back",
            next_step='choose on_rollback="keep" or "fail" for this sink',
            topic=self.topic,
            epoch=epoch,
        )

    # ------------------------------------------------------------------ topics and ledger

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", topic=self.topic)
        return self._context

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

    def _load_ledger(self, context: SinkContext) -> KafkaLedger | None:
        key = f"{context.flow}/{context.sink}".encode()
        found: list[tuple[Epoch, int, KafkaLedger]] = []
        with consumer(self.servers) as client:
            for partition in partitions_of(client, self.servers, self.ledger_topic) or ():
                newest: Record | None = None
                # Brokers look only now and then which transactions have taken too long.
                patience_s = 1.5 * self.timeout_s
                bounds = finished_bounds(client, self.servers, self.ledger_topic, partition, timeout_s=patience_s)
                for page in read_range(client, self.servers, self.ledger_topic, partition, bounds):
                    newest = next((one for one in reversed(page) if one.key == key), newest)
                if newest is not None:
                    ledger = records.decode(_LEDGER_KIND, newest.value or b"", KafkaLedger, path=self.ledger_topic)
                    found.append((ledger.epoch, newest.timestamp_ms, ledger))
        # All messages of one key are in one partition, unless the topic has got more of them since.
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _target(self) -> dict[str, str]:
        return {"topic": self.topic, "ledger_topic": self.ledger_topic}

    def _check_target(self, before: KafkaLedger | None) -> None:
        """Which ledger knows of this sink: a topic that has lost it must not be taken for a new one."""
        path = self._staging.file("target.json")
        if path.exists() and (before is None or records.load(_TARGET_KIND, path, dict) != self._target()):
            raise SinkError(
                "the ledger of the sink is gone, or the staging folder belongs to another topic: "
                "what was published last is not known any more",
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
            raise NotDone(f"no transaction can be begun: {error}", servers=self.servers) from error
        return producer

    def _certain(self, context: SinkContext) -> KafkaLedger:
        """The ledger as it is; after a failure what was begun is first ended, one way or the other."""
        if self._producer is None:
            self._producer = self._new_producer(context)
            found, mine = self._load_ledger(context), self._ledger
            if found is None or mine is None or found.claim != mine.claim:
                # Opening shut the rightful owner out for a moment; it will find its claim untouched and go on.
                self._producer = None
                raise FencedError("a newer start of this flow writes to the topic now", sink=context.sink)
            self._ledger = found
        if self._ledger is None:
            raise InvariantViolation("the sink is used before it was opened", topic=self.topic)
        return self._ledger

    def _publish(self, context: SinkContext, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        digest = digest_of(pieces_of(staged))
        ledger = self._certain(context)
        if ledger.published.get(str(permit.epoch)) == digest:
            return
        if permit.epoch <= ledger.epoch:
            raise SinkError(
                "the topic holds an epoch of this number or a later one, with other rows: it is of another history",
                next_step="was the flow's storage deleted? Give the sink another name, or a new topic",
                flow=permit.flow,
                sink=permit.sink,
                epoch=permit.epoch,
            )
        self._staging.check(staged, hint="restore the flow to an older checkpoint")
        crashpoint("sink-commit-begun", permit.sink)
        after = ledger.with_epoch(permit.epoch, digest)
        self._transact(staged, after)
        self._ledger = after
        crashpoint("sink-commit-done", permit.sink)

    def _transact(self, staged: Sequence[StagedBatch], ledger: KafkaLedger) -> None:
        """All rows and the ledger, or nothing. After any failure the producer is given up: see ``_certain``."""
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
                crashpoint("sink-commit-half", ledger.sink)
            key = f"{ledger.flow}/{ledger.sink}".encode()
            self._produce(producer, self.ledger_topic, key, records.encode(_LEDGER_KIND, ledger))
            is_committing = True
            self._end(producer)
        except kafka.KafkaException as error:
            if not is_committing:
                with contextlib.suppress(kafka.KafkaException):
                    producer.abort_transaction(self.timeout_s)
                raise NotDone(f"the transaction was given up: {error}", topic=self.topic) from error
            raise OutcomeUnknown(f"the transaction may have been committed: {error}", topic=self.topic) from error
        self._producer = producer

    def _end(self, producer: Any) -> None:
        """Committing may be asked for again as long as the broker says so."""
        kafka = import_kafka()
        for left in reversed(range(_TRIES)):
            try:
                producer.commit_transaction(self.timeout_s)
            except kafka.KafkaException as error:
                if not left or not error.args[0].retriable():
                    raise
            else:
                return

    def _produce(self, producer: Any, topic: str, key: bytes | None, value: bytes | None) -> None:
        while True:
            try:
                producer.produce(topic, value=value, key=key)
            except BufferError:
                producer.poll(0.1)  # the queue is full: let some of it go out
                continue
            producer.poll(0)
            return
