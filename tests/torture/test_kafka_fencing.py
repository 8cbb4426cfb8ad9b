"""The Kafka sink on a real broker: processes that were thought dead, transactions that take too long, lost answers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cutline.connectors.kafka.client import HiddenEndError, administrator
from cutline.connectors.kafka.transactions import ProducerFencedError, Transactions
from cutline.connectors.reading import read
from cutline.connectors.sink_base import OpenedSink
from cutline.errors import FencedError, NotDone, OutcomeUnknown, Refused
from cutline.model.ids import Epoch
from cutline.sinks import Kafka
from cutline.testing.conformance.sinks import Case, rows
from cutline.testing.servers.kafka import KafkaCluster
from cutline.testing.servers.lifetime import start_child
from tests.support.cut_proxy import cut_proxy, is_kafka_commit
from tests.support.kafka_target import (
    COPIES,
    SERVERS,
    ids_in,
    ledger_of,
    make_kafka,
    make_topics,
    start,
    take_over,
    topic_of,
)
from tests.support.kafka_worker import BEFORE_COMMIT

pytestmark = [pytest.mark.kill]

LIMIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def cluster(kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    monkeypatch.setenv(SERVERS, kafka_cluster.servers)
    return kafka_cluster


def kafka_of(case: Case) -> Kafka:
    assert isinstance(case.sink, Kafka)
    return case.sink


# ------------------------------------------------------------------------------------------------- zombies


@pytest.mark.parametrize(
    "where",
    [*(pytest.param(one, marks=pytest.mark.soak) for one in ("sink-commit-begun", "sink-commit-half")), BEFORE_COMMIT],
)
def test_a_process_that_was_frozen_in_a_commit_publishes_nothing_when_it_wakes_up(tmp_path: Path, where: str) -> None:
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    staged = case.stage(1, rows(2, 3), rows(4))
    permit = case.permit(2, [staged])
    # So long that the broker would not end its transaction during the test.
    options = {"timeout_s": 300.0}
    order = {"where": where, "is_claimed": False, "place": str(tmp_path), "options": options}
    child = start_child(
        [sys.executable, "-m", "tests.support.kafka_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))},
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(pickle.dumps(order | {"context": case.context, "permit": permit, "staged": [staged]}))
    child.stdin.close()
    try:
        assert child.stdout.readline() == b"ready\n"
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert ids_in(tmp_path) == [1]
        began = time.monotonic()
        take_over(case, make_kafka(tmp_path, **options))
        assert time.monotonic() - began < LIMIT_SECONDS, "it waited for the frozen process's transaction"
        case.commit(2, staged)
        case.publish(3, 2, rows(5))
        os.kill(child.pid, signal.SIGCONT)
        said = child.stdout.read().decode().split()
        # A repeat of what its successor has published does no harm, and is no success of its own.
        assert said in ([*["FencedError"] * 3], ["OutcomeUnknown", *["FencedError"] * 2]), said
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    case.publish(4, 3, rows(6))
    assert ids_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_an_owner_that_another_producer_has_fenced_for_a_moment_continues(tmp_path: Path) -> None:
    """As after a start that was refused, or ``kafka-transactions.sh abort``."""
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    kafka_of(case)._new_producer(case.context)
    case.publish(2, 1, rows(2))
    assert ids_in(tmp_path) == [1, 2]


def test_a_claimed_sink_is_not_disturbed_by_a_zombie_that_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topics(tmp_path)
    case = start(tmp_path)
    zombie, staged = kafka_of(case), case.stage(0, rows(1))
    permit = case.permit(1, [staged])
    take_over(case, make_kafka(tmp_path))
    begun = []
    monkeypatch.setattr(Kafka, "_new_producer", lambda self, context: begun.append(self))
    for _ in range(3):
        with pytest.raises(FencedError):
            zombie.commit(permit, [staged], {})
    monkeypatch.undo()
    assert not begun, "a new producer would end the owner's transaction"
    monkeypatch.setenv(SERVERS, zombie.servers)
    case.commit(1, staged)
    assert ids_in(tmp_path) == [1]


# ------------------------------------------------------------------------------------------------- time limits


def test_an_epoch_that_takes_longer_than_its_transaction_may_is_aborted_and_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topics(tmp_path)
    case = start(tmp_path, timeout_s=1.0)
    staged = case.stage(0, rows(1), rows(2))
    permit = case.permit(1, [staged])
    messages = Kafka._messages

    def slowly(self: Kafka, staged: Any) -> Iterator[Any]:
        for batch in messages(self, staged):
            yield batch
            time.sleep(0.8)

    with monkeypatch.context() as patch:
        patch.setattr(Kafka, "_messages", slowly)
        with pytest.raises(NotDone, match="raise timeout_s of the sink") as error:
            case.sink.commit(permit, [staged], {})
        assert error.value.where["epoch"] == 1
    assert ids_in(tmp_path) == []
    case.sink.commit(permit, [staged], {})
    assert ids_in(tmp_path) == [1, 2]


def test_a_commit_after_the_broker_has_given_the_transaction_up_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topics(tmp_path)
    case = start(tmp_path, timeout_s=1.0)
    staged = case.stage(0, rows(1))
    permit = case.permit(1, [staged])
    commit = Transactions.commit

    def late(self: Transactions) -> None:
        self.flush()
        time.sleep(2.5)  # its timeout, and what the broker takes to notice
        self._began_s = time.monotonic()  # this process does not know: its clock stood still
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, "commit", late)
        with pytest.raises(OutcomeUnknown):
            case.sink.commit(permit, [staged], {})
    assert ids_in(tmp_path) == []
    case.sink.commit(permit, [staged], {})
    assert ids_in(tmp_path) == [1]


def test_checkpoints_may_be_further_apart_than_a_transaction_may_last(tmp_path: Path) -> None:
    make_topics(tmp_path)
    case = start(tmp_path, timeout_s=1.0)
    for epoch in (1, 2):
        time.sleep(2.5)
        case.publish(epoch, epoch, rows(epoch))
    assert ids_in(tmp_path) == [1, 2]


def test_a_time_limit_beyond_the_brokers_is_refused_with_the_setting(tmp_path: Path) -> None:
    make_topics(tmp_path)
    with pytest.raises(Refused, match=r"no transactions of 1000 s.*transaction\.max\.timeout\.ms"):
        start(tmp_path, timeout_s=1000.0)


# ------------------------------------------------------------------------------------------------- hidden ends


class Other:
    """Another producer with an open transaction, whose first message is in this topic."""

    def __init__(self, servers: str, topic: str, key: bytes = b"other/sink") -> None:
        from confluent_kafka import Producer

        self._producer = Producer(
            {"bootstrap.servers": servers, "transactional.id": f"other-{topic}", "transaction.timeout.ms": 60_000}
        )
        self._producer.init_transactions(10)
        self._producer.begin_transaction()
        self._producer.produce(topic, key=key, value=b"{}")
        self._producer.flush(10)

    def abort(self) -> None:
        self._producer.abort_transaction(10)


def test_an_open_transaction_in_the_ledger_topic_is_waited_for_up_to_a_limit(tmp_path: Path) -> None:
    """Behind it the ledger may say that an epoch is published: without the wait it would be published twice."""
    make_topics(tmp_path)
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    other = Other(os.environ[SERVERS], ledger_of(tmp_path))
    permit = case.commit(1, staged)  # who holds the ledger need not read it
    with pytest.raises(HiddenEndError) as error:
        make_kafka(tmp_path, timeout_s=1.0).open(case.context)
    text = str(error.value)
    assert "unfinished transaction" in text and "offset 2" in text and "written_by=other/sink" in text, text
    assert "end its producer" in text
    threading.Timer(3.0, other.abort).start()
    take_over(case, make_kafka(tmp_path))
    assert case.sink.published() == 1
    case.sink.commit(permit, [staged], {})
    assert ids_in(tmp_path) == [1]


def test_an_open_transaction_in_the_target_delays_readers_of_whole_epochs_and_not_the_sink(tmp_path: Path) -> None:
    make_topics(tmp_path, partitions=1)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    other = Other(os.environ[SERVERS], topic_of(tmp_path))
    case.publish(2, 1, rows(2))
    with pytest.raises(HiddenEndError, match="unfinished transaction"):
        read(make_kafka(tmp_path, timeout_s=1.0))
    assert read(make_kafka(tmp_path, timeout_s=1.0), as_of=1).epoch == 1
    other.abort()
    assert read(make_kafka(tmp_path)).epoch == 2
    assert ids_in(tmp_path) == [1, 2]


# ------------------------------------------------------------------------------------------------- brokers that fail


def test_a_commit_whose_answer_is_lost_is_asked_about_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = KafkaCluster()
    with cut_proxy(own.nodes[0].port, is_kafka_commit) as proxy:
        own.settings["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{proxy.port}"
        try:
            own.start()
            monkeypatch.setenv(SERVERS, own.servers)
            make_topics(tmp_path)
            case = start(tmp_path, timeout_s=3.0)
            proxy.cut_answers = 1
            case.publish(1, 0, rows(1, 2))  # the client asks again by itself
            assert proxy.cut == 1
            staged = case.stage(1, rows(3))
            permit = case.permit(2, [staged])
            proxy.cut_answers, proxy.shut_after_cut = 1, True
            with pytest.raises(OutcomeUnknown):
                case.sink.commit(permit, [staged], {})
            assert proxy.cut == 2
            proxy.is_shut = False
            case.sink.commit(permit, [staged], {})
            assert ids_in(tmp_path) == [1, 2, 3]
            assert case.sink.published() == 2
        finally:
            own.remove()


@pytest.mark.soak
def test_a_broker_that_is_killed_in_mid_commit_leaves_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = KafkaCluster()
    try:
        own.start()
        monkeypatch.setenv(SERVERS, own.servers)
        make_topics(tmp_path)
        case = start(tmp_path, timeout_s=20.0)
        commit = Transactions.commit
        # Before the request, while it is on its way, and while its markers are written.
        for epoch, delay_s in enumerate((0.0, 0.003, 0.012), start=1):

            def killed(self: Transactions, delay_s: float = delay_s) -> None:
                self.flush()
                killer = threading.Timer(delay_s, own.kill)
                killer.start()
                if not delay_s:
                    killer.join()
                try:
                    commit(self)
                finally:
                    killer.join()

            staged = case.stage(epoch, rows(*range(epoch * 10, epoch * 10 + 10)))
            permit = case.permit(epoch, [staged])
            restart = threading.Thread(target=_restarted, args=(own,))
            with monkeypatch.context() as patch:
                _once("commit", killed, patch)
                restart.start()
                _until_published(case, permit, staged)
            restart.join()
            case.previous, case.through = Epoch(epoch), permit.through_batch
            assert ids_in(tmp_path) == [one for k in range(1, epoch + 1) for one in range(k * 10, k * 10 + 10)]
    finally:
        own.remove()


def _restarted(cluster: KafkaCluster) -> None:
    """Start it again once it was killed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while cluster.nodes[0].is_running:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.start()


