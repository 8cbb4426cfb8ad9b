"""Sources on a Spark that does not tell them where a batch begins; no JVM is needed for that."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from cutline.connectors.generator.spark_reader import GeneratorReader, GeneratorSource
from cutline.connectors.kafka.spark_reader import KafkaReader
from cutline.connectors.nats.spark_reader import NatsReader
from cutline.connectors.postgres.spark_reader import PostgresReader
from cutline.errors import ConfigError
from cutline.spark.channel_source import ChannelReader, ChannelSource
from cutline.spark.versions import UntoldReader, arrow_schema, check_jvm, check_pyspark, starting_from, store_positions
from tests.support.channels import append_batch, open_log

HEAD = 'v1\n{"batchWatermarkMs":0,"conf":{}}\n'


class Query:
    """Spark's directory of a query, and a reader of its source as each start of the query makes one."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.dir = folder / "spark"
        (self.dir / "offsets").mkdir(parents=True)

    def plan(self, batch: int, *positions: object) -> None:
        lines = ["-" if position is None else json.dumps(position) for position in positions]
        (self.dir / "offsets" / str(batch)).write_text(HEAD + "\n".join(lines))

    def reader(self) -> Any:
        store_positions(self.dir, self.folder / "gates" / "start")
        source = starting_from(GeneratorSource, self.folder / "gates" / "start")
        sent = pickle.loads(cloudpickle.dumps(source(self.options)))  # as Spark sends it to the reader's process
        return sent.streamReader(schema=None)


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path, {"rows": "100", "rows_per_batch": "10", "seed": "7"})


def at(row: int, seed: int = 7) -> dict[str, Any]:
    return GeneratorReader({"seed": str(seed)}).initialOffset() | {"row": row}


def test_a_new_query_reads_from_the_beginning_on_batch_by_batch(query: Query) -> None:
    reader = query.reader()
    assert reader.latestOffset() == at(10)
    assert reader.initialOffset() == at(0)
    assert [(one.first, one.end) for one in reader.partitions(at(0), at(10))] == [(0, 5), (5, 10)]
    assert reader.latestOffset() == at(20)


def test_a_query_that_starts_again_goes_on_where_its_last_batch_ended(query: Query) -> None:
    query.plan(3, at(30))
    query.plan(4, at(40))
    assert query.reader().latestOffset() == at(50)


def test_a_batch_that_runs_again_is_where_the_next_one_begins(query: Query) -> None:
    query.plan(0, at(10))
    reader = query.reader()
    assert reader.initialOffset() == at(0)
    reader.partitions(at(0), at(10))
    assert reader.latestOffset() == at(20)


def test_a_query_finds_its_own_among_positions_of_other_sources(query: Query) -> None:
    query.plan(5, {"logOffset": 3}, None, at(70, seed=8), 12, {"channel": "cards", "position": 4}, at(40))
    (query.dir / "offsets" / "5").write_text((query.dir / "offsets" / "5").read_text() + "\nnot json")
    assert query.reader().latestOffset() == at(50)


def test_a_source_that_is_read_twice_goes_on_behind_both(query: Query) -> None:
    query.plan(5, at(40), at(50))
    assert query.reader().latestOffset() == at(60)


def test_changed_options_are_refused_as_on_other_versions(query: Query) -> None:
    query.plan(5, at(40, seed=8))
    with pytest.raises(ValueError, match="seed was 8, is 7"):
        query.reader().latestOffset()


def test_a_channel_is_read_up_to_its_gate_from_where_the_query_stands(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(4):
        append_batch(log)
    gate = {"admit": 2, "first": 0, "lineage": [[1, 0]], "max_bytes": 1}
    (tmp_path / "gate.json").write_text(json.dumps(gate))
    options = {"channel": "op", "folder": str(tmp_path), "gate": str(tmp_path / "gate.json"), "parallelism": "2"}
    (tmp_path / "start").write_text(json.dumps([{"channel": "other", "position": 3}, {"channel": "op", "position": 1}]))
    reader: Any = starting_from(ChannelSource, tmp_path / "start")(options).streamReader(schema=None)  # type: ignore[arg-type]
    assert isinstance(reader, UntoldReader)
    assert reader.latestOffset() == {"channel": "op", "position": 2}
    assert reader.latestOffset() == {"channel": "op", "position": 2}, "the gate is closed"
    (tmp_path / "gate.json").write_text(json.dumps(gate | {"admit": 4}))
    assert reader.latestOffset() == {"channel": "op", "position": 3}, "one entry fills a batch"
    assert reader.latestOffset() == {"channel": "op", "position": 4}


def test_each_reader_knows_its_own_position() -> None:
    channel = ChannelReader({"channel": "b", "folder": ".", "gate": "", "parallelism": "1"})
    nats = NatsReader({"url": "nats://localhost", "stream": "b"})
    postgres = PostgresReader({"url": "", "table": "b", "key": "id"} | {"url": "postgresql://x"}, None)  # type: ignore[arg-type]
    kafka = KafkaReader({"servers": "localhost:1", "topic": "b"})
    positions: list[dict[str, Any]] = [
        {"channel": "a", "position": 9},
        {"channel": "b", "position": 1},
        {"channel": "b", "position": 2},
        {"source": "cutline_nats", "stream": "a", "sequence": 9},
        {"source": "cutline_nats", "stream": "b", "sequence": 2},
        {"source": "cutline_nats", "stream": "b", "sequence": 1},
        {"source": "cutline_postgres", "table": "a", "key_column": "id", "key": 9},
        {"source": "cutline_postgres", "table": "b", "key_column": "id", "key": 2},
        {"source": "cutline_kafka", "topic": "a", "offsets": {"0": 9}},
        {"source": "cutline_kafka", "topic": "b", "offsets": {"0": 1, "1": 5}},
        {"source": "cutline_kafka", "topic": "b", "offsets": {"0": 4}},
    ]
    assert channel.furthest(positions) == {"channel": "b", "position": 2}
    assert nats.furthest(positions) == {"source": "cutline_nats", "stream": "b", "sequence": 2}
    assert postgres.furthest(positions) == positions[7]
    assert kafka.furthest(positions) == {"source": "cutline_kafka", "topic": "b", "offsets": {"0": 4, "1": 5}}
    for reader in (channel, nats, postgres, kafka):
        assert reader.furthest([{"logOffset": 1}]) is None
    # The reader itself says that its options have changed.
    assert nats.furthest(positions[3:4]) == positions[3]
    assert kafka.furthest(positions[8:9]) == positions[8]


def test_a_version_that_is_not_supported_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.0.5")
    with pytest.raises(ConfigError, match=r"PySpark 4\.0\.5 is not supported: .*pip install 'pyspark>=4\.1,<4\.4'"):
        check_pyspark("payments")


def test_instants_are_stored_in_utc() -> None:
    schema = StructType([StructField("at", TimestampType()), StructField("name", StringType())])
    assert arrow_schema(schema) == pa.schema([("at", pa.timestamp("us", tz="UTC")), ("name", pa.string())])


class Session:
    """A session as far as it is looked at."""

    def __init__(self, version: str) -> None:
        self.version = version


def test_a_jvm_of_another_version_is_refused() -> None:
    check_jvm("payments", Session(pyspark.__version__))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the JVM runs Spark 3\.5\.1, and Python has PySpark"):
        check_jvm("payments", Session("3.5.1"))  # type: ignore[arg-type]
