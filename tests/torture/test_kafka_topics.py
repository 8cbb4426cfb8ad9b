"""The Kafka sink and the settings of topics, on a real broker: what would lose rows or the ledger is found early."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutline.connectors.kafka.client import administrator, ends_of
from cutline.connectors.reading import read
from cutline.errors import NotDone, Refused, SinkError
from cutline.model.ids import Epoch
from cutline.sinks import Kafka
from cutline.testing.conformance.sinks import rows
from cutline.testing.servers.kafka import KafkaCluster
from tests.support.kafka_target import (
    SERVERS,
    KafkaTarget,
    delete_topic,
    ids_in,
    ledger_of,
    make_kafka,
    make_topic,
    make_topics,
    records_of,
    start,
    take_over,
    topic_of,
)

pytestmark = [pytest.mark.kill]

OWN_KEY = b"orders/totals-out"


@pytest.fixture(autouse=True)
def cluster(kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    monkeypatch.setenv(SERVERS, kafka_cluster.servers)
    return kafka_cluster


def configure(topic: str, **settings: str) -> None:
    """Change settings of a topic, with ``_`` for ``.``; returns when the broker follows them."""
    from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
    from confluent_kafka.admin._resource import ResourceType

    names = {key.replace("_", "."): value for key, value in settings.items()}
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in names.items()]
    admin = administrator(os.environ[SERVERS])
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin.incremental_alter_configs([changed])[changed].result(10)
    deadline = time.monotonic() + 10
    while True:
        asked = ConfigResource(ResourceType.TOPIC, topic)
        found = admin.describe_configs([asked])[asked].result(10)
        if all(found[name].value == value for name, value in names.items()):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def publish_raw(topic: str, key: bytes, value: bytes | None) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": os.environ[SERVERS]})
    producer.produce(topic, key=key, value=value)
    producer.flush(10)


# ------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize(
    "settings",
    [
        {"cleanup_policy": "delete"},
        {"cleanup_policy": "compact,delete"},
        {"cleanup_policy": "compact,delete", "retention_ms": "-1", "retention_bytes": "1000"},
        {"cleanup_policy": "delete", "retention_ms": "-1"},  # nothing expires, and it grows for ever
    ],
)
def test_a_ledger_topic_that_loses_messages_is_refused_with_the_setting(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    make_topic(os.environ[SERVERS], topic_of(tmp_path))
    make_topic(os.environ[SERVERS], ledger_of(tmp_path), **settings)
    with pytest.raises(SinkError, match=r"cleanup\.policy=compact") as refused:
        start(tmp_path)
    assert settings["cleanup_policy"] in str(refused.value)
    configure(ledger_of(tmp_path), cleanup_policy="compact")
    start(tmp_path).publish(1, 0, rows(1))
    assert ids_in(tmp_path) == [1]


def test_a_ledger_topic_that_deletes_nothing_will_do(tmp_path: Path) -> None:
    make_topic(os.environ[SERVERS], topic_of(tmp_path))
    endless: dict[str, Any] = {"retention_ms": "-1", "retention_bytes": "-1"}
    make_topic(os.environ[SERVERS], ledger_of(tmp_path), cleanup_policy="compact,delete", **endless)
    start(tmp_path).publish(1, 0, rows(1))
    assert ids_in(tmp_path) == [1]


def test_missing_topics_are_named_with_how_to_create_them(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match=r"no topic .*-ledger.*cleanup.policy=compact"):
        start(tmp_path)
    make_topic(os.environ[SERVERS], ledger_of(tmp_path), cleanup_policy="compact")
    with pytest.raises(SinkError, match="no topic out-"):
        start(tmp_path)


@pytest.mark.parametrize("how", ["tombstone", "dropped", "created again"])
def test_a_lost_ledger_is_not_taken_for_a_new_target(tmp_path: Path, how: str) -> None:
    """It would publish the last epoch again if that was published and not recorded by the flow."""
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    ledger = ledger_of(tmp_path)
    if how == "tombstone":
        publish_raw(ledger, OWN_KEY, None)
    elif how == "dropped":
        from confluent_kafka import TopicPartition

        configure(ledger, cleanup_policy="delete")  # of a compacted topic nothing can be dropped
        admin = administrator(os.environ[SERVERS])
        where = TopicPartition(ledger, 0, ends_of(admin, os.environ[SERVERS], ledger)[0])
        admin.delete_records([where])[where].result(10)
        configure(ledger, cleanup_policy="compact")
    else:
        delete_topic(os.environ[SERVERS], ledger)
        make_topics(tmp_path)
    with pytest.raises(SinkError, match=r"ledger of the sink is gone.*staging folder"):
        make_kafka(tmp_path).open(case.context)
    assert ids_in(tmp_path) == [1]


def test_retention_that_was_turned_on_while_the_flow_ran_is_noticed_at_the_next_start(tmp_path: Path) -> None:
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    configure(ledger_of(tmp_path), cleanup_policy="delete", retention_ms="1000")
    case.publish(2, 1, rows(2))  # who runs knows its ledger, and writes it anew with each epoch
    with pytest.raises(SinkError, match="would lose the sink's ledger"):
        make_kafka(tmp_path).open(case.context)
    assert ids_in(tmp_path) == [1, 2]


def test_compaction_of_the_ledger_loses_nothing(tmp_path: Path) -> None:
    make_topics(tmp_path)
    # As eager as a broker can be.
    configure(
        ledger_of(tmp_path),
        segment_ms="100",
        min_cleanable_dirty_ratio="0.001",
        delete_retention_ms="0",
        max_compaction_lag_ms="100",
    )
    case = start(tmp_path)
    for epoch in range(1, 9):
        case.publish(epoch, epoch, rows(epoch))
        time.sleep(0.1)
    take_over(case, make_kafka(tmp_path))
    case.publish(9, 9, rows(9))
    assert ids_in(tmp_path) == list(range(1, 10))
    target = KafkaTarget()
    assert target.seen(tmp_path, after=3) == (9, [4, 5, 6, 7, 8, 9])
    assert target.seen(tmp_path, as_of=2) == (2, [1, 2])


def test_the_newest_ledger_counts_if_the_ledger_topic_got_more_partitions(tmp_path: Path) -> None:
    from confluent_kafka.cimpl import NewPartitions

    make_topics(tmp_path)
    case = start(tmp_path)
    staged = case.stage(0, rows(1))
    permit = case.commit(1, staged)
    admin = administrator(os.environ[SERVERS])
    admin.create_partitions([NewPartitions(ledger_of(tmp_path), 8)])[ledger_of(tmp_path)].result(10)
    take_over(case, make_kafka(tmp_path))
    case.sink.commit(permit, [staged], {})
    for epoch in (2, 3):
        case.publish(epoch, epoch, rows(epoch))
        take_over(case, make_kafka(tmp_path))
        assert case.sink.published() == epoch
    assert ids_in(tmp_path) == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- the target


def test_a_compacted_topic_needs_keys(tmp_path: Path) -> None:
    make_topics(tmp_path, cleanup_policy="compact")
    with pytest.raises(SinkError, match="compacted, and messages without a key are refused there"):
        start(tmp_path)
    case = start(tmp_path, key="name", value="name")
    with pytest.raises(SinkError, match="a row has no key, and the topic is compacted"):
        case.stage(0, [{"id": 1, "name": None}])
    case.publish(1, 1, [{"id": 1, "name": "a"}])
    assert [one.key for one in records_of(os.environ[SERVERS], topic_of(tmp_path))] == [b"a"]


def test_null_values_delete_in_a_compacted_topic(tmp_path: Path) -> None:
    make_topics(tmp_path, cleanup_policy="compact")
    schema = pa.schema([("k", pa.string()), ("v", pa.binary())])
    case = start(tmp_path, schema, key="k", value="v")
    case.publish(1, 0, [{"k": "a", "v": b"\x00\xff"}, {"k": "a", "v": None}, {"k": "b", "v": b""}])
    found = [(one.key, one.value) for one in records_of(os.environ[SERVERS], topic_of(tmp_path))]
    assert sorted(found, key=str) == sorted([(b"a", b"\x00\xff"), (b"a", None), (b"b", b"")], key=str)


def test_partitions_may_be_added_while_the_sink_publishes(tmp_path: Path) -> None:
    from confluent_kafka.cimpl import NewPartitions

    make_topics(tmp_path, partitions=1)
    case = start(tmp_path, key="name")
    case.publish(1, 0, rows(*range(1, 20)))
    admin = administrator(os.environ[SERVERS])
    admin.create_partitions([NewPartitions(topic_of(tmp_path), 5)])[topic_of(tmp_path)].result(10)
    case.publish(2, 1, rows(*range(20, 40)))
    take_over(case, make_kafka(tmp_path, key="name"))
    case.publish(3, 2, rows(*range(40, 80)))
    assert ids_in(tmp_path) == list(range(1, 80))
    used = set(read(make_kafka(tmp_path)).to_arrow()["partition"].to_pylist())
    assert used == {0, 1, 2, 3, 4}
    target = KafkaTarget()
    assert target.seen(tmp_path, as_of=1) == (1, list(range(1, 20)))
    assert target.seen(tmp_path, after=1, as_of=2) == (2, list(range(20, 40)))
    assert target.seen(tmp_path, after=2) == (3, list(range(40, 80)))


def test_a_topic_that_was_created_again_is_not_the_one_that_holds_the_rows(tmp_path: Path) -> None:
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    delete_topic(os.environ[SERVERS], topic_of(tmp_path))
    make_topics(tmp_path)
    with pytest.raises(SinkError, match=r"deleted and created again.*another name"):
        make_kafka(tmp_path).open(case.context)
    with pytest.raises(SinkError, match="deleted and created again since epoch 1"):
        read(make_kafka(tmp_path))


def test_messages_that_retention_has_dropped_are_missed_by_readers_that_need_them(tmp_path: Path) -> None:
    from confluent_kafka import TopicPartition

    make_topics(tmp_path, partitions=1)
    case = start(tmp_path)
    for epoch in (1, 2, 3):
        case.publish(epoch, epoch, rows(epoch))
    admin = administrator(os.environ[SERVERS])
    where = TopicPartition(topic_of(tmp_path), 0, 3)  # row, marker, row | marker, row
    admin.delete_records([where])[where].result(10)
    assert KafkaTarget().seen(tmp_path) == (3, [3])  # what the topic still holds
    with pytest.raises(SinkError, match="dropped messages of later epochs: offsets 1 to 2"):
        read(make_kafka(tmp_path), after=1)
    assert KafkaTarget().seen(tmp_path, after=2) == (3, [3])


def test_a_topic_that_is_shorter_than_it_was_has_lost_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an unclean election; here of a broker without ids of topics, on which the topic was created again."""
    for module in ("topics", "reader"):
        monkeypatch.setattr(f"cutline.connectors.kafka.{module}.topic_id", lambda *_: "")
    make_topics(tmp_path, partitions=1)
    case = start(tmp_path)
    case.publish(1, 0, rows(1, 2, 3))
    delete_topic(os.environ[SERVERS], topic_of(tmp_path))
    make_topics(tmp_path, partitions=1)
    with pytest.raises(SinkError, match=r"lost acknowledged messages of epoch 1 .*partition 0: offsets 0 to 2"):
        make_kafka(tmp_path).open(case.context)
    with pytest.raises(SinkError, match=r"have lost messages of epoch 1 .*partition 0: offsets 0 to 2"):
        read(make_kafka(tmp_path))


