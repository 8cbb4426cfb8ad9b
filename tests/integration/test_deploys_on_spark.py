"""A bad deploy on real Spark: the file of a flow changes, and the flow is restored to what it was before."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cutline.cli.main import app
from cutline.cli.running.run import load_flow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.runtime.handle import RunningFlow

pytestmark = pytest.mark.spark

FILE = """\
from pathlib import Path
import cutline
from pyspark.sql import functions as F

HERE = Path(__file__).parent
flow = cutline.Flow("sales")

@flow.operator()
def orders(spark):
    return spark.readStream.schema("shop STRING, amount BIGINT").json(str(HERE / "in"))

@flow.operator(inputs=[orders], subtasks=1, output_mode="update")
def totals(orders):
    return orders.groupBy("shop").agg(F.sum("amount").alias("amount"))

flow.sink(totals, cutline.sinks.SQLite(HERE / "sales.db", "totals", mode="upsert", key=["shop"]))
"""


def arrive(folder: Path, name: str, **amounts: int) -> None:
    (folder / "in").mkdir(exist_ok=True)
    rows = (json.dumps({"shop": shop, "amount": amount}) for shop, amount in amounts.items())
    (folder / "in" / name).write_text("\n".join(rows))


def table(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "sales.db")) as database:
        return dict(database.execute("SELECT shop, amount FROM totals"))


def start(spark: SparkSession, folder: Path, text: str) -> RunningFlow:
    path = folder / "sales.py"
    path.write_text(text)
    flow = load_flow(path, None)
    return flow.start(spark=spark, storage=str(folder / "data"), checkpoint_interval=0)


@pytest.mark.soak  # by commands: test_two_in_the_morning
def test_after_a_bad_deploy_the_flow_is_restored_to_before_it(spark: SparkSession, tmp_path: Path) -> None:
    arrive(tmp_path, "1.json", north=5, south=7)
    run = start(spark, tmp_path, FILE)
    run.process_all_available()
    run.stop()
    good = run.status().code
    assert table(tmp_path) == {"north": 5, "south": 7}

    arrive(tmp_path, "2.json", north=3, south=9)
    run = start(spark, tmp_path, FILE.replace("F.sum(", "F.max("))  # the columns are the same: Spark objects to nothing
    code = run.status().code
    assert good is not None
    assert code is not None
    assert code.change == "code changed since epoch 1: operators totals (function)"
    run.process_all_available()
    run.stop()
    assert table(tmp_path) == {"north": 5, "south": 9}, "it has continued with the old sums, and is wrong"

    told = CliRunner().invoke(
        app, ["restore", "--flow", "sales", "--to", "before-last-deploy", "--storage", str(tmp_path / "data")]
    )
    assert f"restores epoch 1 (savepoint {code.savepoint}, code {good.hash})" in told.stdout
    run = start(spark, tmp_path, FILE)
    assert table(tmp_path) == {"north": 5, "south": 7}, "readers see the table before the deploy"
    run.process_all_available()
    run.stop()
    assert table(tmp_path) == {"north": 8, "south": 16}
    assert run.status().code.hash == good.hash  # type: ignore[union-attr]
    made_by = {int(one.epoch): one.code for one in run.checkpoints()}
    assert made_by[1] == made_by[max(made_by)] == good.hash
    assert code.hash in made_by.values()
