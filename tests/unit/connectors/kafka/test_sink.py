"""The Kafka sink against confluent-kafka's mock cluster: protocol level only.

There is no broker to be had here. The mock cluster takes part in transactions, but shows rows of unfinished and aborted
ones, and fences nobody; so what rests on the broker's own promises is not tested: half an epoch is invisible, and a
producer of the same transactional id shuts out the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutline.connectors.kafka.client import Bounds, bounds_of, client_config, consumer, failure_kind, import_kafka
from cutline.errors import ConfigError, FencedError, NotDone, OutcomeUnknown, Refused, SinkError
from cutline.model.ids import Epoch
from cutline.sinks import Kafka
from cutline.testing.conformance.sinks import SIMPLE, Case, SinkBehaviour, rows
from tests.support.kafka_mock import MockKafka
from tests.support.kafka_target import CLUSTERS, SERVERS, KafkaTarget, make_kafka, topic_of


@pytest.fixture(scope="module")
def cluster() -> MockKafka:
    return MockKafka()


@pytest.fixture(autouse=True)
def kafka(cluster: MockKafka, monkeypatch: pytest.MonkeyPatch) -> MockKafka:
    monkeypatch.setenv(SERVERS, cluster.servers)
    CLUSTERS[cluster.servers] = cluster
    return cluster


class TestKafka(KafkaTarget, SinkBehaviour):
    def test_who_was_replaced_publishes_nothing_more(self, tmp_path: Path) -> None:
        pytest.skip("the mock cluster does not fence producers of the same transactional.id; a broker does")


def start(tmp_path: Path, schema: pa.Schema = SIMPLE, **options: Any) -> Case:
    sink = make_kafka(tmp_path, **options)
    context = TestKafka().context(schema)
    sink.open(context)
    sink.claim("", expected=sink.claimed())
    return Case(sink=sink, context=context)


def test_a_commit_without_an_answer_is_asked_about_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = start(tmp_path)
    staged = case.stage(0, rows(1, 2))
    permit = case.permit(1, [staged])
    end = Kafka._end

    def silent(self: Kafka, producer: Any) -> None:
        from confluent_kafka import KafkaError, KafkaException

        end(self, producer)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(Kafka, "_end", silent)
    with pytest.raises(OutcomeUnknown):
        case.sink.commit(permit, [staged], {})
    monkeypatch.undo()
    monkeypatch.setenv(SERVERS, case.sink.servers)  # type: ignore[attr-defined]
    case.sink.commit(permit, [staged], {})
    assert TestKafka().ids(tmp_path) == [1, 2]


def test_after_a_failure_a_writer_that_was_overtaken_stops(tmp_path: Path) -> None:
    case = start(tmp_path)
    zombie, staged = case.sink, case.stage(0, rows(1))
    assert isinstance(zombie, Kafka)
    case.open(successor := make_kafka(tmp_path))
    successor.claim("", expected=successor.claimed())
    zombie._producer = None  # as after the broker has fenced it
    with pytest.raises(FencedError):
        zombie.commit(case.permit(1, [staged]), [staged], {})
    case.commit(1, staged)
    assert TestKafka().ids(tmp_path) == [1]


def test_columns_may_be_value_and_key(tmp_path: Path, kafka: MockKafka) -> None:
    case = start(tmp_path, value="name", key="name")
    case.publish(1, 0, [{"id": 1, "name": "plain text"}])
    case.publish(2, 1, [{"id": 2, "name": None}])
    found = [(record.key, record.value) for record in kafka.records(topic_of(tmp_path))]
    assert found == [(b"plain text", b"plain text"), (None, None)]  # what a compacted topic takes for a deletion


def test_a_lost_ledger_is_not_taken_for_a_new_target(tmp_path: Path, kafka: MockKafka) -> None:
    start(tmp_path)
    kafka.make("another-ledger")
    with pytest.raises(SinkError, match="ledger of the sink is gone"):
        Kafka(kafka.servers, topic_of(tmp_path), staging=tmp_path / "staging", ledger_topic="another-ledger").open(
            TestKafka().context()
        )


def test_a_first_start_that_fails_half_way_is_no_lost_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise NotDone("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Kafka, "_transact", broken)
        with pytest.raises(NotDone):
            start(tmp_path)
    start(tmp_path).publish(1, 0, rows(1))
    assert TestKafka().ids(tmp_path) == [1]


def test_a_ledger_behind_an_open_transaction_of_others_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of committed messages see nothing behind it: what is committed there would be published twice."""
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    permit = case.commit(1, staged)
    sees_all: list[Any] = []
    stalled_looks = [3]

    @contextlib.contextmanager
    def noted(servers: str, *, isolation: str) -> Iterator[Any]:
        with consumer(servers, isolation=isolation) as client:
            sees_all.append(client)
            yield client

    def stalled(client: Any, servers: str, topic: str, partition: int) -> Bounds:
        """The mock cluster does not know of it: as it is until the broker ends the other transaction."""
        found = bounds_of(client, servers, topic, partition)
        if client in sees_all or found.end < 2 or not stalled_looks[0]:
            return found
        stalled_looks[0] -= 1
        return Bounds(found.first, 1)

    monkeypatch.setattr("cutline.connectors.kafka.client.consumer", noted)
    monkeypatch.setattr("cutline.connectors.kafka.client.bounds_of", stalled)
    again = make_kafka(tmp_path)
    again.open(case.context)
    again.commit(permit, [staged], {})
    assert again.published() == 1 and stalled_looks == [0]
    stalled_looks[0] = 1_000_000
    again.timeout_s = 0.2
    with pytest.raises(NotDone, match="unfinished transaction"):
        again.published()


def test_the_newest_ledger_counts_if_the_ledger_topic_got_more_partitions(tmp_path: Path, kafka: MockKafka) -> None:
    case = start(tmp_path)
    topic = f"{topic_of(tmp_path)}-ledger"
    old = kafka.records(topic)[-1]
    staged = case.stage(0, rows(1))
    permit = case.commit(1, staged)
    for partition in range(4):  # an older one in every other partition
        if kafka.partition_of(topic, old) != partition:
            kafka.publish_record(topic, old, partition=partition)
    again = make_kafka(tmp_path)
    again.open(case.context)
    again.commit(permit, [staged], {})
    assert TestKafka().ids(tmp_path) == [1]


def test_rewinding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="on_rollback"):
        start(tmp_path).sink.rewind(Epoch(1))


@pytest.mark.parametrize("password", ["hun@ter2", "hun:ter/2", "hun#ter2", "%zzhunter2"])
def test_addresses_of_brokers_hold_no_secret(password: str) -> None:
    servers = f"SASL://user:{password}@host:9092"
    with pytest.raises(ConfigError) as refused:
        client_config(servers)
    assert "hun" not in str(refused.value)


def test_a_broker_that_does_not_accept_the_user_refuses_and_one_that_is_away_does_not() -> None:
    known = import_kafka()
    assert failure_kind(known.KafkaException(known.KafkaError(known.KafkaError.TOPIC_AUTHORIZATION_FAILED))) is Refused
    assert failure_kind(known.KafkaException(known.KafkaError(known.KafkaError._TRANSPORT))) is NotDone
    assert failure_kind(OSError()) is NotDone