def test_a_ledger_topic_that_is_gone_is_not_an_empty_ledger(tmp_path: Path) -> None:
    make_topics(tmp_path)
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    delete_topic(os.environ[SERVERS], ledger_of(tmp_path))
    with pytest.raises(NotDone, match="unknown what the sink has published"):
        case.sink.published()


# ------------------------------------------------------------------------------------------------- sizes


def test_the_ledger_may_be_larger_than_the_messages_of_the_target(tmp_path: Path) -> None:
    make_topics(tmp_path, max_message_bytes="1500", partitions=1)
    schema = pa.schema([(f"column_{number}_of_many", pa.string()) for number in range(60)])
    case = start(tmp_path, schema, value="column_0_of_many")
    noise = [os.urandom(300).hex() for _ in range(50)]
    case.publish(1, 0, [{"column_0_of_many": text} for text in noise])
    found = records_of(os.environ[SERVERS], topic_of(tmp_path))
    assert [(one.value or b"").decode() for one in found] == noise
    assert len(records_of(os.environ[SERVERS], ledger_of(tmp_path))[0].value or b"") > 1_500


def test_a_ledger_topic_whose_messages_are_too_small_is_named(tmp_path: Path) -> None:
    make_topics(tmp_path)
    configure(ledger_of(tmp_path), max_message_bytes="200")
    with pytest.raises(SinkError, match=r"raise max\.message\.bytes of the topic") as refused:
        start(tmp_path)
    assert refused.value.where["topic"] == ledger_of(tmp_path)


