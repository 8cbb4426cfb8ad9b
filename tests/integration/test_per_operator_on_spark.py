"""Per-operator mode on real Spark: who has lost its directory goes back alone and repeats its log, exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F

from cutline.flow import Flow
from cutline.model.ids import OperatorId
from cutline.sinks import Delta, Parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from cutline.runtime.handle import RunningFlow

pytestmark = pytest.mark.spark

OPERATORS = ("orders", "first_seen", "totals")


def files_flow(tmp_path: Path) -> Flow:
    """A file source without state; one that remembers keys, with the time of day in its rows; and totals."""
    flow = Flow("shop")
    landing = tmp_path / "landing"
    landing.mkdir(exist_ok=True)

    @flow.operator()
    def orders(spark: SparkSession) -> DataFrame:
        reader = spark.readStream.schema("id BIGINT, item STRING, price BIGINT").option("maxFilesPerTrigger", 1)
        return reader.json(str(landing))

    @flow.operator(inputs=[orders], subtasks=2)
    def first_seen(orders: DataFrame) -> DataFrame:
        return orders.dropDuplicates(["id"]).withColumn("seen_at", F.current_timestamp())

    @flow.operator(inputs=[first_seen], subtasks=2)
    def totals(first_seen: DataFrame) -> DataFrame:
        return first_seen.groupBy("item").agg(F.count("*").alias("orders"), F.sum("price").alias("revenue"))

    flow.sink(first_seen, Parquet(str(tmp_path / "ledger")), name="ledger")
    flow.sink(totals, Delta(str(tmp_path / "totals")), output_mode="update", name="totals")
    return flow


def deliver(tmp_path: Path, *files: int) -> None:
    """Each file has twenty orders, ten of which were delivered with the file before."""
    for number in files:
        rows = [{"id": number * 10 + i, "item": f"item{i % 5}", "price": i} for i in range(20)]
        temp = tmp_path / f"{number}.tmp"
        temp.write_text("\n".join(json.dumps(row) for row in rows))
        temp.rename(tmp_path / "landing" / f"{number:04d}.json")


def start(spark: SparkSession, tmp_path: Path) -> RunningFlow:
    options: dict[str, Any] = {"mode": "per-operator", "checkpoint_interval": 0}
    return files_flow(tmp_path).start(spark=spark, storage=str(tmp_path / "storage"), **options)


def last_batches(run: RunningFlow) -> dict[str, int]:
    return {name: run.status().operators[name].batch for name in OPERATORS}


def assert_right(spark: SparkSession, tmp_path: Path, *, files: int) -> None:
    ledger = spark.read.parquet(str(tmp_path / "ledger")).collect()
    assert sorted(row.id for row in ledger) == list(range((files + 1) * 10))
    published = DeltaTable(str(tmp_path / "totals")).to_pyarrow_table().to_pylist()
    newest: dict[str, int] = {}
    for row in published:
        newest[row["item"]] = max(newest.get(row["item"], 0), row["orders"])
    assert sum(newest.values()) == (files + 1) * 10


@pytest.mark.parametrize("lost", [("orders",), pytest.param(OPERATORS, marks=pytest.mark.soak)])
def test_each_operator_comes_back_alone_and_repeats_its_log_exactly(
    spark: SparkSession, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    run = start(spark, tmp_path)
    deliver(tmp_path, *range(4))
    run.process_all_available()  # with a checkpoint of each operator
    for number in range(4, 14):  # past the tenth file, where Spark compacts its list of files
        deliver(tmp_path, number)
        for operator in OPERATORS:
            run._draining.wait_processed(OperatorId(operator))
    run.stop()
    before = last_batches(run)
    for operator in lost:
        shutil.rmtree(tmp_path / "storage" / "shop" / "spark" / operator)

    run = start(spark, tmp_path)
    assert run.status().recovery.path == "alone"
    assert last_batches(run) == before, "no log goes back"
    run.process_all_available()
    repeated = {name: run._parts.workers.operators[OperatorId(name)].replay.repeated_total for name in OPERATORS}
    assert last_batches(run) == before, "what is repeated is in the logs already"
    assert (repeated["orders"], repeated["first_seen"] > 0) == (0, "first_seen" in lost), "without state, none is"
    deliver(tmp_path, 14, 15)
    run.process_all_available()
    assert run.status().operators["orders"].restarts == 0
    run.stop()
    assert_right(spark, tmp_path, files=16)


def test_an_operator_that_fails_for_good_goes_back_alone_while_all_others_go_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    flow = Flow("alone")
    fuse = tmp_path / "fuse"

    @flow.operator(subtasks=2)
    def numbers(spark: SparkSession) -> DataFrame:
        options = {"rows": 4_000, "keys": 20, "rows_per_batch": 200, "rows_per_second": 1_500}
        return spark.readStream.format("cutline_generator").options(**options).load().dropDuplicates(["payment_id"])

    @flow.operator(inputs=[numbers], subtasks=2)
    def totals(numbers: DataFrame) -> DataFrame:
        path = str(fuse)

        def blow(batches: Any) -> Any:
            import os

            for batch in batches:
                if os.path.exists(path):
                    os.unlink(path)
                    raise ValueError("the fuse has blown")
                yield batch

        rows = numbers.mapInArrow(blow, numbers.schema)
        return rows.groupBy("merchant").agg(F.count("*").alias("payments"))

    flow.sink(numbers, Parquet(str(tmp_path / "ledger")), name="ledger")
    flow.sink(totals, Delta(str(tmp_path / "totals")), output_mode="update", name="totals")
    options: dict[str, Any] = {"mode": "per-operator", "checkpoint_interval": "400ms", "restart_limit": 0}
    run = flow.start(spark=spark, storage=str(tmp_path / "storage"), **options)
    run.trigger_checkpoint()
    others = run._parts.workers.supervisors[OperatorId("numbers")]
    fuse.write_text("burns once")
    while "alone" not in run.status().recovery.counts:
        assert not run.await_termination("50ms")
    run.process_all_available()
    status = run.status()
    run.stop()
    assert run._parts.workers.supervisors[OperatorId("numbers")] is others
    assert others.restarts == 0
    assert status.operators["numbers"].rows == 4_000
    assert sorted(row.payment_id for row in spark.read.parquet(str(tmp_path / "ledger")).collect()) == list(
        range(4_000)
    )