@pytest.mark.soak
def test_a_broker_that_does_not_answer_is_no_endless_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = KafkaCluster()
    try:
        own.start()
        monkeypatch.setenv(SERVERS, own.servers)
        make_topics(tmp_path)
        case = start(tmp_path, timeout_s=3.0)
        case.publish(1, 0, rows(1))
        staged = case.stage(1, rows(2))
        permit = case.permit(2, [staged])
        own.freeze()
        began = time.monotonic()
        with pytest.raises((NotDone, OutcomeUnknown)):
            case.sink.commit(permit, [staged], {})
        assert time.monotonic() - began < 20
        own.thaw()
        _until_published(case, permit, staged)
        assert ids_in(tmp_path) == [1, 2]
    finally:
        own.remove()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_coordinator_of_transactions_may_be_lost_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes; the leader of the id's partition of ``__transaction_state`` is killed and started again."""
    own = KafkaCluster(3)
    try:
        own.start()
        monkeypatch.setenv(SERVERS, own.servers)
        monkeypatch.setenv(COPIES, "3")
        make_topics(tmp_path)
        case = start(tmp_path, timeout_s=60.0)
        case.publish(1, 0, rows(1))
        killed: list[Any] = []

        def kill_coordinator() -> None:
            node = own.nodes[_coordinator(own, "cutline/orders/totals-out") - 1]
            node.kill()
            killed.append(node)

        for epoch, point in enumerate(("sink-commit-begun", "sink-commit-half", BEFORE_COMMIT), start=2):
            staged = case.stage(epoch, rows(epoch, 100 + epoch))
            permit = case.permit(epoch, [staged])
            with monkeypatch.context() as patch:
                _at(point, kill_coordinator, patch)
                _until_published(case, permit, staged)
            case.previous, case.through = Epoch(epoch), permit.through_batch
            own.start()
        assert len(killed) == 3
        assert ids_in(tmp_path) == [1, 2, 3, 4, 102, 103, 104]
    finally:
        own.remove()