def test_a_message_that_is_too_large_fails_its_batch_before_any_epoch_is_complete(tmp_path: Path) -> None:
    make_topics(tmp_path, max_message_bytes="20000")
    case = start(tmp_path)
    case.publish(1, 0, rows(1))
    with pytest.raises(SinkError, match=r"a message of 2\d+ bytes is larger .* 19744.*raise max.message.bytes"):
        case.stage(1, [{"id": 2, "name": "x" * 20_000}])
    case.publish(2, 1, [{"id": 2, "name": "x" * 19_600}])
    # The way out: the topic accepts more; the restarted flow knows.
    configure(topic_of(tmp_path), max_message_bytes="50000")
    take_over(case, make_kafka(tmp_path))
    case.publish(3, 2, [{"id": 3, "name": "x" * 40_000}])
    assert ids_in(tmp_path) == [1, 2, 3]


def test_batches_are_no_larger_than_the_topic_accepts(tmp_path: Path) -> None:
    """A broker counts all messages that are sent together; the client's own limit is another one."""
    make_topics(tmp_path, max_message_bytes="5000", partitions=1)
    case = start(tmp_path, key="name")
    noise = [os.urandom(500).hex() for _ in range(200)]
    case.publish(1, 0, [{"id": number, "name": text} for number, text in enumerate(noise)])
    assert ids_in(tmp_path) == list(range(200))


