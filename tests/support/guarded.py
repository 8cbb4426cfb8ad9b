"""A flow whose input is lost: for the tests of replay guards on Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest

from cutline.errors import LostInputError
from cutline.flow import Flow
from cutline.model.layout import Layout
from cutline.runtime.handle import RunningFlow
from cutline.sinks import Parquet
from cutline.storage.local import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Guarded:
    """A flow that publishes the numbers ``n`` of a source; ``feed`` has been called before each checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, read: Callable[[SparkSession], DataFrame]) -> None:
        self._spark = spark
        self._folder = folder
        self._read = read

    def start(self, **options: Any) -> RunningFlow:
        flow = Flow("guarded")

        @flow.operator()
        def rows(spark: SparkSession) -> DataFrame:
            return self._read(spark).selectExpr("cast(n as long) as n")

        flow.sink(rows, Parquet(self._folder / "table"), name="table")
        settings: dict[str, Any] = {
            "storage": str(self._folder / "storage"),
            "checkpoint_interval": 0,
            "retain_checkpoints": 5,
        }
        return flow.start(spark=self._spark, **(settings | options))

    def read_twice(self, feed: Callable[[], None]) -> int:
        """Returns the checkpoint between the two."""
        feed()
        run = self.start()
        run.process_all_available()
        epoch = run.trigger_checkpoint()
        feed()
        run.process_all_available()
        run.trigger_checkpoint()
        run.stop()
        return epoch

    def give_up(self, epoch: int, what: str, parts: int) -> list[int]:
        """Refused by the range; and without it, it stands everywhere. Returns what is published then."""
        with pytest.raises(LostInputError) as refused:
            self.start(restore_to=epoch)
        assert f"since epoch {epoch} is gone: {what}; a restore would silently lose" in str(refused.value)
        run = self.start(restore_to=epoch, missing_input="continue")
        (lost,) = run.status().recovery.lost_input
        assert (lost.operator, lost.what, lost.parts) == ("rows", what, parts)
        (recorded,) = LocalStore.reading(self.layout).generations.load_all()[-1].lost_input
        assert (recorded.what, recorded.parts) == (what, parts)
        counted = f'cutline_lost_input_total{{flow="guarded",operator="rows"}} {parts}.0'
        assert counted.encode() in generate_latest(run.metrics.registry)
        run.process_all_available()
        run.stop()
        return sorted(row["n"] for row in self._spark.read.parquet(str(self._folder / "table")).collect())

    @property
    def layout(self) -> Layout:
        return Layout(self._folder / "storage", "guarded")
