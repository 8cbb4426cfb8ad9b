"""Errors of operator functions on real Spark, as a person at the terminal sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline import Flow, sinks
from cutline.errors import ConfigError, FlowDefinitionError, FlowFailedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FLOW = """
from pyspark.sql import functions as F
from pyspark.sql.types import LongType
from cutline import Flow, sinks

flow = Flow("payments")


@flow.operator()
def rows(spark):
    return spark.readStream.format("cutline_generator").options(rows=10).load()


@F.udf(LongType())
def broken(cents):
    raise ValueError(f"bad row [red] {cents}")


@flow.operator(inputs=[rows])
def totals(rows):
    return rows.select(broken(F.lit(7)).alias("b"))


flow.sink(totals, sinks.Parquet("out"))
"""


def test_a_function_that_raises_in_a_batch_is_reported_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    options = ["--storage", "data", "--set", "restart_limit=0", "--checkpoint-interval", "60s", "--until-done"]
    told = subprocess.run(
        [sys.executable, "-m", "cutline.cli.main", "run", "flow.py", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert told.returncode == 1
    error = told.stderr[told.stderr.index("error: ") :]
    assert error.startswith("error: ValueError: bad row [red] 7 (flow.py, line 16, in broken); whole trace: ")
    assert len(error.splitlines()) <= 3
    assert "flow=payments, operator=totals" in error and "Next: " in error
    assert "Traceback" not in told.stderr and "\tat org.apache" not in told.stderr
    (trace,) = (tmp_path / "data" / "payments" / "traces").glob("*.txt")
    assert str(trace) in error
    assert trace.read_text().count("Traceback") >= 2


def declared(function: Any, tmp_path: Path) -> Flow:
    flow = Flow("payments")
    flow.operator("totals")(function)
    flow.sink("totals", sinks.Parquet(tmp_path / "out"))
    return flow


def test_a_function_that_raises_while_it_is_planned_is_named(spark: SparkSession, tmp_path: Path) -> None:
    def broken(spark: SparkSession) -> DataFrame:
        raise ValueError("bad plan")

    with pytest.raises(FlowDefinitionError) as caught:
        declared(broken, tmp_path).start(spark=spark, storage=tmp_path)
    assert caught.value.what.startswith(f"ValueError: bad plan ({__file__}, line ")
    assert caught.value.what.endswith("in broken), raised by the operator's function")
    trace = caught.value.where.pop("trace")
    assert caught.value.where == {"flow": "payments", "operator": "totals"}
    assert isinstance(trace, Path) and trace.parent == tmp_path / "payments" / "traces"
    assert "ValueError: bad plan" in trace.read_text()


def test_an_analysis_error_is_one_line(spark: SparkSession, tmp_path: Path) -> None:
    def broken(spark: SparkSession) -> DataFrame:
        return spark.readStream.format("cutline_generator").load().select("nosuch")

    with pytest.raises(FlowDefinitionError, match=r"AnalysisException: .*nosuch.* in broken") as caught:
        declared(broken, tmp_path).start(spark=spark, storage=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_error_that_cutline_raises_in_a_function_gets_flow_and_operator(spark: SparkSession, tmp_path: Path) -> None:
    def broken(spark: SparkSession) -> DataFrame:
        raise ConfigError("this source needs an address", next_step="set it")

    with pytest.raises(ConfigError) as caught:
        declared(broken, tmp_path).start(spark=spark, storage=tmp_path)
    assert caught.value.where == {"flow": "payments", "operator": "totals"}
    assert str(caught.value) == "this source needs an address (flow=payments, operator=totals). Next: set it"


def test_an_expression_that_fails_in_a_batch_is_named(spark: SparkSession, tmp_path: Path) -> None:
    def broken(spark: SparkSession) -> DataFrame:
        return (
            spark.readStream.format("cutline_generator")
            .options(rows=10)
            .load()
            .selectExpr("1 / (amount - amount) AS x")
        )

    run = declared(broken, tmp_path).start(
        spark=spark, storage=tmp_path, checkpoint_interval=0, restart_limit=0, restart_backoff="10ms"
    )
    with pytest.raises(FlowFailedError) as caught:
        run.await_termination("120s")
    assert caught.value.what.startswith("ArithmeticException: [DIVIDE_BY_ZERO] Division by zero.")
    assert len(str(caught.value).splitlines()) <= 3


def test_a_session_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlowDefinitionError, match=r"flow\.start: spark='local' is not a SparkSession"):
        declared(lambda spark: spark, tmp_path).start(spark="local", storage=tmp_path)  # type: ignore[arg-type]