def test_a_limit_that_was_lowered_stops_the_epoch_and_loses_nothing_of_it(tmp_path: Path) -> None:
    make_topics(tmp_path, partitions=1)
    case = start(tmp_path)
    noise = os.urandom(5_000).hex()
    staged = case.stage(0, [*rows(1), {"id": 2, "name": noise}, *rows(3)])
    permit = case.permit(1, [staged])
    configure(topic_of(tmp_path), max_message_bytes="2000")
    for _ in range(2):
        with pytest.raises(SinkError, match=r"nothing of the epoch is published.*raise max\.message\.bytes") as refused:
            case.sink.commit(permit, [staged], {})
        assert refused.value.where["epoch"] == 1
    assert ids_in(tmp_path) == []
    configure(topic_of(tmp_path), max_message_bytes="100000")
    case.sink.commit(permit, [staged], {})
    assert ids_in(tmp_path) == [1, 2, 3]


# ------------------------------------------------------------------------------------------------- rights


def test_missing_rights_are_refused_with_what_to_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = KafkaCluster(
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # Whatever has no rule is allowed, so that a rule for another user forbids it.
            "allow.everyone.if.no.acl.found": "true",
        }
    )
    try:
        own.start()
        monkeypatch.setenv(SERVERS, own.servers)
        make_topics(tmp_path)
        case = start(tmp_path)
        staged = case.stage(0, rows(1))
        permit = case.permit(1, [staged])
        topic, ledger = topic_of(tmp_path), ledger_of(tmp_path)
        # Of a topic with any rule, all that is not granted is forbidden.
        with reserved("TOPIC", topic, allowed=("DESCRIBE", "DESCRIBE_CONFIGS", "READ")):
            for _ in range(2):
                with pytest.raises(Refused, match=f"grant Write, Describe and DescribeConfigs on topic {topic}"):
                    case.sink.commit(permit, [staged], {})
        with (
            reserved("TRANSACTIONAL_ID", "cutline/orders/totals-out"),
            pytest.raises(Refused, match="on transactional id cutline/orders/totals-out"),
        ):
            take_over(case, make_kafka(tmp_path))
        with (
            reserved("TOPIC", ledger, allowed=("DESCRIBE", "READ", "WRITE")),
            pytest.raises(Refused, match=f"grant DescribeConfigs on topic {ledger}"),
        ):
            make_kafka(tmp_path).open(case.context)
        with reserved("TOPIC", ledger, allowed=("DESCRIBE", "DESCRIBE_CONFIGS", "WRITE")):
            with pytest.raises(NotDone) as refused:
                make_kafka(tmp_path).open(case.context)
            assert isinstance(refused.value, Refused), refused.value
        with reserved("TOPIC", ledger):
            # A ledger that may not be seen is not an empty one.
            for look in (case.sink.published, lambda: make_kafka(tmp_path).open(case.context)):
                with pytest.raises(Refused, match=f"grant Describe on topic {ledger}"):
                    look()
        assert ids_in(tmp_path) == []
        take_over(case, make_kafka(tmp_path))
        case.sink.commit(permit, [staged], {})
        # Nothing of consumer groups is needed.
        with reserved("GROUP", "cutline"):
            take_over(case, make_kafka(tmp_path))
            case.previous, case.through = Epoch(1), permit.through_batch
            case.publish(2, 1, rows(2))
            assert ids_in(tmp_path) == [1, 2]
    finally:
        own.remove()


