"""Reads exact ranges of a Kafka topic, and its bounds; for the source, the sink's ledger and the replay guard.

confluent-kafka is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutline.base.backoff import Backoff
from cutline.base.redaction import has_credentials
from cutline.base.retry import Retry
from cutline.errors import ConfigError, LostInputError, NotDone, Refused

if TYPE_CHECKING:
    from confluent_kafka import Consumer

#: How long a broker may take to answer, and how long reading may stall.
TIMEOUT_S = 10.0
STANDSTILL_S = 30.0
#: How long an error waits for a message that would explain it.
_MESSAGE_S = 2.0
PAGE = 1_000
#: The code of a name that no topic can have (INVALID_TOPIC_EXCEPTION).
_INVALID_TOPIC = 17
#: What a broker without topic ids answers: the id of no topic.
_NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
_LOOKS = Backoff(first_s=0.1, factor=1.0)
#: A file of librdkafka settings (name=value per line), for everything except the address. Secrets belong in it: an
#: option of a source would appear in plans, offsets and logs.
CONFIG_FILE = "CUTLINE_KAFKA_CONFIG"


class Record(NamedTuple):
    """One message of a topic."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: list[tuple[str, bytes | None]]


class Bounds(NamedTuple):
    """What a partition holds: [first, end). ``end`` is the end of the finished transactions."""

    first: int
    end: int


def import_kafka() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise ConfigError(
            "Kafka needs the package confluent-kafka", next_step="pip install 'cutline[kafka]'"
        ) from error
    return confluent_kafka


def client_config(servers: str) -> dict[str, Any]:
    """The configuration of every client."""
    if has_credentials(servers.replace(", ", ",")):
        raise ConfigError(
            "the addresses of Kafka's brokers must not hold a user or a password: they are stored in checkpoints",
            next_step=f"put credentials into the file that {CONFIG_FILE} names",
        )
    config: dict[str, Any] = {"bootstrap.servers": servers, "log_level": 2, "client.id": "cutline"}
    path = os.environ.get(CONFIG_FILE)
    if path:
        try:
            lines = [line.strip() for line in Path(path).read_text().splitlines()]
        except OSError as error:
            raise ConfigError(f"{CONFIG_FILE} cannot be read: {error.strerror}", path=path) from error
        pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
        config |= {name.strip(): value.strip() for name, _, value in pairs}
    return config


@contextlib.contextmanager
def consumer(servers: str, *, isolation: str = "read_committed") -> Iterator[Consumer]:
    """A consumer without a group: it reads assigned partitions and commits no offsets."""
    kafka = import_kafka()
    made = kafka.Consumer(
        client_config(servers)
        | {
            "group.id": "cutline",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            # The requested messages exist already: the broker need not wait for more.
            "fetch.wait.max.ms": 20,
            # A missing offset is an error: any other setting would skip rows silently.
            "auto.offset.reset": "error",
        }
    )
    try:
        yield made
    finally:
        made.close()


def partitions_of(client: Any, servers: str, topic: str) -> list[int] | None:
    """None: there is no such topic. Raises NotDone if no broker answers, Refused if the user may not see the topic."""
    kafka = import_kafka()
    try:
        found = client.list_topics(topic, timeout=TIMEOUT_S).topics.get(topic)
    except kafka.KafkaException as error:
        raise unreachable(servers, error) from error
    problem = None if found is None else found.error
    if problem is not None and problem.code() not in (kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, _INVALID_TOPIC):
        # Not to know a topic is not the same as its absence: a ledger that is not seen is not an empty one.
        kind = failure_kind(kafka.KafkaException(problem))
        step = f"grant Describe on topic {topic} to the user of the flow" if kind is Refused else "retry"
        raise kind(f"topic {topic} cannot be looked at: {problem.str()}", next_step=step, servers=servers)
    return None if found is None or not found.partitions else sorted(found.partitions)


def all_topics(servers: str) -> list[str]:
    """Raises NotDone if no broker answers."""
    kafka = import_kafka()
    try:
        return sorted(administrator(servers).list_topics(timeout=TIMEOUT_S).topics)
    except kafka.KafkaException as error:
        raise unreachable(servers, error) from error