def _once(name: str, first: Any, patch: pytest.MonkeyPatch) -> None:
    """Of the producer's method ``name`` another one the first time."""
    method, calls = getattr(Transactions, name), [first]

    def call(self: Transactions) -> None:
        (calls.pop() if calls else method)(self)

    patch.setattr(Transactions, name, call)


def _until_published(case: Case, permit: Any, staged: Any) -> None:
    """As the coordinator repeats a commit that failed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return case.sink.commit(permit, [staged], {})
        except (NotDone, OutcomeUnknown, ProducerFencedError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def _at(point: str, act: Any, patch: pytest.MonkeyPatch) -> None:
    """Act once, when the commit gets there."""
    done: list[bool] = []
    reach, commit = OpenedSink.reach, Transactions.commit

    def reached(self: OpenedSink, name: str) -> None:
        if name == point and not done:
            done.append(True)
            act()
        reach(self, name)

    def committing(self: Transactions) -> None:
        if point == BEFORE_COMMIT and not done:
            self.flush()
            done.append(True)
            act()
        commit(self)

    patch.setattr(OpenedSink, "reach", reached)
    patch.setattr(Transactions, "commit", committing)


def _coordinator(cluster: KafkaCluster, transactional_id: str) -> int:
    """The node that leads the id's partition of the transaction log, as Kafka chooses it."""
    hashed = 0
    for character in transactional_id:
        hashed = (31 * hashed + ord(character)) & 0xFFFFFFFF
    topic = "__transaction_state"
    partitions = administrator(cluster.servers).list_topics(topic, timeout=10).topics[topic].partitions
    signed = hashed - (1 << 32) if hashed >> 31 else hashed
    return int(partitions[(signed & 0x7FFFFFFF) % len(partitions)].leader)
