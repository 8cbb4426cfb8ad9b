"""Which topics a sink can rely on."""

from __future__ import annotations

import pytest

from cutline.connectors.kafka.topics import MESSAGE_BYTES, Topic, check_ledger_topic, check_target
from cutline.errors import SinkError


def topic(**settings: str) -> Topic:
    return Topic("t", "id", 3, {name.replace("_", "."): value for name, value in settings.items()})


@pytest.mark.parametrize(
    "safe",
    [
        {"cleanup_policy": "compact", "retention_ms": "1000"},  # ignored there
        {"cleanup_policy": "compact,delete", "retention_ms": "-1", "retention_bytes": "-1"},
    ],
)
def test_a_ledger_topic_that_keeps_the_newest_message_of_every_key(safe: dict[str, str]) -> None:
    check_ledger_topic(topic(**safe), "t", servers="s")


@pytest.mark.parametrize(
    "unsafe",
    [
        {"cleanup_policy": "delete", "retention_ms": "1000"},
        {"cleanup_policy": "delete", "retention_ms": "-1"},
        {"cleanup_policy": "delete, compact", "retention_ms": "1000"},
        {"cleanup_policy": "compact,delete", "retention_ms": "-1", "retention_bytes": "9"},
    ],
)
def test_a_ledger_topic_that_loses_messages_or_grows_for_ever(unsafe: dict[str, str]) -> None:
    with pytest.raises(SinkError, match=r"kafka-configs\.sh"):
        check_ledger_topic(topic(**unsafe), "t", servers="s")


def test_a_missing_topic_is_to_be_created() -> None:
    with pytest.raises(SinkError, match="one partition"):
        check_ledger_topic(None, "t", servers="s")
    with pytest.raises(SinkError, match="create it"):
        check_target(None, "t", servers="s", has_key=True, has_timestamp=False)


def test_targets() -> None:
    compacted = topic(cleanup_policy="compact", message_timestamp_type="LogAppendTime", max_message_bytes="5000")
    assert check_target(compacted, "t", servers="s", has_key=True, has_timestamp=False) is compacted
    assert compacted.message_bytes == 5000 - 256
    assert topic().batch_bytes == MESSAGE_BYTES
    with pytest.raises(SinkError) as refused:
        check_target(compacted, "t", servers="s", has_key=False, has_timestamp=True)
    assert "compacted" in str(refused.value) and "LogAppendTime" in str(refused.value)
