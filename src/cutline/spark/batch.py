"""One micro-batch inside foreachBatch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame

from cutline.base.decoding import decoder_of
from cutline.model.ids import BatchId, OperatorId, Position
from cutline.ports.engine import LiveDirs, StagedTask, StageJob
from cutline.spark.executor_staging import REPORT_SCHEMA, stage_rows
from cutline.spark.versions import map_in_arrow

_PLAIN_NAME = re.compile(r"\w+")


class SparkBatch:
    """A micro-batch inside ``foreachBatch``: Spark has written its offsets and not yet its commit."""

    def __init__(
        self, frame: DataFrame, batch: BatchId, spark_checkpoint_dir: Path, live_dirs: LiveDirs | None
    ) -> None:
        self._frame = frame
        self._batch = batch
        self._spark_checkpoint_dir = spark_checkpoint_dir
        self._live_dirs = live_dirs

    @property
    def batch(self) -> BatchId:
        return self._batch

    def positions(self) -> Mapping[OperatorId, Position]:
        """From Spark's own offset log, which a re-run of the batch would read too."""
        offsets = [json.loads(line) for line in self._offsets_lines()[2:] if line.startswith("{")]
        return {
            OperatorId(offset["channel"]): Position(offset["position"]) for offset in offsets if "channel" in offset
        }

    def watermark_ms(self) -> int:
        return int(json.loads(self._offsets_lines()[1]).get("batchWatermarkMs", 0))

    def _offsets_lines(self) -> list[str]:
        if self._live_dirs is not None:
            return self._live_dirs.read(self._spark_checkpoint_dir, f"offsets/{self._batch}").decode().splitlines()
        return (self._spark_checkpoint_dir / "offsets" / str(self._batch)).read_text().splitlines()

    def stage(self, job: StageJob) -> list[StagedTask]:
        rows = map_in_arrow(_by_position(self._frame), stage_rows(job), REPORT_SCHEMA).collect()
        return [decoder_of(StagedTask).decode(row["report"]) for row in rows]

    def run_to_end(self) -> None:
        _by_position(self._frame).write.format("noop").mode("overwrite").save()


def _by_position(frame: DataFrame) -> DataFrame:
    """The frame with names that mean themselves.

    ``mapInArrow`` looks every column up by its name, in which ``a.b``, ``*``, a backtick and names that differ only in
    case mean something else. The executors give the rows their names again.
    """
    names = frame.columns
    are_plain = all(_PLAIN_NAME.fullmatch(name) for name in names)
    if are_plain and len({name.lower() for name in names}) == len(names):
        return frame
    return frame.toDF(*(f"c{number}" for number in range(len(names))))
