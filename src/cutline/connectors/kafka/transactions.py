"""The transactions of one sink: a producer whose id fences every earlier one, and what its failures mean.

Room for two-phase transactions (KIP-939): only ``commit`` decides an outcome, and only ``begin`` after a failed commit
needs to know it. A broker that keeps prepared transactions would let another process answer both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from cutline.base.retry import Retry
from cutline.connectors.kafka.client import client_config, code_of, failure_kind, import_kafka
from cutline.connectors.kafka.messages import KEY, VALUE, is_plain, outgoing
from cutline.errors import CutlineError, NotDone, OutcomeUnknown, Refused, SinkError

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.connectors.kafka.ledger import Message

#: A transaction that failed is aborted so that readers need not wait for the broker to do it; only a courtesy.
_ABORT_S = 5.0
#: How long to wait until the queue has room again.
_ROOM_S = 0.05
#: Attempts of a commit, as long as the broker says that it may be retried.
_COMMITS = 3
#: Larger batches are no faster.
_BATCH_BYTES = 1_000_000
#: Reports of messages that failed, kept for the error.
_MOST_REPORTS = 10
#: Settings that users may change, in the file of settings (see ``client``).
_DEFAULTS = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.num.messages": 100_000,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 262_144,
    # Keys land where Java's producers put them.
    "partitioner": "murmur2_random",
}


class ProducerFencedError(NotDone):
    """The broker has ended this producer: a newer one has the same transactional id."""


class Transactions:
    """One producer. After a failure it is of no further use: a new one ends its transaction, and reads the outcome."""

    def __init__(
        self,
        servers: str,
        transactional_id: str,
        *,
        topic: str,
        ledger_topic: str,
        timeout_s: float,
        batch_bytes: int,
        message_bytes: int,
    ) -> None:
        """Returns when every earlier producer of this id is fenced and its transaction committed or aborted.

        ``batch_bytes``: the largest batch that both topics accept; ``message_bytes``: that one of them accepts.
        """
        self._servers, self._id = servers, transactional_id
        self._topic, self._ledger_topic = topic, ledger_topic
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        #: What became of messages that were not accepted, and their topics.
        self._failed: list[tuple[Any, str]] = []
        kafka = import_kafka()
        config = _DEFAULTS | client_config(servers)
        config |= {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": round(timeout_s * 1_000),
            "enable.idempotence": True,
            "acks": "all",
            # A topic refuses batches that are larger than it accepts, and one message is a batch. The ledger's message
            # may be larger than what the target accepts.
            "batch.size": max(min(batch_bytes, _BATCH_BYTES), 1),
            "message.max.bytes": max(message_bytes, 1_000),
            "delivery.report.only.error": True,
            "on_delivery": _collector(self._failed),
        }
        try:
            self._producer = kafka.Producer(config)
            self._producer.init_transactions(timeout_s)
        except kafka.KafkaException as error:
            raise self._failure(error, "no transaction can begin") from error

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self._failed.clear()
        with self._undoing():
            self._producer.begin_transaction()

    def send_rows(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Messages as they are staged."""
        produce, topic = self._producer.produce, self._topic
        with self._undoing():
            for batch in batches:
                if is_plain(batch):
                    columns = (batch.column(name).to_pylist() for name in (KEY, VALUE))
                    for key, value in zip(*columns, strict=True):
                        try:
                            produce(topic, value, key)
                        except BufferError:
                            self._send_later(topic, value=value, key=key)
                else:
                    self._send_rich(batch)
                self._producer.poll(0)
                self._check()

    def _send_rich(self, batch: pa.RecordBatch) -> None:
        for one in outgoing(batch):
            extra: dict[str, Any] = {}
            if one.partition is not None:
                extra["partition"] = one.partition
            if one.timestamp_ms is not None:
                extra["timestamp"] = one.timestamp_ms
            if one.headers:
                extra["headers"] = one.headers
            try:
                self._producer.produce(self._topic, value=one.value, key=one.key, **extra)
            except BufferError:
                self._send_later(self._topic, value=one.value, key=one.key, **extra)

    def _send_later(self, topic: str, **message: Any) -> None:
        """The queue is full: wait until some of it is sent."""
        while True:
            self._producer.poll(_ROOM_S)
            self._check()
            with contextlib.suppress(BufferError):
                self._producer.produce(topic, **message)
                return

    def flush(self) -> None:
        """Returns when the brokers have every message sent so far."""
        with self._undoing():
            left = self._producer.flush(max(self._left_s(), 0.1))
            self._check()
            if left:
                raise (
                    self._too_slow()
                    if self._left_s() <= 0
                    else NotDone(f"{left} messages were not sent", topic=self._topic)
                )

    def send_ledger(self, messages: Iterable[Message]) -> None:
        with self._undoing(self._ledger_topic):
            for key, value in messages:
                try:
                    self._producer.produce(self._ledger_topic, value=value, key=key)
                except BufferError:
                    self._send_later(self._ledger_topic, value=value, key=key)

    def commit(self) -> None:
        """All that was sent becomes visible. Raises OutcomeUnknown if that is not certain."""
        self.flush()
        kafka = import_kafka()
        try:
            Retry(limit=_COMMITS).call(
                lambda: self._producer.commit_transaction(max(self._left_s(), 1.0)),
                on=kafka.KafkaException,
                is_final=lambda error: not error.args[0].retriable() or self._left_s() <= 0,
            )
        except kafka.KafkaException as error:
            self._producer.purge()
            raise OutcomeUnknown(
                f"the transaction may have been committed: {error}",
                next_step="the outcome is read before the next attempt",
                topic=self._topic,
                servers=self._servers,
            ) from error

    def abort(self) -> None:
        """Nothing of it becomes visible. The broker does the same, later, if this fails."""
        kafka = import_kafka()
        with contextlib.suppress(kafka.KafkaException):
            self._producer.purge()
            self._producer.abort_transaction(_ABORT_S)

    # ------------------------------------------------------------------ failures

    @contextlib.contextmanager
    def _undoing(self, topic: str = "") -> Iterator[None]:
        """Aborts the transaction after any failure; Kafka's become errors that say what to do in which topic."""
        kafka = import_kafka()
        try:
            yield
        except kafka.KafkaException as error:
            self.abort()
            raise self._failure(error, "the transaction was aborted", topic) from error
        except SystemError as error:
            # confluent-kafka raises this if a producer fails for good while messages of it are reported.
            self.abort()
            if not isinstance(error.__cause__, kafka.KafkaException):
                raise
            raise self._failure(error.__cause__, "the transaction was aborted", topic) from error
        except BaseException:
            self.abort()
            raise

    def _left_s(self) -> float:
        return self._began_s + self._timeout_s - time.monotonic()

    def _check(self) -> None:
        """Raise what the broker said about a message, or that time is up."""
        if self._failed:
            reports = self._reports()
            raise import_kafka().KafkaException(reports[0][0] if reports else self._producer_error())
        if self._left_s() <= 0:
            raise self._too_slow()

    def _reports(self) -> list[tuple[Any, str]]:
        """Without messages that were only dropped because the producer had failed."""
        known = import_kafka().KafkaError
        return [one for one in self._failed if one[0].code() not in (known._PURGE_QUEUE, known._PURGE_INFLIGHT)]

    def _producer_error(self) -> Any:
        """Why messages were dropped. Only inside a transaction: there another cannot begin, and the answer says why."""
        kafka = import_kafka()
        try:
            self._producer.begin_transaction()
        except kafka.KafkaException as error:
            if error.args[0].code() != kafka.KafkaError._STATE:
                return error.args[0]
        return self._failed[0][0]

    def _too_slow(self) -> NotDone:
        return NotDone(
            f"the epoch was not sent within {self._timeout_s:g} s, so the broker ends its transaction",
            next_step="raise timeout_s of the sink (the broker's transaction.max.timeout.ms is the limit), "
            "or take checkpoints more often; the epoch is tried again",
            topic=self._topic,
            servers=self._servers,
        )

    def _failure(self, error: Exception, what: str, topic: str = "") -> CutlineError:
        known = import_kafka().KafkaError
        # What happened to a message says more.
        reports, cause = self._reports(), error.args[0]
        if reports and not cause.fatal():
            cause, topic = reports[0]
        code = code_of(import_kafka().KafkaException(cause))
        where = {"topic": topic or self._topic, "servers": self._servers}
        if code in (known._FENCED, known.PRODUCER_FENCED, known.INVALID_PRODUCER_EPOCH):
            if self._left_s() <= 0:
                return self._too_slow()
            return ProducerFencedError(f"{what}: another producer of {self._id} has begun", **where)
        if step := _STEPS.get(_name_of(cause)):
            return SinkError(f"{what}, nothing of the epoch is published: {cause.str()}", next_step=step, **where)
        kind = failure_kind(import_kafka().KafkaException(cause))
        if code == known.INVALID_TRANSACTION_TIMEOUT:
            return Refused(
                f"{what}: the broker accepts no transactions of {self._timeout_s:g} s",
                next_step="lower timeout_s of the sink, or raise transaction.max.timeout.ms of the brokers",
                **where,
            )
        if kind is Refused:
            return Refused(f"{what}: {cause.str()}", next_step=self._rights(), **where)
        return kind(f"{what}: {cause.str()}", **where)

    def _rights(self) -> str:
        return (
            f"grant Write, Describe and DescribeConfigs on topic {self._topic}, the same and Read on topic "
            f"{self._ledger_topic}, Write and Describe on transactional id {self._id}"
        )


