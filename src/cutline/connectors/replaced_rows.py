"""What an epoch replaces in a table of files: rows with the same keys, or whole partitions.

Only files whose statistics allow a match are read, at first only their key columns; only files with a match are
rewritten. What a table calls its files, and how their rows are read, is the business of the table's room.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from cutline.ports.sinks import StageAttempt

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.connectors.parquet_writer import ParquetStager
    from cutline.model.staging import Piece, StagedBatch
    from cutline.protocol.publish.commit import CommitPermit

#: Number of a row among all rows of the epoch, or of a file.
_ROW = "row"

Partition = frozenset[tuple[str, str | None]]


class TableFile(Protocol):
    """One file that is part of the table."""

    @property
    def partition(self) -> Mapping[str, str | None]:
        """The values that all its rows have in the partition columns, as ``partition_text`` spells them."""
        ...

    @property
    def least(self) -> Mapping[str, Any]:
        """Least values by column; a column without bounds is missing."""
        ...

    @property
    def most(self) -> Mapping[str, Any]: ...


F = TypeVar("F", bound=TableFile)
F_contra = TypeVar("F_contra", bound=TableFile, contravariant=True)


@dataclass(slots=True)
class Replaced(Generic[F]):
    """What changes in the table, in one step."""

    #: Files of the table that are no longer part of it.
    files: list[F] = field(default_factory=list)
    #: Files that become part of it.
    added: list[Piece] = field(default_factory=list)
    #: Those of ``added`` that were written for this change only, and are deleted if it fails.
    written: list[Piece] = field(default_factory=list)
    #: Staged files that were rewritten without the rows that a newer one replaces: they never are part of the table.
    superseded: list[Piece] = field(default_factory=list)


class RowFiles(Protocol[F_contra]):
    """How rows of files are read. Each time, a file gives the same rows in the same order."""

    def staged(self, piece: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a staged file, in these columns."""
        ...

    def stored(self, file: F_contra, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a file of the table, in these columns."""
        ...


def overwritten_partitions(files: Sequence[F], staged: Sequence[StagedBatch]) -> Replaced[F]:
    """A batch replaces every partition that it has rows for; of several batches the newest wins.

    By batch and not by epoch, because the end of an epoch is arbitrary: the table must not depend on it.
    """
    newest: dict[Partition, list[Piece]] = {}
    for batch in staged:
        brought: dict[Partition, list[Piece]] = {}
        for piece in batch.pieces:
            brought.setdefault(frozenset(piece["partition"].items()), []).append(piece)
        newest |= brought
    return Replaced(
        files=[file for file in files if frozenset(file.partition.items()) in newest],
        added=[piece for pieces in newest.values() for piece in pieces],
    )


class Upsert(Generic[F]):
    """Computes what the rows of an epoch replace, and writes the files for it."""

    def __init__(
        self, key: Sequence[str], schema: pa.Schema, stager: ParquetStager, attempt: StageAttempt, rows: RowFiles[F]
    ) -> None:
        """``schema``: of all columns of the table. ``stager`` writes such files; ``attempt`` names them."""
        self._key = list(key)
        #: What Arrow calls the key's columns here: it takes some names (``.x``, ``[0]``) for paths to nested values.
        self._aliases = [f"key{number}" for number in range(len(self._key))]
        self._schema = schema
        self._stager = stager
        self._attempt = attempt
        self._rows = rows

    def replacement(self, files: Sequence[F], pieces: Sequence[Piece]) -> Replaced[F]:
        """The last row of each key in the epoch replaces all rows with that key in the table."""
        change: Replaced[F] = Replaced()
        keys = self._newest_rows(pieces, change)
        values = {
            name: self._values_of(keys[alias], name) for name, alias in zip(self._key, self._aliases, strict=True)
        }
        for file in files:
            if not self._may_match(file, values):
                continue
            matched = self._matches(file, keys)
            if len(matched):
                change.files.append(file)
                self._write_without(self._stored(file), matched, change)
        return change

    def _stored(self, file: F) -> Callable[[pa.Schema], Iterator[pa.RecordBatch]]:
        return lambda schema: self._rows.stored(file, schema)

    def _staged(self, piece: Piece) -> Callable[[pa.Schema], Iterator[pa.RecordBatch]]:
        return lambda schema: self._rows.staged(piece, schema)

    # ------------------------------------------------------------------ the epoch's own rows

    def _newest_rows(self, pieces: Sequence[Piece], change: Replaced[F]) -> pa.Table:
        """The epoch's keys, each once, under their aliases.

        Files in which every row is newest are added as the executors wrote them.
        """
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        tables, start = [], 0
        for piece in pieces:
            tables.append(self._keys_in(self._staged(piece), start))
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
                change.superseded.append(piece)
                lost = np.setdiff1d(np.arange(piece["rows"]), kept)
                self._write_without(self._staged(piece), lost, change)
            start = end
        return newest.select(self._aliases)

    # ------------------------------------------------------------------ the table's files

    def _values_of(self, column: pa.ChunkedArray, name: str) -> Any:
        """All values of a key column: sorted, or as partitions spell them."""
        import pyarrow.compute as pc

        values = pc.unique(column).to_pylist()
        is_partition = name in self._stager.partition_by
        return {self._stager.partition_value(value) for value in values} if is_partition else sorted(values)

    def _may_match(self, file: F, values: Mapping[str, Any]) -> bool:
        """False only if the file's statistics or partition exclude every key."""
        for name in self._key:
            if name in self._stager.partition_by:
                if name in file.partition and file.partition[name] not in values[name]:
                    return False
                continue
            low, high = file.least.get(name), file.most.get(name)
            if low is None or high is None or not _has_sharp_bounds(self._schema.field(name).type):
                continue
            first = bisect_left(values[name], low)
            if first == len(values[name]) or values[name][first] > high:
                return False
        return True

    def _matches(self, file: F, keys: pa.Table) -> Any:
        """Numbers of the rows in the file whose keys are among these, as a numpy array."""
        found = self._keys_in(self._stored(file), 0)
        return found.join(keys, keys=self._aliases, join_type="left semi")[_ROW].to_numpy()

    def _keys_in(self, read: Callable[[pa.Schema], Iterator[pa.RecordBatch]], start: int) -> pa.Table:
        """The keys of a file under their aliases, and the rows' numbers from ``start``."""
        import numpy as np
        import pyarrow as pa

        schema = pa.schema([self._schema.field(name) for name in self._key])
        table = pa.Table.from_batches(list(read(schema)), schema).rename_columns(self._aliases)
        return table.append_column(_ROW, pa.array(np.arange(start, start + table.num_rows)))

    def _write_without(
        self, read: Callable[[pa.Schema], Iterator[pa.RecordBatch]], lost: Any, change: Replaced[F]
    ) -> None:
        """Rewrite the file without some of its rows; write nothing if none remain."""
        import numpy as np
        import pyarrow as pa

        # Unique: another attempt, by this process or a zombie, must never write the same file.
        attempt = f"{self._attempt.attempt}-{secrets.token_hex(6)}"
        writer = self._stager.open(msgspec.structs.replace(self._attempt, attempt=attempt))
        start = 0
        for batch in read(self._schema):
            inside = lost[(lost >= start) & (lost < start + batch.num_rows)] - start
            mask = np.ones(batch.num_rows, dtype=bool)
            mask[inside] = False
            start += batch.num_rows
            if mask.any():
                writer.write(batch.filter(pa.array(mask)))
        written = writer.close()
        change.added += written
        change.written += written


def rewriting(permit: CommitPermit) -> StageAttempt:
    """Names the files that a commit rewrites."""
    return StageAttempt(
        flow=permit.flow,
        operator=permit.operator,
        generation=permit.generation,
        batch=permit.through_batch,
        partition=0,
        attempt=f"e{permit.epoch}",
    )


def _has_sharp_bounds(kind: pa.DataType) -> bool:
    """Whether every writer's bounds are exact: some truncate timestamps to milliseconds."""
    import pyarrow as pa

    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or is_text or pa.types.is_date(kind))
