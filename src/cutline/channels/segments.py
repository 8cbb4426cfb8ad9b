"""Segments: Arrow IPC files that executors write and read. Imports little, since every Python worker loads it."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.ports.engine import SegmentPlace

#: Rows arrive in small batches; they are written in blocks of about this many.
_ROWS_PER_BLOCK = 65_536


class _ChecksummedFile:
    """A file object that counts and checksums the bytes written."""

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

    def __init__(self, place: SegmentPlace, name: str) -> None:
        self._place = place
        self._name = name
        #: A segment for an object store is written here first, so that the store has all of it or nothing.
        self._spool = None if place.is_folder else Path(tempfile.mkdtemp(prefix="cutline-segment-"))
        self._path = (self._spool or Path(place.url)) / name
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
        try:
            return self._close()
        finally:
            if self._spool is not None:
                shutil.rmtree(self._spool, ignore_errors=True)

    def discard(self) -> None:
        """The task has failed: delete its spool. The driver collects files that are already in the channel's folder."""
        if self._file is not None:
            self._file.close()
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)

    def _close(self) -> dict[str, Any] | None:
        self._flush_block()
        if self._file is None:
            return None
        self._writer.close()
        self._file.close()
        if self._spool is not None:
            from cutline.objects import open_store

            open_store(self._place.url, self._place.options).upload(self._name, self._path)
        return {
            "name": self._name,
            "rows": self._rows,
            "size_bytes": self._file.size_bytes,
            "crc32": self._file.crc32,
        }


def read_segment(place: SegmentPlace, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a segment; a file is memory-mapped rather than copied."""
    import pyarrow as pa

    if place.is_folder:
        with pa.memory_map(str(Path(place.url) / name), "r") as source, pa.ipc.open_stream(source) as reader:
            yield from reader
        return
    from cutline.objects import open_store

    content = open_store(place.url, place.options).read(name)
    with pa.ipc.open_stream(pa.BufferReader(content)) as reader:
        yield from reader


def crc32_of(path: Path) -> int:
    """The checksum of a file's content."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
