"""Per-file statistics in Delta's form, taken from the Parquet footer that was just written.

A wrong bound makes a reader skip rows that match its filter, so uncertain bounds are left out: they are optional in
Delta. Where the format is coarser than the data, bounds are widened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

#: Delta's own default for how many columns get statistics.
MOST_COLUMNS = 32
#: Longer strings are truncated, as Delta's other writers do; statistics are part of every snapshot.
MOST_CHARACTERS = 32

_LAST_CHARACTER = "\U0010ffff"
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (a stand-in for both zoned and zoneless microseconds)
Path = tuple[str, ...]


def delta_stats(metadata: Any, schema: pa.Schema, *, has_nan: set[str]) -> str:
    """The ``stats`` of an add action. ``has_nan``: float columns whose bounds Parquet computed without their NaNs."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    for index, (path, kind) in enumerate(_leaves(schema)):
        if index >= MOST_COLUMNS:
            break
        if kind is None:
            continue
        chunks = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(chunk is None or not chunk.has_null_count for chunk in chunks):
            continue
        null_count = sum(chunk.null_count for chunk in chunks)
        _put(nulls, path, null_count)
        # A chunk of nulls only has no bounds and constrains nothing; any other without bounds spoils the column.
        bounded = [chunk for chunk in chunks if chunk.num_values]
        if not bounded or any(not chunk.has_min_max for chunk in bounded) or _may_hide_nan(kind, path, has_nan):
            continue
        low = _lower(kind, bounded)
        high = _upper(kind, bounded)
        if low is not None and high is not None:
            _put(least, path, low)
            _put(most, path, high)
    stats = {"numRecords": metadata.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return msgspec.json.encode(stats).decode()


def _leaves(schema: pa.Schema) -> Iterator[tuple[Path, pa.DataType | None]]:
    """The Parquet columns of a schema in file order; the type is None below a list or map (Delta has no such stats)."""
    for field in schema:
        yield from _leaves_of((field.name,), field.type, flat=True)


def _leaves_of(path: Path, kind: pa.DataType, *, flat: bool) -> Iterator[tuple[Path, pa.DataType | None]]:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        for child in kind:
            yield from _leaves_of((*path, child.name), child.type, flat=flat)
    elif pa.types.is_map(kind):
        yield from _leaves_of(path, kind.key_type, flat=False)
        yield from _leaves_of(path, kind.item_type, flat=False)
    elif pa.types.is_list(kind):
        yield from _leaves_of(path, kind.value_type, flat=False)
    else:
        yield path, kind if flat else None


def _may_hide_nan(kind: pa.DataType, path: Path, has_nan: set[str]) -> bool:
    """Parquet's bounds ignore NaN, while Spark sorts it above everything."""
    import pyarrow as pa

    return pa.types.is_floating(kind) and (len(path) > 1 or path[0] in has_nan)


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _lower(kind: pa.DataType, chunks: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return _timestamp(min(chunk.min_raw for chunk in chunks) // 1_000, zoned=kind.tz is not None)
    if pa.types.is_date(kind):
        return _date(min(chunk.min_raw for chunk in chunks))
    if pa.types.is_string(kind):
        return min(chunk.min for chunk in chunks)[:MOST_CHARACTERS]
    return _number(kind, min(chunk.min for chunk in chunks))


def _upper(kind: pa.DataType, chunks: list[Any]) -> Any:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        # Statistics hold milliseconds: round up, or rows within the last one would be skipped.
        return _timestamp(-(-max(chunk.max_raw for chunk in chunks) // 1_000), zoned=kind.tz is not None)
    if pa.types.is_date(kind):
        return _date(max(chunk.max_raw for chunk in chunks))
    value = max(chunk.max for chunk in chunks)
    if not pa.types.is_string(kind):
        return _number(kind, value)
    if len(value) <= MOST_CHARACTERS:
        return value
    return None if value[MOST_CHARACTERS] == _LAST_CHARACTER else value[:MOST_CHARACTERS] + _LAST_CHARACTER


def _timestamp(milliseconds: int, *, zoned: bool) -> str | None:
    try:
        text = (_EPOCH + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds")
    except OverflowError:  # a year that Python cannot represent
        return None
    return text + "Z" if zoned else text


def _date(days: int) -> str | None:
    try:
        return (date(1970, 1, 1) + timedelta(days=days)).isoformat()
    except OverflowError:
        return None


def _number(kind: pa.DataType, value: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_floating(kind):
        return value if math.isfinite(value) else None
    if pa.types.is_decimal(kind):
        # Written out in full: not every reader of decimals takes 1E-7.
        return msgspec.Raw(f"{value:f}".encode())
    return value if pa.types.is_integer(kind) else None  # bounds of booleans and binaries are of no use