class reserved:  # noqa: N801 (used like a function)
    """A resource on which everybody may do only what is allowed."""

    def __init__(self, kind: str, name: str, allowed: tuple[str, ...] = ()) -> None:
        from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
        from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

        self._admin = administrator(os.environ[SERVERS])
        where: tuple[Any, ...] = (ResourceType[kind], name, ResourcePatternType.LITERAL)
        rules = [("User:somebody-else", "ALTER_CONFIGS" if kind == "TOPIC" else "DESCRIBE")]
        rules += [("User:*", operation) for operation in allowed]
        allow: Any = AclBinding
        self._rules = [allow(*where, user, "*", AclOperation[one], AclPermissionType.ALLOW) for user, one in rules]
        select: Any = AclBindingFilter
        self._all = select(*where, None, None, AclOperation.ANY, AclPermissionType.ANY)

    def __enter__(self) -> None:
        for answer in self._admin.create_acls(self._rules).values():
            answer.result(10)
        time.sleep(1.0)  # the brokers read the rules from their metadata log

    def __exit__(self, *_: object) -> None:
        for answer in self._admin.delete_acls([self._all]).values():
            answer.result(10)
        time.sleep(1.0)


def test_addresses_of_other_topics_are_not_mixed_up(tmp_path: Path) -> None:
    """Two flows with one topic and one ledger topic: each reads its own epochs, and both see all rows."""
    make_topics(tmp_path)
    target = KafkaTarget()
    one, other = target.start(tmp_path), target.start(tmp_path, flow="strangers")
    one.publish(1, 0, rows(1))
    other.publish(7, 0, rows(2))
    one.publish(2, 1, rows(3))
    with pytest.raises(SinkError, match="several sinks write to the topic"):
        read(make_kafka(tmp_path))
    mine = read(make_kafka(tmp_path), flow="orders", after=1)
    assert (mine.epoch, mine.flow, mine.sink) == (2, "orders", "totals-out")
    assert sorted(json.loads(value)["id"] for value in mine.to_arrow()["value"].to_pylist()) == [2, 3]
    assert isinstance(one.sink, Kafka)
