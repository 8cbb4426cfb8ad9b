"""What an epoch replaces in a Delta table: rows with the same keys, or whole partitions.

Only files whose statistics allow a match are read, at first only their key columns; only files with a match are
rewritten, row group by row group. So the driver's memory is bounded by the epoch's keys and a row group.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cutline.connectors.delta.commits import Replacement, logged_path
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import partition_text
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from cutline.model.staging import Piece, StagedBatch
    from cutline.ports.sinks import StageAttempt

#: Number of a row among all rows of the epoch, or of a file.
_ROW = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """One file that is part of the table."""

    #: As the log spells it.
    raw_path: str
    partition: Mapping[str, str | None]
    #: Least and greatest values by column. Those of a struct's fields are nested, so that the field ``b`` of a struct
    #: ``a`` is not taken for a column ``a.b``.
    least: Mapping[str, Any]
    most: Mapping[str, Any]

    def path(self, root: Path) -> Path:
        if "://" in self.raw_path or self.raw_path.startswith("/"):
            raise SinkError(
                "the table has files outside its folder (a shallow clone?), which cannot be replaced",
                next_step="copy the table as a whole, or use mode='append'",
                path=self.raw_path,
            )
        return root / unquote(self.raw_path)


def files_of(table: DeltaTable, partition_by: Sequence[str]) -> list[TableFile]:
    """The files of the version that ``table`` shows."""
    import pyarrow as pa

    rows = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    return [
        TableFile(
            raw_path=row["path"],
            partition={name: partition_text(row["partition"][name]) for name in partition_by},
            least=row.get("min") or {},
            most=row.get("max") or {},
        )
        for row in rows
    ]


def check_restorable(root: Path, table: DeltaTable, version: int) -> None:
    """Refuse to restore a version if some of its files are gone, or if deltalake could not remove the later ones."""
    from deltalake import DeltaTable

    kept = files_of(DeltaTable(str(root), version=version), ())
    later = {file.raw_path for file in files_of(table, ())} - {file.raw_path for file in kept}
    if odd := sorted(path for path in later if logged_path(unquote(path)) != path):
        raise SinkError(
            f"the table's log spells {odd[0]} as former versions of Cutline did, so its rows cannot be removed by name",
            next_step="restore the flow without rewinding this sink; or compact the table (OPTIMIZE), which rewrites "
            "such files, and rewind later epochs",
            path=root,
        )
    for file in kept:
        if not file.path(root).exists():
            raise SinkError(
                f"a vacuum has deleted files that version {version} of the table needs",
                next_step="rewind to a newer epoch, or restore the flow without rewinding this sink; "
                "a longer retention keeps more for the next time",
                path=root,
            )


def overwritten_partitions(files: Sequence[TableFile], staged: Sequence[StagedBatch]) -> Replacement:
    """A batch replaces every partition that it has rows for; of several batches the newest wins.

    By batch and not by epoch, because the end of an epoch is arbitrary: the table must not depend on it.
    """
    newest: dict[frozenset[tuple[str, str | None]], list[Piece]] = {}
    for batch in staged:
        brought: dict[frozenset[tuple[str, str | None]], list[Piece]] = {}
        for piece in batch.pieces:
            brought.setdefault(frozenset(piece["partition"].items()), []).append(piece)
        newest |= brought
    return Replacement(
        removed=[file.raw_path for file in files if frozenset(file.partition.items()) in newest],
        added=[piece for pieces in newest.values() for piece in pieces],
    )


class Upsert:
    """Computes what the rows of an epoch replace, and writes the files for it."""

    def __init__(
        self, root: Path, key: Sequence[str], schema: pa.Schema, partition_by: tuple[str, ...], attempt: StageAttempt
    ) -> None:
        """``schema``: of all columns of the table. ``attempt`` names the files that are written."""
        self._root = root
        self._key = list(key)
        #: What Arrow calls the key's columns here: it takes some names (``.x``, ``[0]``) for paths to nested values.
        self._aliases = [f"key{number}" for number in range(len(self._key))]
        self._schema = schema
        self._attempt = attempt
        self._stager = ParquetStager(
            root=str(root),
            folder="",
            sink="upsert",
            schema_ipc=schema.serialize().to_pybytes(),
            partition_by=partition_by,
            has_stats=True,
        )
        self._partition_by = partition_by

    def replacement(self, files: Sequence[TableFile], pieces: Sequence[Piece]) -> Replacement:
        """The last row of each key in the epoch replaces all rows with that key in the table."""
        change = Replacement()
        keys = self._newest_rows(pieces, change)
        values = {
            name: self._values_of(keys[alias], name) for name, alias in zip(self._key, self._aliases, strict=True)
        }
        for file in files:
            if not self._may_match(file, values):
                continue
            path = file.path(self._root)
            matched = self._matches(path, file.partition, keys)
            if len(matched):
                change.removed.append(file.raw_path)
                self._write_without(path, file.partition, matched, change)
        return change

    def discard(self, change: Replacement) -> None:
        """Delete the files written for a change that did not happen."""
        for piece in change.written:
            (self._root / piece["path"]).unlink(missing_ok=True)

    # ------------------------------------------------------------------ the epoch's own rows

    def _newest_rows(self, pieces: Sequence[Piece], change: Replacement) -> pa.Table:
        """The epoch's keys, each once, under their aliases.

        Files in which every row is newest are added as the executors wrote them.
        """
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        tables, start = [], 0
        for piece in pieces:
            tables.append(self._keys_in(self._root / piece["path"], piece["partition"], start))
            start += piece["rows"]
        keys = pa.concat_tables(tables)
        newest = keys.group_by(self._aliases).aggregate([(_ROW, "max")])
        stays = pc.sort_indices(newest[f"{_ROW}_max"])
        rows = newest[f"{_ROW}_max"].take(stays).to_numpy()
        start = 0
        for piece in pieces:
            end = start + piece["rows"]
            kept = rows[rows.searchsorted(start) : rows.searchsorted(end)] - start
            if len(kept) == piece["rows"]:
                change.added.append(piece)
            else:
                # Listed as removed although it never was part of the table, so that a vacuum finds it.
                change.removed.append(logged_path(piece["path"]))
                lost = np.setdiff1d(np.arange(piece["rows"]), kept)
                self._write_without(self._root / piece["path"], piece["partition"], lost, change)
            start = end
        return newest.select(self._aliases)

    # ------------------------------------------------------------------ the table's files

    def _values_of(self, column: pa.ChunkedArray, name: str) -> Any:
        """All values of a key column: sorted, or as partitions spell them."""
        import pyarrow.compute as pc

        values = pc.unique(column).to_pylist()
        return {partition_text(value) for value in values} if name in self._partition_by else sorted(values)

    def _may_match(self, file: TableFile, values: Mapping[str, Any]) -> bool:
        """False only if the file's statistics or partition exclude every key."""
        for name in self._key:
            if name in self._partition_by:
                if file.partition[name] not in values[name]:
                    return False
                continue
            low, high = file.least.get(name), file.most.get(name)
            if low is None or high is None or not _has_sharp_bounds(self._schema.field(name).type):
                continue
            first = bisect_left(values[name], low)
            if first == len(values[name]) or values[name][first] > high:
                return False
        return True

    def _matches(self, path: Path, partition: Mapping[str, str | None], keys: pa.Table) -> Any:
        """Numbers of the rows in the file whose keys are among these, as a numpy array."""
        found = self._keys_in(path, partition, 0)
        return found.join(keys, keys=self._aliases, join_type="left semi")[_ROW].to_numpy()

    def _keys_in(self, path: Path, partition: Mapping[str, str | None], start: int) -> pa.Table:
        """The keys of a file under their aliases, and the rows' numbers from ``start``."""
        import numpy as np
        import pyarrow as pa

        schema = pa.schema([self._schema.field(name) for name in self._key])
        batches = list(self._batches(path, partition, schema))
        table = pa.Table.from_batches(batches, schema).rename_columns(self._aliases)
        return table.append_column(_ROW, pa.array(np.arange(start, start + table.num_rows)))

    def _batches(self, path: Path, partition: Mapping[str, str | None], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The file's rows in these columns; columns it lacks are partition values, or null."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                there = set(file.schema_arrow.names)
                for batch in file.iter_batches(columns=[name for name in schema.names if name in there]):
                    columns = [
                        batch.column(field.name).cast(field.type)
                        if field.name in there
                        else _constant(partition.get(field.name), field.type, batch.num_rows)
                        for field in schema
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)
        except FileNotFoundError as error:
            raise SinkError(
                "a file of the table is gone, so its rows cannot be replaced",
                next_step="restore the table to a version whose files all exist",
                path=path,
            ) from error

    def _write_without(self, path: Path, partition: Mapping[str, str | None], lost: Any, change: Replacement) -> None:
        """Rewrite the file without some of its rows; write nothing if none remain."""
        import numpy as np
        import pyarrow as pa

        # Unique: another attempt, by this process or a zombie, must never write the same file.
        attempt = f"{self._attempt.attempt}-{secrets.token_hex(6)}"
        writer = self._stager.open(_renamed(self._attempt, attempt))
        start = 0
        for batch in self._batches(path, partition, self._schema):
            inside = lost[(lost >= start) & (lost < start + batch.num_rows)] - start
            mask = np.ones(batch.num_rows, dtype=bool)
            mask[inside] = False
            start += batch.num_rows
            if mask.any():
                writer.write(batch.filter(pa.array(mask)))
        written = writer.close()
        change.added += written
        change.written += written


def _renamed(attempt: StageAttempt, name: str) -> StageAttempt:
    import msgspec

    return msgspec.structs.replace(attempt, attempt=name)


def _has_sharp_bounds(kind: pa.DataType) -> bool:
    """Whether every writer's bounds are exact: some truncate timestamps to milliseconds."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind))


def _constant(text: str | None, kind: pa.DataType, count: int) -> pa.Array:
    import pyarrow as pa

    if text is None:
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(text).cast(kind), count)
