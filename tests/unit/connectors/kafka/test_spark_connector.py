"""What Spark's own Kafka source subscribes to and writes down; against a broker: tests/torture/test_kafka_guard.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.connectors.kafka.spark_connector import (
    FORMAT,
    SPARK_KAFKA,
    begun_at,
    encoded_subscription,
    parse_position,
    subscription_of,
)
from cutline.connectors.replay_guard import ReplayGuard
from cutline.model.plan import PlannedSource, RecordedSource
from cutline.ports.source_guard import Today

GUARD = ReplayGuard()
POSITION = b'{"orders":{"0":17,"1":3}}'


@pytest.mark.parametrize(
    ("position", "is_mine"),
    [
        (POSITION, True),
        (b'{"a":{"0":1},"b":{"0":2}}', True),
        (b"{}", True),
        (b'{"logOffset":3}', False),
        (b'{"orders":{"first":17}}', False),
        (b'{"source":"cutline_kafka"}', False),
        (b"17", False),
        (b"\xff", False),
    ],
)
def test_its_offsets_are_recognised(position: bytes, is_mine: bool) -> None:
    assert (parse_position(position) is not None) == is_mine
    kind = GUARD.kind_of(position, Path("/nowhere"))
    assert (kind is SPARK_KAFKA) == is_mine


def test_where_it_began_is_written_in_its_folder(tmp_path: Path) -> None:
    assert begun_at(tmp_path) is None
    for content in (b"\x00v1\n" + POSITION, b"v1\n" + POSITION):
        (tmp_path / "0").write_bytes(content)
        assert begun_at(tmp_path) == {"orders": {"0": 17, "1": 3}}
        assert GUARD.kind_of(None, tmp_path) is SPARK_KAFKA
    (tmp_path / "0").write_bytes(b'v1\n{"path":"file:/a","timestamp":1,"batchId":0}')
    assert begun_at(tmp_path) is None


def test_subscriptions() -> None:
    listed = subscription_of({"subscribe": "a, b"})
    assert listed.may_read(["a", "b"]) and not listed.may_read(["a", "c"])
    assert subscription_of({"subscribepattern": "or.*"}).may_read(["orders"])
    assert subscription_of({"subscribepattern": "\\p{Alpha}+"}).may_read(["orders"]), "Python does not know this one"
    assert subscription_of({"assign": '{"a":[0,2]}'}).may_read(["a"])
    assert not subscription_of({"failondataloss": "False"}).fails_on_loss
    secret = encoded_subscription({"subscribe": "a", "kafka.security.protocol": "SASL_SSL", "kafka.sasl.x": "s3cr3t"})
    assert b"s3cr3t" not in secret and b"is_secured" in secret


def test_why_it_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTLINE_KAFKA_CONFIG", raising=False)

    def planned(address: str = "b:1", **options: str) -> PlannedSource:
        settings = encoded_subscription({name.replace("_", "."): value for name, value in options.items()})
        return PlannedSource(format=FORMAT, address=address, settings=settings)

    def note(*sources: PlannedSource, recorded: tuple[RecordedSource, ...] = ()) -> str:
        (found,) = SPARK_KAFKA.check(POSITION, Path("/nowhere"), Today(None, sources, recorded)).notes
        return found

    assert "known to the flow's code only" in note()
    assert "reads no Kafka" in note(PlannedSource(format="rate")), "other connectors write offsets of this form"
    assert "several clusters" in note(planned("b:1", subscribe="orders"), planned("c:1", subscribe="orders"))
    secured = planned(subscribe="orders", kafka_security_protocol="SASL_SSL")
    assert "CUTLINE_KAFKA_CONFIG" in note(secured)
    assert "CUTLINE_KAFKA_CONFIG" in (GUARD.why_not_guarded(secured) or "")
    assert GUARD.recorded([secured], []) == []
    monkeypatch.setenv("CUTLINE_KAFKA_CONFIG", "/some/file")
    assert GUARD.why_not_guarded(secured) is None


def test_a_broker_that_does_not_answer_is_recorded_without_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.connectors.kafka.client.TIMEOUT_S", 0.1)
    settings = encoded_subscription({"subscribe": "orders"})
    planned = PlannedSource(format=FORMAT, address="127.0.0.1:1", settings=settings)
    bare = RecordedSource(format=FORMAT, address="127.0.0.1:1", settings=settings.decode())
    assert GUARD.recorded([planned], []) == [bare]
    known = RecordedSource(format=FORMAT, address="127.0.0.1:1", settings=settings.decode(), ids={"orders": "x"})
    assert GUARD.recorded([planned], [known]) == [known], "nobody is asked again"
