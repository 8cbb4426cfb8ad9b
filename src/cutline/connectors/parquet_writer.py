"""Executor side of the file sinks: streams Arrow batches of one task into durable Parquet files.

Imported by every Spark worker that writes, so pyarrow is imported only when rows arrive.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.base.durable import fsync_dir, fsync_file, make_dir
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.model.staging import Piece
    from cutline.ports.sinks import StageAttempt

MEBIBYTE = 1 << 20

#: Rows of a file are buffered until they fill a row group of this size: small groups read slowly.
ROW_GROUP_BYTES = 32 * MEBIBYTE
#: Rows that one task buffers, over all its files.
BUFFER_BYTES = 96 * MEBIBYTE
#: Files one task keeps open; with more partition values than this, a value may get several files.
MOST_OPEN_FILES = 64

#: How Hive, Spark and pyarrow spell a null in a folder name.
NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
# The characters that Spark escapes. It undoes the escapes byte by byte, so nothing beyond ASCII may be escaped.
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{}\[\]^]")

Key = tuple[str | None, ...]


def escape(text: str) -> str:
    """A column name or value as part of a Hive-style folder name."""
    return _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetStager:
    """Opens a writer per task. Picklable; holds only what the writer needs."""

    root: str
    #: Below ``root``; ``{generation}`` and ``{batch}`` are filled in. Readers of the sink must not read it.
    folder: str
    sink: str
    #: Serialized Arrow schema of the files, partition columns included.
    schema_ipc: bytes
    partition_by: tuple[str, ...] = ()
    #: Columns that identify a row, so that a null in one is refused.
    key: tuple[str, ...] = ()
    #: Columns whose values become Python objects when they are published: years that Python lacks are refused.
    in_calendar: tuple[str, ...] = ()
    #: Whether pieces carry Delta's statistics.
    has_stats: bool = False
    #: Whether files also hold the partition columns. Otherwise readers know their values by the folders' names only,
    #: which do not tell an empty string from a null.
    keeps_partition_columns: bool = False
    row_group_bytes: int = ROW_GROUP_BYTES
    buffer_bytes: int = BUFFER_BYTES
    most_open_files: int = MOST_OPEN_FILES

    def open(self, attempt: StageAttempt) -> ParquetWriter:
        return ParquetWriter(self, attempt)

    def partition_value(self, value: Any) -> str | None:
        """A partition value as pieces name it."""
        from cutline.connectors.rows import partition_text

        return "" if value == "" and self.keeps_partition_columns else partition_text(value)


@dataclass(slots=True)
class _Part:
    """The rows of one partition value (or of all, without partitions): the buffered ones, and the file of the rest."""

    key: Key
    held: list[Any] = field(default_factory=list)
    held_bytes: int = 0
    path: Path | None = None
    writer: Any = None
    #: Filled by pyarrow when the file is closed.
    footers: list[Any] = field(default_factory=list)
    has_nan: set[str] = field(default_factory=set)


class ParquetWriter:
    """Takes the rows of one task. Memory is bounded by the stager's limits, whatever the number of rows."""

    def __init__(self, stager: ParquetStager, attempt: StageAttempt) -> None:
        import pyarrow as pa

        from cutline.connectors.rows import has_times

        self._stager = stager
        self._root = Path(stager.root)
        self._folder = self._root / stager.folder.format(generation=attempt.generation, batch=attempt.batch)
        self._stem = _file_stem(stager, attempt)
        self._schema = pa.ipc.read_schema(pa.BufferReader(stager.schema_ipc))
        dropped = () if stager.keeps_partition_columns else stager.partition_by
        self._columns = [name for name in self._schema.names if name not in dropped]
        self._file_schema = pa.schema([self._schema.field(name) for name in self._columns])
        self._floats = [f.name for f in self._file_schema if pa.types.is_floating(f.type)] if stager.has_stats else []
        self._times = [name for name in stager.in_calendar if has_times(self._schema.field(name).type)]
        self._parts: dict[Key, _Part] = {}
        self._held_bytes = 0
        self._open_files = 0
        self._files_begun = 0
        self._pieces: list[Piece] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch. Its rows may stay in memory until ``close``."""
        if not batch.num_rows:
            return
        rows = conform(batch, self._schema, self._root)
        for name in self._stager.key:
            self._check_key(rows, name)
        for name in self._times:
            check_calendar(rows, name, self._root)
        if not self._stager.partition_by:
            self._hold((), rows)
            return
        for key, part in self._split(rows):
            self._hold(key, part)

    def close(self) -> list[Piece]:
        """Write the buffered rows, make all files and their folders durable, and describe the files."""
        for part in list(self._parts.values()):
            self._flush(part)
            self._finish(part)
        folders = {parent for piece in self._pieces for parent in (self._root / piece["path"]).parents}
        for folder in sorted(folders, reverse=True):
            if folder == self._root or self._root in folder.parents:
                fsync_dir(folder)
        return self._pieces

    # ------------------------------------------------------------------ rows

    def _check_key(self, rows: pa.RecordBatch, name: str) -> None:
        import pyarrow.compute as pc

        column = rows.column(name)
        has_none = column.null_count > 0
        is_folder = name in self._stager.partition_by and not self._stager.keeps_partition_columns
        if not has_none and is_folder and str(column.type) == "string":
            has_none = pc.any(pc.equal(column, "")).as_py()  # as a partition value it is read as null
        if has_none:
            raise SinkError(
                "a row has no value in a key column, so the row that it replaces is unknown",
                next_step="filter such rows out in the flow, or give them a value (coalesce)",
                column=name,
                path=self._root,
            )

    def _split(self, rows: pa.RecordBatch) -> list[tuple[Key, pa.RecordBatch]]:
        """One batch per combination of partition values; rows keep their order."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        values = [rows.column(name) for name in self._stager.partition_by]
        codes = np.zeros(rows.num_rows, dtype=np.int64)
        for column in values:
            encoded = pc.dictionary_encode(column, null_encoding="encode")
            indices = encoded.indices.to_numpy(zero_copy_only=False)
            # Renumbered from 0 after each column, so that many columns cannot overflow the code.
            _, codes = np.unique(codes * max(len(encoded.dictionary), 1) + indices, return_inverse=True)
        order = np.argsort(codes, kind="stable")
        ends = [*(np.flatnonzero(np.diff(codes[order])) + 1), len(order)]
        payload = rows.select(self._columns)
        result, start = [], 0
        for end in ends:
            key = tuple(self._stager.partition_value(column[int(order[start])].as_py()) for column in values)
            result.append((key, payload.take(pa.array(order[start:end]))))
            start = end
        return result

    def _hold(self, key: Key, rows: pa.RecordBatch) -> None:
        part = self._parts.setdefault(key, _Part(key))
        part.held.append(rows)
        part.held_bytes += rows.nbytes
        self._held_bytes += rows.nbytes
        if part.held_bytes >= self._stager.row_group_bytes:
            self._flush(part)
        elif self._held_bytes >= self._stager.buffer_bytes:
            self._flush(max(self._parts.values(), key=lambda other: other.held_bytes))

    # ------------------------------------------------------------------ files

    def _flush(self, part: _Part) -> None:
        """Write the buffered rows as one row group."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not part.held:
            return
        if part.writer is None:
            self._begin(part)
        table = pa.Table.from_batches(part.held, self._file_schema)
        for name in self._floats:
            if name not in part.has_nan and pc.any(pc.is_nan(table[name])).as_py():
                part.has_nan.add(name)
        part.writer.write_table(table, row_group_size=table.num_rows)
        self._held_bytes -= part.held_bytes
        part.held, part.held_bytes = [], 0

    def _begin(self, part: _Part) -> None:
        import pyarrow.parquet as pq

        if self._open_files >= self._stager.most_open_files:
            # Parts are in the order of their first row; closing the oldest suits sorted rows.
            self._finish(next(other for other in self._parts.values() if other.writer is not None))
        names = zip(self._stager.partition_by, part.key, strict=True)
        folder = self._folder.joinpath(*(f"{escape(name)}={_folder_value(value)}" for name, value in names))
        part.path = folder / f"{self._stem}-{self._files_begun}.parquet"
        self._files_begun += 1
        try:
            make_dir(folder)
            # Exclusive: an attempt that is not unique must not overwrite a file that another one reported.
            os.close(os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError as error:
            raise SinkError(
                f"cannot create a staged file: {error.strerror}",
                next_step="check the sink's folder; very long partition values do not fit into a folder name",
                path=part.path,
            ) from error
        part.footers = []
        part.writer = pq.ParquetWriter(
            part.path, self._file_schema, compression="snappy", metadata_collector=part.footers
        )
        self._open_files += 1

    def _finish(self, part: _Part) -> None:
        """Close the part's file durably and describe it. Later rows of the same value begin another file."""
        if part.writer is None or part.path is None:
            return
        part.writer.close()
        part.writer = None
        self._open_files -= 1
        fsync_file(part.path)
        status = part.path.stat()
        (footer,) = part.footers
        piece: Piece = {
            "path": part.path.relative_to(self._root).as_posix(),
            "rows": footer.num_rows,
            "size_bytes": status.st_size,
            "modified_ms": int(status.st_mtime * 1_000),
            "partition": dict(zip(self._stager.partition_by, part.key, strict=True)),
        }
        if self._stager.has_stats:
            from cutline.connectors.delta.stats import delta_stats

            piece["stats"] = delta_stats(footer, self._file_schema, has_nan=part.has_nan)
        self._pieces.append(piece)
        part.has_nan = set()


