"""Removes rows that a producer sent twice: Spark's de-duplication within a watermark, with its arguments checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import TimestampNTZType, TimestampType

from cutline.config.values import parse_duration_ms
from cutline.errors import ConfigError
from cutline.spark.query_plan import WATERMARK_MARK, watermarked_columns


def distinct(rows: DataFrame, *, key: str | Sequence[str], time: str, within: str | float) -> DataFrame:
    """Keep only the first of the rows that have the same key and times at most ``within`` apart.

    The keys seen are state like any other: every checkpoint contains them, and a restore restores them. A key expires
    some time after ``within``, not immediately. ``within`` is also the watermark's delay: rows that are older than the
    newest by more than that may be dropped as late. ``"10m"``, ``"10 minutes"``, or a number of seconds.
    """
    keys = [key] if isinstance(key, str) else list(key)
    _check_frame(rows)
    _check_keys(rows, keys)
    _check_time(rows, time)
    watermarked = _with_watermark(rows, time, within)
    return watermarked.dropDuplicatesWithinWatermark(keys)


def _check_frame(rows: Any) -> None:
    if not isinstance(rows, DataFrame) or not rows.isStreaming:
        kind = "a static DataFrame" if isinstance(rows, DataFrame) else type(rows).__name__
        raise ConfigError(
            f"distinct: {kind} has no watermark",
            next_step="pass a streaming DataFrame; for a static one, use rows.dropDuplicates(key)",
        )
    if found := watermarked_columns(rows):
        raise ConfigError(
            f"distinct: the rows have a watermark already, on {', '.join(found)}; a second one would change the first",
            next_step="leave out withWatermark, which distinct sets itself; put a watermark with another delay "
            "into another operator",
        )


def _check_keys(rows: DataFrame, keys: Sequence[str]) -> None:
    if not keys:
        raise ConfigError("distinct: there is no key", next_step='name its columns: key=["order_id"]')
    for name in keys:
        if name not in rows.columns:
            raise _unknown_column("key", name, rows)


def _check_time(rows: DataFrame, time: str) -> None:
    if time not in rows.columns:
        raise _unknown_column("time", time, rows)
    kind = rows.schema[time].dataType
    if not isinstance(kind, TimestampType | TimestampNTZType):
        raise ConfigError(
            f"distinct: the column {time} is no timestamp, but {kind.simpleString()}",
            next_step=f'convert it first: rows.withColumn("{time}", …cast("timestamp"))',
        )


def _unknown_column(argument: str, name: object, rows: DataFrame) -> ConfigError:
    return ConfigError(
        f"distinct: {argument}: the rows have no column {name!r}",
        next_step=f"the columns are {', '.join(rows.columns)}; a field of a struct must be selected as a column first",
    )


def _with_watermark(rows: DataFrame, time: str, within: str | float) -> DataFrame:
    try:
        delay = f"{parse_duration_ms(within, option='within')} milliseconds"
    except ConfigError:
        delay = str(within)  # possibly in Spark's notation
    try:
        watermarked = rows.withWatermark(f"`{time.replace('`', '``')}`", delay)  # the column, not a field of a struct
        is_positive = int(watermarked.schema[time].metadata[WATERMARK_MARK]) > 0
    except (PySparkException, Py4JJavaError) as error:
        raise _bad_duration(within) from error
    if not is_positive:
        raise _bad_duration(within)
    return watermarked


def _bad_duration(within: object) -> ConfigError:
    return ConfigError(
        f"distinct: within: {within!r} is not a duration above zero",
        next_step='write for example "10m" or "10 minutes": the longest time after which a producer may send again',
    )
