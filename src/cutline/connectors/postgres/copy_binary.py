"""Rows in COPY's binary format: the cheapest on both sides, for simple types.

With the text format PostgreSQL converts a value to the type of the column; with the binary format it does not, so this
is used only if the columns have exactly the types of the rows. See ``postgres.types`` for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

HEADER = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
TRAILER = b"\xff\xff"

_SIMPLE = frozenset(
    {
        "smallint",
        "integer",
        "bigint",
        "real",
        "double precision",
        "boolean",
        "text",
        "bytea",
        "date",
        "timestamp without time zone",
        "timestamp with time zone",
    }
)
#: Counted from 1970 in Arrow and from 2000 in PostgreSQL, whose calendar begins in 4713 BC.
_DAYS, _FIRST_DAY = 10_957, -2_451_545 + 10_957
_MICROSECONDS, _FIRST_MICROSECOND = 946_684_800_000_000, -211_813_488_000_000_000 + 946_684_800_000_000


def fits_binary(rows: Mapping[str, str], table: Mapping[str, str]) -> bool:
    """Whether rows with these PostgreSQL types may be sent in binary to a table with those types."""
    return all(
        kind in _SIMPLE and (table[name] == kind or (kind, table[name]) == ("text", "character varying"))
        for name, kind in rows.items()
    )


def copy_binary(batch: pa.RecordBatch, first_row: int, piece: int) -> bytes:
    """The rows, without header and trailer; each begins with its piece and its number in the piece."""
    import numpy as np

    return binary_rows(batch, np.array([piece]), np.arange(first_row, first_row + batch.num_rows))


def binary_rows(batch: pa.RecordBatch, *before: Any) -> bytes:
    """The rows, each after further bigint columns: one value for every row, or the same one for all."""
    import numpy as np
    import pyarrow as pa

    if not batch.num_rows:
        return b""
    lines = _Lines(batch.num_rows)
    lines.add(np.array([batch.num_columns + len(before)], ">i2"))
    for numbers in before:
        lines.add(np.array([8], ">i4"))
        lines.add(numbers.astype(">i8"))
    for column in batch.columns:
        values = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if _is_text(values.type):
            _add_bytes(lines, values)
        else:
            _add_numbers(lines, values)
    return lines.joined()


class _Lines:
    """Builds all rows side by side: runs of the same width in each row, and between them values of any length."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._run: list[Any] = []
        self._parts: list[Any] = []

    def add(self, values: Any) -> None:
        """One number for each row, or the same one for all."""
        import numpy as np

        self._run.append(np.ascontiguousarray(values).view("u1").reshape(len(values), values.itemsize))

    def add_bytes(self, values: pa.Array) -> None:
        """A large_binary array without nulls."""
        self._end_run()
        self._parts.append(values)

    def joined(self) -> bytes:
        import pyarrow as pa
        import pyarrow.compute as pc

        self._end_run()
        lines = pc.binary_join_element_wise(*self._parts, pa.scalar(b"", pa.large_binary()))
        size_bytes = pc.sum(pc.binary_length(lines)).as_py()
        # Arrow stores them one after the other in one buffer.
        return bytes(lines.buffers()[2].slice(0, size_bytes))

    def _end_run(self) -> None:
        import numpy as np

        if not self._run:
            return
        block = np.empty((self._count, sum(values.shape[1] for values in self._run)), "u1")
        start = 0
        for values in self._run:
            block[:, start : start + values.shape[1]] = values
            start += values.shape[1]
        self._run = []
        self._parts.append(equally_long(block))


def equally_long(block: Any) -> pa.Array:
    """The rows of a matrix of bytes as a large_binary array."""
    import pyarrow as pa

    kind = pa.binary(block.shape[1])
    return pa.Array.from_buffers(kind, len(block), [None, pa.py_buffer(block)]).cast(pa.large_binary())


def _add_bytes(lines: _Lines, column: pa.Array) -> None:
    """Each value after its length; the length of a null is -1."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = column.cast(pa.large_binary())
    lines.add(pc.fill_null(pc.binary_length(values), -1).to_numpy(zero_copy_only=False).astype(">i4"))
    lines.add_bytes(pc.fill_null(values, b""))


def _add_numbers(lines: _Lines, column: pa.Array) -> None:
    import numpy as np
    import pyarrow.compute as pc

    kind, values = _on_the_wire(column)
    if not column.null_count:
        lines.add(np.array([values.itemsize], ">i4"))
        lines.add(values.astype(kind))
        return
    is_there = pc.is_valid(column)
    lines.add(np.where(is_there.to_numpy(zero_copy_only=False), values.itemsize, -1).astype(">i4"))
    matrix = np.ascontiguousarray(values.astype(kind)).view("u1").reshape(len(values), values.itemsize)
    lines.add_bytes(pc.if_else(is_there, equally_long(matrix), b""))


def _on_the_wire(column: pa.Array) -> tuple[str, Any]:
    """The type on the wire, and a numpy array of values of that width; nulls have any value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_, kind = pa.types, column.type
    if is_.is_timestamp(kind):
        numbers = pc.cast(pc.cast(column, pa.timestamp("us", kind.tz), safe=False), pa.int64())
        return ">i8", _since_2000(numbers, _MICROSECONDS, _FIRST_MICROSECOND)
    if is_.is_date(kind):
        numbers = pc.cast(pc.cast(column, pa.date32()), pa.int32())
        return ">i4", _since_2000(numbers, _DAYS, _FIRST_DAY)
    if is_.is_boolean(kind):
        return "u1", _values(pc.cast(column, pa.uint8()))
    if is_.is_int8(kind):
        column = pc.cast(column, pa.int16())
    values = _values(column)
    return values.dtype.newbyteorder(">").str, values


def _since_2000(column: pa.Array, shift: int, first: int) -> Any:
    import pyarrow.compute as pc

    least = pc.min(column).as_py()
    if least is not None and least < first:
        raise SinkError(
            "a date or timestamp lies before the year 4713 BC, where PostgreSQL's calendar begins",
            next_step="filter out or correct such rows in the flow",
        )
    return _values(column) - shift


def _values(column: pa.Array) -> Any:
    import pyarrow.compute as pc

    filled = pc.fill_null(column, 0) if column.null_count else column
    return filled.to_numpy(zero_copy_only=False)


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_ = pa.types
    return any(
        check(kind)
        for check in (
            is_.is_string,
            is_.is_large_string,
            is_.is_string_view,
            is_.is_binary,
            is_.is_large_binary,
            is_.is_binary_view,
            is_.is_fixed_size_binary,
        )
    )