def conform(batch: pa.RecordBatch, schema: pa.Schema, root: object) -> pa.RecordBatch:
    """The rows in the schema in which the sink was opened."""
    import pyarrow as pa

    try:
        return batch.select(schema.names).cast(schema)
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise SinkError(
            f"rows do not have the schema that the sink was opened with: {error}",
            next_step="restart the flow, so that the sink sees the new schema",
            path=root,
        ) from error


def check_calendar(rows: pa.RecordBatch, name: str, root: object) -> None:
    """Checked while rows are staged: once the epoch is complete, its rows can no longer change."""
    from cutline.connectors.rows import is_beyond_calendar

    if is_beyond_calendar(rows.column(name)):
        raise SinkError(
            "a date or time lies before the year 1 or after the year 9999, which cannot be published there",
            next_step="filter such rows out in the flow, or cut them off (least, greatest); "
            "the last evening of 9999 is in the year 10000 in UTC, if the session's zone is west of it",
            column=name,
            path=root,
        )


def _folder_value(value: str | None) -> str:
    return NULL_FOLDER if value is None else escape(value)


def _file_stem(stager: ParquetStager, attempt: StageAttempt) -> str:
    """Readable, and unique even when several flows or sinks write into one folder."""
    owner = f"{attempt.flow}/{attempt.operator}/{stager.sink}/{attempt.attempt}"
    return "-".join(
        (
            "part",
            _safe_name(attempt.operator),
            f"g{attempt.generation}",
            f"b{attempt.batch}",
            f"p{attempt.partition}",
            _safe_name(attempt.attempt),
            hashlib.sha256(owner.encode()).hexdigest()[:8],
        )
    )


def _safe_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", text)[:64]
