"""What answers of brokers mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from cutline.connectors.kafka.client import partitions_of
from cutline.errors import NotDone, Refused


def answering(error: KafkaError | None, partitions: tuple[int, ...] = ()) -> Any:
    found = SimpleNamespace(error=error, partitions=dict.fromkeys(partitions))
    return SimpleNamespace(list_topics=lambda *_, **__: SimpleNamespace(topics={"t": found}))


def test_only_a_broker_that_knows_no_such_topic_says_that_there_is_none() -> None:
    assert partitions_of(answering(None, (1, 0)), "servers", "t") == [0, 1]
    assert partitions_of(answering(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), "servers", "t") is None
    with pytest.raises(NotDone, match="cannot be looked at"):
        partitions_of(answering(KafkaError(KafkaError.LEADER_NOT_AVAILABLE)), "servers", "t")
    with pytest.raises(Refused, match="grant Describe on topic t"):
        partitions_of(answering(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)), "servers", "t")