def bounds_of(client: Consumer, servers: str, topic: str, partition: int) -> Bounds:
    """Raises NotDone if no broker answers. A partition whose leader changes is asked again."""
    kafka = import_kafka()
    at = kafka.TopicPartition(topic, partition)
    try:
        first, end = Retry(deadline_s=TIMEOUT_S, backoff=_LOOKS).call(
            lambda: client.get_watermark_offsets(at, timeout=TIMEOUT_S),
            on=kafka.KafkaException,
            is_final=lambda error: not _is_changing(error.args[0]),
        )
    except kafka.KafkaException as error:
        raise unreachable(servers, error) from error
    return Bounds(first, end)


def _is_changing(error: Any) -> bool:
    """Whether the cluster is about to choose a leader, or to tell of a topic that was just created."""
    known = import_kafka().KafkaError
    codes = (known.NOT_LEADER_FOR_PARTITION, known.LEADER_NOT_AVAILABLE, known.UNKNOWN_TOPIC_OR_PART)
    return error.code() in codes


class HiddenEndError(NotDone):
    """An unfinished transaction hides the end of a partition from readers of finished ones."""

    #: The first message of that transaction, if it could be read.
    message: Record | None = None


def finished_bounds(
    client: Consumer, servers: str, topic: str, partition: int, *, timeout_s: float, end: int | None = None
) -> Bounds:
    """What a partition holds once all transactions in it now are finished; ``end``: those below this offset.

    An open transaction of another producer hides what was committed after it began. Brokers end it after its timeout.
    Raises HiddenEndError if that takes longer than ``timeout_s``.
    """
    if end is None:
        with consumer(servers, isolation="read_uncommitted") as everything:
            end = bounds_of(everything, servers, topic, partition).end
    found = bounds_of(client, servers, topic, partition)
    for _ in Retry(deadline_s=timeout_s, backoff=_LOOKS).attempts():
        if found.end >= end:
            return found
        found = bounds_of(client, servers, topic, partition)
    raise _hidden(servers, topic, partition, found.end, timeout_s)


def _hidden(servers: str, topic: str, partition: int, offset: int, waited_s: float) -> HiddenEndError:
    first = _message_at(servers, topic, partition, offset)
    since = "" if first is None else f", written {max(0.0, time.time() - first.timestamp_ms / 1_000):.0f} s ago"
    error = HiddenEndError(
        f"an unfinished transaction hides the end of topic {topic}, partition {partition}: its first message is at "
        f"offset {offset}{since}",
        next_step="end its producer, or wait until the broker ends the transaction (the producer's "
        "transaction.timeout.ms); kafka-transactions.sh find-hanging names what never ends",
        servers=servers,
        waited_s=round(waited_s, 1),
    )
    error.message = first
    return error


def _message_at(servers: str, topic: str, partition: int, offset: int) -> Record | None:
    """A message, finished or not; None: it did not arrive soon."""
    kafka = import_kafka()
    with consumer(servers, isolation="read_uncommitted") as everything:
        everything.assign([kafka.TopicPartition(topic, partition, offset)])
        deadline = time.monotonic() + _MESSAGE_S
        while time.monotonic() < deadline:
            message = everything.poll(0.2)
            if message is not None and message.error() is None:
                return _record(message)
    return None


def administrator(servers: str) -> Any:
    import_kafka()
    from confluent_kafka.admin import AdminClient

    return AdminClient(client_config(servers))


def topic_id(servers: str, topic: str, client: Any = None) -> str:
    """Distinguishes a topic from a later one with the same name; empty if the broker has no topic ids (before 2.8).

    Raises NotDone if no broker answers: not to know an id is not to know whether the topic is the same.
    """
    return topic_ids(servers, [topic], client).get(topic, "")


def topic_ids(servers: str, topics: Sequence[str], client: Any = None) -> dict[str, str]:
    """Those of the topics that exist, if the broker has topic ids."""
    kafka = import_kafka()
    admin = client or administrator(servers)  # it must outlive the answers
    found = {}
    asked = admin.describe_topics(kafka.TopicCollection(list(topics)), request_timeout=TIMEOUT_S) if topics else {}
    for topic, answer in asked.items():
        try:
            found[topic] = str(answer.result().topic_id)
        except kafka.KafkaException as error:
            if error.args[0].code() not in (kafka.KafkaError.UNKNOWN_TOPIC_OR_PART, kafka.KafkaError._UNKNOWN_TOPIC):
                raise unreachable(servers, error) from error
    return {topic: identity for topic, identity in found.items() if identity and identity != _NO_TOPIC_ID}


