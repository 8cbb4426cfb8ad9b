"""A seeded source of invented payments: the same row number gives the same payment, on every machine and every re-run.

For demos, benchmarks and tests. ``spark.readStream.format("cutline_generator")`` with the options
``rows`` (then it is exhausted), ``keys``, ``seed``, ``first`` (number of the first payment), ``rows_per_batch`` (most
per batch), ``rows_per_second`` (pace; 0: as fast as it is read) and ``partitions`` (tasks per batch).
See docs/sources.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cutline.connectors.generator.rows import KIND, begin_of, position_of, settings_of, why_other_rows
from cutline.connectors.source_options import furthest_of, ranges_of, whole_number

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.types import StructType

FORMAT = KIND
SCHEMA = "payment_id long, merchant long, amount long, paid_at timestamp"
_FIRST_PAYMENT_US = 1_767_225_600_000_000  # 2026-01-01
_MICROSECONDS_BETWEEN = 1_000
_ROWS_PER_ARROW_BATCH = 50_000


def payments(first: int, end: int, *, keys: int, seed: int) -> dict[str, np.ndarray]:
    """The payments with numbers in [first, end), as columns. A pure function of its arguments."""
    import numpy as np

    number = np.arange(first, end, dtype=np.uint64)
    with np.errstate(over="ignore"):  # splitmix64 relies on overflow
        mixed = number + np.uint64((seed * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return {
        "payment_id": number.astype(np.int64),
        "merchant": (mixed % np.uint64(keys)).astype(np.int64),
        "amount": ((mixed >> np.uint64(40)) % np.uint64(10_000)).astype(np.int64) + 1,
        "paid_at": _FIRST_PAYMENT_US + number.astype(np.int64) * _MICROSECONDS_BETWEEN,
    }


class _Range(InputPartition):
    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end


class GeneratorSource(DataSource):
    """Invented payments."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return GeneratorReader(self.options)


class GeneratorReader(DataSourceStreamReader):
    """Generates the rows in [start, end). Refuses a position of other settings."""

    def __init__(self, options: Any) -> None:
        self._settings = settings_of(options)
        self._rows_per_batch = whole_number(options, "rows_per_batch", 100_000, least=1)
        self._rows_per_second = _pace(options)
        self._partitions = whole_number(options, "partitions", 2, least=1)
        self._paced: tuple[float, int] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return begin_of(self._settings).as_json()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        row, rows = self._row(start), self._settings.rows
        end = max(row, min(rows, row + self._rows_per_batch, self._due(row)))
        return start if end == row else self.initialOffset() | {"row": end}

    def furthest(self, positions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        old = [position for position in positions if position.keys() == {"row"}]
        found = furthest_of(
            positions,
            KIND,
            is_own=lambda position: position_of(position).is_of(self._settings),
            distance=lambda position: int(position["row"]),
        )
        return found or max(old, key=lambda position: int(position["row"]), default=None)

    def _row(self, offset: dict[str, Any]) -> int:
        if offset.keys() == {"row"}:
            return int(offset["row"])  # written by a version whose positions did not hold the settings
        position = position_of(offset)
        if not position.is_of(self._settings):
            raise ValueError(f"generator, row {position.row}: {why_other_rows(position, self._settings)}")
        return position.row

    def _due(self, row: int) -> int:
        """The last row that the pace allows, counted from when this process began to read."""
        if self._rows_per_second <= 0:
            return self._settings.rows
        now = time.monotonic()
        if self._paced is None:
            self._paced = (now, row)
        began, first = self._paced
        return first + int((now - began) * self._rows_per_second)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [_Range(a, b) for a, b in ranges_of(self._row(start), self._row(end), self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        first, end = int(getattr(partition, "first", 0)), int(getattr(partition, "end", 0))
        its = self._settings
        for begin in range(first, end, _ROWS_PER_ARROW_BATCH):
            stop = min(begin + _ROWS_PER_ARROW_BATCH, end)
            columns = payments(its.first + begin, its.first + stop, keys=its.keys, seed=its.seed)
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(columns["payment_id"]),
                    pa.array(columns["merchant"]),
                    pa.array(columns["amount"]),
                    pa.array(columns["paid_at"], type=pa.timestamp("us", tz="UTC")),
                ],
                names=list(columns),
            )


def _pace(options: Any) -> float:
    text = str(options.get("rows_per_second", 0))
    try:
        pace = float(text)
    except ValueError:
        pace = -1.0
    if not 0 <= pace < float("inf"):
        raise ValueError(f"rows_per_second is {text!r}: use a number from 0 on; 0: as fast as it is read")
    return pace
