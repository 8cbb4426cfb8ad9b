"""De-duplication within a watermark: what it drops, and which arguments it refuses."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

import cutline
from cutline.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

SCHEMA = "id string, n long, at timestamp, place struct<city:string>"
GOOD: dict[str, Any] = {"key": ["id"], "time": "at", "within": "10m"}


@pytest.fixture
def rows(spark: SparkSession, tmp_path: Path) -> DataFrame:
    (tmp_path / "in").mkdir()
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    return session.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"key": []}, "there is no key"),
        ({"key": ["id", "other"]}, "no column 'other'"),
        ({"key": "place.city"}, "selected as a column first"),
        ({"time": "when"}, "no column 'when'"),
        ({"time": "n"}, "the column n is no timestamp, but bigint"),
        ({"within": "soon"}, "'soon' is not a duration above zero"),
        ({"within": "-1 minutes"}, "'-1 minutes' is not a duration above zero"),
        ({"within": 0}, "0 is not a duration above zero"),
        ({"within": None}, "None is not a duration above zero"),
    ],
)
def test_arguments_that_make_no_sense_are_named(rows: DataFrame, change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        cutline.distinct(rows, **(GOOD | change))
    assert refused.value.next_step


def test_rows_that_do_not_fit_are_named(spark: SparkSession, rows: DataFrame) -> None:
    with pytest.raises(ConfigError, match="a static DataFrame has no watermark"):
        cutline.distinct(spark.range(3), **GOOD)
    with pytest.raises(ConfigError, match="a watermark already, on at"):
        cutline.distinct(rows.withWatermark("at", "1 hour"), **GOOD)
    hidden = rows.withColumn("later", F.col("at")).withWatermark("later", "1 hour").drop("later")
    with pytest.raises(ConfigError, match="a watermark already, on later"):
        cutline.distinct(hidden, **GOOD)


@pytest.mark.parametrize("within", ["10m", "10 minutes", 600])
def test_a_duration_is_written_as_in_options_or_as_in_spark(rows: DataFrame, within: Any) -> None:
    frame = cutline.distinct(rows, key="id", time="at", within=within)
    assert frame.schema["at"].metadata == {"spark.watermarkDelayMs": 600_000}


def test_a_key_may_come_again_when_it_is_forgotten_and_late_rows_are_dropped(rows: DataFrame, tmp_path: Path) -> None:
    files: list[list[tuple[str | None, int | None]]] = [
        [("a", 0), ("a", 0), ("b", 0), (None, 0), (None, 0), ("no time", None)],
        [("a", 9), ("c", 30)],
        [("d", 31)],
        [("a", 32), ("late", 1), ("no time", None)],
    ]
    for number, file in enumerate(files):
        times = [None if minute is None else datetime(2026, 3, 1, 12, minute, tzinfo=UTC) for _, minute in file]
        found = [{"id": name, "at": at and at.isoformat()} for (name, _), at in zip(file, times, strict=True)]
        path = tmp_path / "in" / f"{number}.json"
        path.write_text("\n".join(map(json.dumps, found)))
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))  # Spark reads them in this order
    table, books = str(tmp_path / "out"), str(tmp_path / "checkpoint")
    frame = cutline.distinct(rows, **GOOD).select("id", F.minute("at").alias("minute"))
    query = frame.writeStream.format("parquet").option("checkpointLocation", books).start(table)
    query.processAllAvailable()
    query.stop()
    published = Counter((row["id"], row["minute"]) for row in rows.sparkSession.read.parquet(table).collect())
    once = [("a", 0), ("b", 0), (None, 0), ("c", 30), ("d", 31), ("a", 32)]
    assert published == Counter([*once, ("no time", None), ("no time", None)])