def _collector(failed: list[tuple[Any, str]]) -> Callable[[Any, Any], None]:
    """Not a method: the producer would keep its owner, and both would live on after a failure."""

    def collect(error: Any, message: Any) -> None:
        if error is not None and len(failed) < _MOST_REPORTS:
            failed.append((error, message.topic()))

    return collect


#: Refusals that a person can end, while the epoch waits.
_STEPS = {
    "MSG_SIZE_TOO_LARGE": "raise max.message.bytes of the topic, then restart the flow: the epoch waits until it fits",
    "RECORD_LIST_TOO_LARGE": "raise segment.bytes of the topic: the epoch waits until it fits",
    "INVALID_TIMESTAMP": "raise message.timestamp.after.max.ms (or before.max.ms) of the topic: the epoch waits until "
    "its messages' timestamps are accepted",
    "INVALID_RECORD": "check the topic's settings (a compacted topic needs keys): the epoch waits until they fit",
    "POLICY_VIOLATION": "change the policy of the brokers: the epoch waits until it is accepted",
    "_UNKNOWN_PARTITION": "a row names a partition that the topic does not have: add partitions, the epoch waits",
    "_UNKNOWN_TOPIC": "create the topic again; the epoch waits",
    "UNKNOWN_TOPIC_OR_PART": "create the topic again; the epoch waits",
}


def _name_of(error: Any) -> str:
    return str(error.name())