def ends_of(client: Any, servers: str, topic: str) -> dict[int, int]:
    """The end of every partition, unfinished transactions included. ``client``: an administrator."""
    kafka = import_kafka()
    from confluent_kafka.admin._listoffsets import OffsetSpec

    numbers = partitions_of(client, servers, topic) or []
    asked = {kafka.TopicPartition(topic, one): OffsetSpec.latest() for one in numbers}  # type: ignore[no-untyped-call]
    everything = kafka.IsolationLevel.READ_UNCOMMITTED
    try:
        answers = client.list_offsets(asked, isolation_level=everything, request_timeout=TIMEOUT_S) if asked else {}
        return {where.partition: answer.result().offset for where, answer in answers.items()}
    except kafka.KafkaException as error:
        raise unreachable(servers, error) from error


def read_range(client: Consumer, servers: str, topic: str, partition: int, bounds: Bounds) -> Iterator[list[Record]]:
    """The messages of finished transactions in [first, end), in their order, in pages."""
    kafka = import_kafka()
    at = bounds.first
    if at >= bounds.end:
        return
    client.assign([kafka.TopicPartition(topic, partition, at)])
    deadline = time.monotonic() + STANDSTILL_S
    while at < bounds.end:
        # Asking for a whole page would wait for it: poll one message, then take all that arrived with it.
        one = client.poll(1.0)
        found: list[Any] = [] if one is None else [one, *client.consume(PAGE - 1, timeout=0)]
        page = []
        for message in found:
            problem = message.error()
            if problem is None:
                at = message.offset() + 1
                if message.offset() < bounds.end:
                    page.append(_record(message))
            elif problem.code() == kafka.KafkaError._PARTITION_EOF:
                # Transaction markers may follow the last message, and they count as offsets.
                at = max(at, message.offset())
            elif problem.code() == kafka.KafkaError._AUTO_OFFSET_RESET:
                raise LostInputError(f"topic {topic}, partition {partition}: offset {at} is gone", servers=servers)
            elif problem.code() == kafka.KafkaError.GROUP_AUTHORIZATION_FAILED:
                continue  # the client looks for its group's coordinator, and assigned partitions need none
            elif not problem.retriable():
                kind = failure_kind(kafka.KafkaException(problem))
                raise kind(f"topic {topic}, partition {partition} cannot be read: {problem.str()}", servers=servers)
        if page:
            yield page
        if found:
            deadline = time.monotonic() + STANDSTILL_S
        elif time.monotonic() > deadline:
            raise NotDone(f"topic {topic}, partition {partition} returns nothing after offset {at}", servers=servers)
    client.unassign()


def _record(message: Any) -> Record:
    _, timestamp_ms = message.timestamp()
    return Record(message.offset(), message.key(), message.value(), timestamp_ms, list(message.headers() or ()))


def failure_kind(error: BaseException) -> type[NotDone]:
    """Refused if the broker does not accept the user, or what the user asks for."""
    known = import_kafka().KafkaError
    refusals = {
        known._AUTHENTICATION,
        known.SASL_AUTHENTICATION_FAILED,
        known.TOPIC_AUTHORIZATION_FAILED,
        known.GROUP_AUTHORIZATION_FAILED,
        known.CLUSTER_AUTHORIZATION_FAILED,
        known.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
    return Refused if code_of(error) in refusals else NotDone


def code_of(error: BaseException) -> int | None:
    """Kafka's code of an error; None: it is not one of Kafka's."""
    code = getattr(error.args[0], "code", None) if error.args else None
    return None if code is None else int(code())


def unreachable(servers: str, error: BaseException) -> NotDone:
    return failure_kind(error)(
        f"no Kafka broker can be reached: {error}",
        next_step="check that it runs and is reachable from here, then retry",
        servers=servers,
    )
