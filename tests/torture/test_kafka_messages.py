"""What messages of the Kafka sink look like on a real broker: keys, headers, partitions, timestamps, bytes."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from cutline.connectors.reading import read
from cutline.errors import SinkError
from cutline.testing.conformance.sinks import rows
from cutline.testing.servers.kafka import KafkaCluster
from tests.support.kafka_target import SERVERS, make_kafka, make_topics, start, topic_of
from tests.torture.test_kafka_topics import configure

pytestmark = [pytest.mark.kill]

AT = datetime(2024, 2, 29, 23, 59, 59, 999_000, tzinfo=UTC)


@pytest.fixture(autouse=True)
def cluster(kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch) -> KafkaCluster:
    monkeypatch.setenv(SERVERS, kafka_cluster.servers)
    return kafka_cluster


def murmur2(data: bytes) -> int:
    """Of Kafka's Java client: ``Utils.murmur2``."""
    mask = 0xFFFFFFFF
    h = (0x9747B28C ^ len(data)) & mask
    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0x5BD1E995 & mask
        k = (k ^ (k >> 24)) * 0x5BD1E995 & mask
        h = (h * 0x5BD1E995 & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * 0x5BD1E995 & mask
    h = (h ^ (h >> 13)) * 0x5BD1E995 & mask
    return h ^ (h >> 15)


def test_keys_land_where_java_producers_put_them(tmp_path: Path) -> None:
    # The examples of Kafka's own tests.
    assert [murmur2(one) for one in (b"21", b"foobar", b"a-little-bit-long-string")] == [
        -973932308 & 0xFFFFFFFF,
        -790332482 & 0xFFFFFFFF,
        -985981536 & 0xFFFFFFFF,
    ]
    make_topics(tmp_path, partitions=5)
    case = start(tmp_path, key="name")
    case.publish(1, 0, rows(*range(50)))
    found = read(make_kafka(tmp_path)).to_arrow().to_pylist()
    assert len(found) == 50
    assert {(row["key"], row["partition"]) for row in found} == {
        (key, (murmur2(key) & 0x7FFFFFFF) % 5) for key in (f"row {number}".encode() for number in range(50))
    }


def test_everything_that_a_message_can_carry(tmp_path: Path) -> None:
    make_topics(tmp_path, partitions=3, retention_ms="-1")  # messages are as old as their timestamps
    schema = pa.schema(
        [
            ("k", pa.binary()),
            ("v", pa.binary()),
            ("h", pa.map_(pa.string(), pa.binary())),
            ("p", pa.int64()),
            ("at", pa.timestamp("us", tz="UTC")),
        ]
    )
    columns = {"headers": "h", "partition": "p", "timestamp": "at"}
    case = start(tmp_path, schema, key="k", value="v", columns=columns)
    case.publish(
        1,
        0,
        [
            {"k": b"\x00", "v": b"\xff\x00avro", "h": [("trace", b"\x01"), ("none", None)], "p": 2, "at": AT},
            {"k": None, "v": None, "h": None, "p": None, "at": None},
            {"k": b"x", "v": b"", "h": [], "p": 0, "at": AT},
        ],
    )
    found = sorted(
        read(make_kafka(tmp_path)).to_arrow().to_pylist(), key=lambda row: (row["value"] is None, row["key"])
    )
    first, second, third = found
    assert (first["partition"], first["key"], first["value"]) == (2, b"\x00", b"\xff\x00avro")
    assert first["headers"] == [{"key": "trace", "value": b"\x01"}, {"key": "none", "value": None}]
    assert first["published_at"] == AT
    assert (second["partition"], second["value"], second["headers"], second["published_at"]) == (0, b"", [], AT)
    assert third["value"] is None and third["key"] is None
    assert abs(third["published_at"] - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_partition_that_does_not_exist_fails_its_batch(tmp_path: Path) -> None:
    make_topics(tmp_path, partitions=3)
    schema = pa.schema([("id", pa.int64()), ("p", pa.int32())])
    case = start(tmp_path, schema, columns={"partition": "p"})
    for wrong in (3, -1):
        with pytest.raises(SinkError, match="a partition that the topic does not have"):
            case.stage(0, [{"id": 1, "p": wrong}])
    case.publish(1, 1, [{"id": 1, "p": 2}])
    row = read(make_kafka(tmp_path)).to_arrow().to_pylist()[0]
    assert (row["partition"], row["value"]) == (2, b'{"id":1}')  # where it goes is not part of it


def test_timestamps_that_the_broker_refuses_or_replaces(tmp_path: Path) -> None:
    make_topics(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("ms", pa.int64())])
    case = start(tmp_path, schema, columns={"timestamp": "ms"})
    tomorrow = round((time.time() + 86_400) * 1_000)
    staged = case.stage(0, [{"id": 1, "ms": tomorrow}])
    permit = case.permit(1, [staged])
    with pytest.raises(SinkError, match=r"nothing of the epoch is published.*message\.timestamp\.after\.max\.ms"):
        case.sink.commit(permit, [staged], {})
    configure(topic_of(tmp_path), message_timestamp_after_max_ms=str(10 * 86_400_000))
    case.sink.commit(permit, [staged], {})
    row = read(make_kafka(tmp_path)).to_arrow().to_pylist()[0]
    assert round(row["published_at"].timestamp() * 1_000) == tomorrow
    configure(topic_of(tmp_path), message_timestamp_type="LogAppendTime")
    with pytest.raises(SinkError, match="LogAppendTime"):
        start(tmp_path, schema, columns={"timestamp": "ms"})


def test_rows_that_an_earlier_version_staged_are_published(tmp_path: Path) -> None:
    """It staged rows; this version stages messages."""
    from cutline.ports.sinks import StageAttempt

    make_topics(tmp_path)
    case = start(tmp_path, key="name")
    sink = case.sink
    staged = case.stage(0, rows(1))
    rows_as_before = sink._staging.stager("totals-out", sink._schema_ipc)  # type: ignore[attr-defined]
    attempt = StageAttempt(
        flow=case.context.flow, operator=case.context.operator, generation=case.generation, batch=staged.batch,
        partition=1, attempt="before",
    )  # fmt: skip
    writer = rows_as_before.open(attempt)
    writer.write(pa.RecordBatch.from_pylist(rows(2), schema=pa.schema([("id", pa.int64()), ("name", pa.string())])))
    staged.pieces.extend(writer.close())
    case.commit(1, staged)
    found = read(make_kafka(tmp_path)).to_arrow().to_pylist()
    assert sorted((row["key"], row["value"]) for row in found) == [
        (b"row 1", b'{"id":1,"name":"row 1"}'),
        (b"row 2", b'{"id":2,"name":"row 2"}'),
    ]
    assert os.environ[SERVERS]
