"""Segments: Arrow IPC files written by executors, and read back by them. Imports little: workers start with it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows arrive in small batches; they are written in blocks of about this many.
_ROWS_PER_BLOCK = 65_536


class _ChecksummedFile:
    """A file object that keeps count and checksum of what passes."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by close)
        self.size_bytes = 0
        self.crc32 = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size_bytes += len(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def tell(self) -> int:
        return self.size_bytes

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


class SegmentWriter:
    """Writes the rows of one task into one segment, which exists only if there were rows."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._name = name
        self._file: _ChecksummedFile | None = None
        self._writer: Any = None
        self._rows = 0
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        self._held.append(batch)
        self._held_rows += batch.num_rows
        if self._held_rows >= _ROWS_PER_BLOCK:
            self._flush_block()

    def _flush_block(self) -> None:
        import pyarrow as pa

        if not self._held:
            return
        if self._file is None:
            self._file = _ChecksummedFile(self._path)
            self._writer = pa.ipc.new_stream(self._file, self._held[0].schema)
        self._writer.write_table(pa.Table.from_batches(self._held).combine_chunks())
        self._rows += self._held_rows
        self._held, self._held_rows = [], 0

    def close(self) -> dict[str, Any] | None:
        """Make the segment durable and describe it (fields of ``Segment``); None when there were no rows."""
        self._flush_block()
        if self._file is None:
            return None
        self._writer.close()
        self._file.close()
        return {
            "name": self._name,
            "rows": self._rows,
            "size_bytes": self._file.size_bytes,
            "crc32": self._file.crc32,
        }


def read_segment(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a segment, mapped rather than copied."""
    import pyarrow as pa

    with pa.memory_map(str(path), "r") as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def crc32_of(path: Path) -> int:
    """The checksum of a file's content."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
