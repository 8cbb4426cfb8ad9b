"""Columns with odd names on real Spark: through a channel, into every kind of sink, or refused at the start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

import cutline
from cutline.errors import CutlineError, FlowDefinitionError, SinkError
from cutline.flow import Flow
from cutline.ports.sinks import Sink
from cutline.sinks import Delta, Parquet, SQLite
from tests.support.column_names import DOTTED, GOOD, LONG

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

pytestmark = pytest.mark.spark

ROWS = 40
NAMES = [*GOOD, *DOTTED, LONG]


def column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def numbers(spark: SparkSession) -> DataFrame:
    return spark.readStream.format("cutline_generator").options(rows=ROWS, keys=5, rows_per_batch=10).load()


def start(spark: SparkSession, tmp_path: Path, flow: Flow) -> Any:
    return flow.start(spark=spark, storage=str(tmp_path / "storage"), checkpoint_interval=0)


def test_every_name_goes_through_a_channel_and_into_every_sink(spark: SparkSession, tmp_path: Path) -> None:
    sinks: dict[str, Sink] = {
        "files": Parquet(tmp_path / "files", partition_by=["it's"]),
        "added": Delta(tmp_path / "added", partition_by=["a,b;(c)"]),
        "newest": Delta(tmp_path / "newest", mode="upsert", key=["a.b", ".x"]),
        "rows": SQLite(tmp_path / "rows.db", "rows", mode="upsert", key=["a.b", "`ticked`"]),
    }
    flow = Flow("names")

    @flow.operator()
    def named(spark: SparkSession) -> DataFrame:
        key = F.col("payment_id") % 5
        struct = F.struct(F.lit(1_000_000).cast("long").alias("b")).alias("a")
        return numbers(spark).select("payment_id", struct, *(key.alias(name) for name in NAMES))

    @flow.operator(inputs=[named])
    def again(named: DataFrame) -> DataFrame:
        return named.select("payment_id", "a", *(column(name) for name in NAMES))

    for name, sink in sinks.items():
        flow.sink(again, sink, name=name)
    running = start(spark, tmp_path, flow)
    try:
        running.process_all_available()
        running.trigger_checkpoint()
    finally:
        running.stop()
    truth = [dict.fromkeys(NAMES, number % 5) | {"payment_id": number, "a": {"b": 1_000_000}} for number in range(ROWS)]
    for name, sink in sinks.items():
        found = sorted(cutline.read(sink).to_arrow().to_pylist(), key=lambda row: int(row["payment_id"]))
        if name in ("files", "added"):
            assert found == truth, name
        else:
            assert [row["a.b"] for row in found] == [row["payment_id"] % 5 for row in found]
            assert sorted(row["a.b"] for row in found) == [0, 1, 2, 3, 4], name
    by_spark = spark.read.parquet(str(tmp_path / "files" / "cutline_epoch=*")).select(column("a.b"), "payment_id")
    assert sorted(tuple(row) for row in by_spark.collect()) == sorted((row["a.b"], row["payment_id"]) for row in truth)


def test_names_that_differ_only_in_case_go_through_a_channel(spark: SparkSession, tmp_path: Path) -> None:
    flow = Flow("pairs")
    sink = Parquet(tmp_path / "out")

    @flow.operator()
    def pairs(spark: SparkSession) -> DataFrame:
        return numbers(spark).select("payment_id", F.lit(1).alias("n"), F.lit(2).alias("N"))

    @flow.operator(inputs=[pairs])
    def ids(pairs: DataFrame) -> DataFrame:
        return pairs.select("payment_id")

    flow.sink(ids, sink, name="out")
    running = start(spark, tmp_path, flow)
    try:
        running.process_all_available()
        running.trigger_checkpoint()
    finally:
        running.stop()
    assert sorted(cutline.read(sink).to_arrow()["payment_id"].to_pylist()) == list(range(ROWS))


@pytest.mark.parametrize(
    ("select", "error", "column"),
    [
        (["payment_id", "payment_id"], FlowDefinitionError, "payment_id"),
        (["payment_id", "struct(amount as b, amount as b) as a"], FlowDefinitionError, "a.b"),
        (["payment_id", "amount as n", "amount as N"], SinkError, "N"),
    ],
)
def test_what_cannot_be_a_name_is_refused_at_the_start(
    spark: SparkSession, tmp_path: Path, select: list[str], error: type[CutlineError], column: str
) -> None:
    flow = Flow("refused")

    @flow.operator()
    def named(spark: SparkSession) -> DataFrame:
        return numbers(spark).selectExpr(*select)

    flow.sink(named, Parquet(tmp_path / "out"), name="out")
    with pytest.raises(error, match="the same name") as refused:
        start(spark, tmp_path, flow)
    where = refused.value.where
    assert (where["flow"], where["operator"], where["column"]) == ("refused", "named", column)
    assert error is FlowDefinitionError or where["sink"] == "out"


def test_rows_are_distinct_by_columns_with_dots(spark: SparkSession) -> None:
    named = spark.readStream.format("rate").load().selectExpr("value as `a.key`", "timestamp as `a.time`")
    frame = cutline.distinct(named, key="a.key", time="a.time", within="10m")
    assert frame.columns == ["a.key", "a.time"]
