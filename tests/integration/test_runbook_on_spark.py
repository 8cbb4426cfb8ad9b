"""The sections of the runbook that start flows: each situation is produced on real Spark, its commands run as written.

"A stuck checkpoint" and "A full disk" are in tests/scenarios/test_runbook.py.
"""

from __future__ import annotations

import json
import runpy
import shutil
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cutline
from cutline.flow import Flow
from cutline.model.ids import FlowName, OperatorId
from cutline.model.layout import Layout
from cutline.runtime.handle import RunningFlow
from tests.support.damage import flip_a_byte
from tests.support.doc_commands import Command, Shell, perform, read_steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.soak]

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "runbook.md"
#: Commands that no test runs, and why.
NOT_RUN: dict[str, str] = {}

FLOW = """
import cutline
from pyspark.sql import functions as F

flow = cutline.Flow("payments")


@flow.operator()
def orders(spark):
    return spark.readStream.schema("shop string, cents long").json("FOLDER/in")


@flow.operator(inputs=[orders], subtasks=2)
def totals(orders):
    return orders.groupBy("shop").agg(F.sum("cents").alias("cents"))


flow.sink(totals, cutline.sinks.Delta("FOLDER/out/totals", mode="upsert", key=["shop"]), output_mode="update")
"""


class Place:
    """A host: a folder with the flow's code, its input, its storage and cutline.toml."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.spark = spark
        (folder / "in").mkdir(parents=True)
        self.write("flow.py", FLOW)
        self.configure()

    def write(self, name: str, text: str) -> None:
        # The session of the tests was started in another folder.
        (self.folder / name).write_text(text.replace("FOLDER", str(self.folder)))

    def configure(self, storage: str = "data", **more: str) -> None:
        values = {"storage": str(self.folder / storage), "checkpoint_interval": "0s", **more}
        self.write("cutline.toml", "".join(f'{name} = "{value}"\n' for name, value in values.items()))

    def layout(self, storage: str = "data") -> Layout:
        return Layout(self.folder / storage, FlowName("payments"))

    def add_input(self, number: int) -> None:
        rows = [{"shop": shop, "cents": number} for shop in ("bakery", "bikes")]
        self.write(f"in/{number}.json", "".join(json.dumps(row) + "\n" for row in rows))

    def run(self, work: Callable[[RunningFlow], object], code: str = "flow.py") -> None:
        """In the session of the tests: a command of its own would take ten seconds to start Spark."""
        with chdir(self.folder):
            (flow,) = [one for one in runpy.run_path(code).values() if isinstance(one, Flow)]
            run = flow.start(spark=self.spark)
            try:
                work(run)
            finally:
                run.stop()

    def take(self, *numbers: int) -> Callable[[RunningFlow], None]:
        """A checkpoint for each of these inputs."""

        def work(run: RunningFlow) -> None:
            for number in numbers:
                self.add_input(number)
                run.process_all_available()

        return work

    def totals(self) -> dict[str, int]:
        rows = cutline.read(cutline.sinks.Delta(self.folder / "out" / "totals")).to_arrow().to_pylist()
        return {row["shop"]: row["cents"] for row in rows}

    def wait_for(self, totals: dict[str, int]) -> None:
        deadline = time.monotonic() + 100
        while (found := self.totals()) != totals:
            assert time.monotonic() < deadline, (found, [log.read_text() for log in self.folder.glob("*.log")])
            time.sleep(0.2)

    def follow(
        self,
        section: str,
        before: Callable[[Shell], object] = lambda _: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """``before``: what happens in the same shell before the person comes; ``after``: while her command runs."""
        steps = read_steps(RUNBOOK, section=section)
        with Shell(self.folder) as shell:
            before(shell)
            ran = list(perform(steps, shell, not_run=NOT_RUN))
            after()
        assert ran == [step for step in steps if isinstance(step, Command) and step.text not in NOT_RUN]


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path / "host", spark)


def both(cents: int) -> dict[str, int]:
    return {"bakery": cents, "bikes": cents}


def test_a_bad_deploy(place: Place) -> None:
    place.run(place.take(1, 2))
    place.write("good.py", FLOW)
    place.write("flow.py", FLOW.replace('F.sum("cents")', 'F.sum(F.col("cents") * 100)'))
    place.configure(checkpoint_interval="1s")
    for number in (4, 8):
        place.add_input(number)

    def run_the_bad_one(shell: Shell) -> None:
        shell.run("cutline run flow.py > run.log 2>&1 &")
        place.wait_for(both(3 + 1200))

    place.follow("A bad deploy", run_the_bad_one, lambda: place.wait_for(both(15)))


def test_a_lost_host(place: Place) -> None:
    place.configure(remote=str(place.folder / "bucket"))

    def work(run: RunningFlow) -> None:
        place.take(1, 2)(run)
        run.wait_remote(run.checkpoints()[0].epoch, timeout=60)
        place.take(4)(run)

    place.run(work)
    shutil.rmtree(place.folder / "data")
    place.follow("A lost host")
    assert place.totals() == both(7)


def test_a_corrupt_file(place: Place) -> None:
    place.run(place.take(1, 2, 4))
    assert flip_a_byte(place.layout(), OperatorId("totals")) == 3
    place.follow("A corrupt file")
    assert place.totals() == both(7)


def test_expired_input(place: Place) -> None:
    place.run(place.take(1, 2, 4))
    (place.folder / "in" / "2.json").unlink()
    place.follow("Expired input")
    assert place.totals() == both(5)


def test_two_hosts(place: Place) -> None:
    place.configure(remote=str(place.folder / "bucket"))

    def work(run: RunningFlow) -> None:
        place.take(1, 2)(run)
        run.wait_remote(run.checkpoints()[0].epoch, timeout=60)

    place.run(work)
    place.configure("other", remote=str(place.folder / "bucket"))

    def go_on(run: RunningFlow) -> None:
        place.take(4)(run)
        run.wait_remote(run.checkpoints()[0].epoch, timeout=60)

    place.run(go_on)
    place.configure(remote=str(place.folder / "bucket"))
    place.add_input(8)
    place.follow("Two hosts")
    assert place.totals() == both(15)


def test_every_section_is_followed_by_a_test() -> None:
    sections = {step.section for step in read_steps(RUNBOOK)}
    here = {"A bad deploy", "A lost host", "A corrupt file", "Expired input", "Two hosts"}
    assert sections == here | {"A stuck checkpoint", "A full disk"}
