"""The Kafka sink before it reaches a broker; the rest is in ``tests/torture/test_kafka_*.py``, on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.connectors.kafka.client import client_config, failure_kind, import_kafka
from cutline.errors import ConfigError, FlowDefinitionError, InvariantViolation, NotDone, Refused
from cutline.model.ids import Epoch
from cutline.sinks import Kafka


def test_columns_of_unknown_parts_of_a_message_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlowDefinitionError, match=r"\['colour'\] is not known.*headers, partition, timestamp"):
        Kafka("s:1", "t", staging=tmp_path, columns={"colour": "c"})
    Kafka("s:1", "t", staging=tmp_path, columns={"headers": "h", "partition": "p", "timestamp": "at"})


def test_a_sink_that_is_not_open_refuses_everything(tmp_path: Path) -> None:
    sink = Kafka("s:1", "t", staging=tmp_path)
    for use in (sink.stager, sink.claimed, lambda: sink.claim("", expected=""), lambda: sink.rewind(Epoch(1))):
        with pytest.raises(InvariantViolation):
            use()


@pytest.mark.parametrize("password", ["hun@ter2", "hun:ter/2", "hun#ter2", "%zzhunter2"])
def test_addresses_of_brokers_hold_no_secret(password: str) -> None:
    servers = f"SASL://user:{password}@host:9092"
    with pytest.raises(ConfigError) as refused:
        client_config(servers)
    assert "hun" not in str(refused.value)
    assert "hun" not in repr(Kafka(servers, "t", staging="x"))


def test_a_broker_that_does_not_accept_the_user_refuses_and_one_that_is_away_does_not() -> None:
    known = import_kafka()
    assert failure_kind(known.KafkaException(known.KafkaError(known.KafkaError.TOPIC_AUTHORIZATION_FAILED))) is Refused
    assert failure_kind(known.KafkaException(known.KafkaError(known.KafkaError._TRANSPORT))) is NotDone
    assert failure_kind(OSError()) is NotDone
