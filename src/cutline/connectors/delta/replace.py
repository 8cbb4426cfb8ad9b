"""What an epoch replaces in a Delta table: rows with the same keys, or whole partitions.

Files are read row group by row group, so the driver's memory is bounded by the epoch's keys and a row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cutline.connectors.delta.commits import Replacement, logged_path
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.replaced_rows import Replaced, Upsert
from cutline.connectors.rows import partition_text
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from cutline.model.staging import Piece
    from cutline.ports.sinks import StageAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFile:
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


def files_of(table: DeltaTable, partition_by: Sequence[str]) -> list[DeltaFile]:
    """The files of the version that ``table`` shows."""
    import pyarrow as pa

    rows = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    return [
        DeltaFile(
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


class DeltaRows:
    """Reads the rows of a table's files: by name, with partition values from the log."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def staged(self, piece: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self._batches(self._root / piece["path"], piece["partition"], schema)

    def stored(self, file: DeltaFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self._batches(file.path(self._root), file.partition, schema)

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


def upsert_of(
    root: Path, key: Sequence[str], schema: pa.Schema, partition_by: tuple[str, ...], attempt: StageAttempt
) -> Upsert[DeltaFile]:
    """``schema``: of all columns of the table. ``attempt`` names the files that are written."""
    stager = ParquetStager(
        root=str(root),
        folder="",
        sink="upsert",
        schema_ipc=schema.serialize().to_pybytes(),
        partition_by=partition_by,
        has_stats=True,
    )
    return Upsert(key, schema, stager, attempt, DeltaRows(root))


def replacement_of(change: Replaced[DeltaFile]) -> Replacement:
    """The change as a commit names it."""
    return Replacement(
        # Superseded files are listed although they never were part of the table, so that a vacuum finds them.
        removed=[file.raw_path for file in change.files] + [logged_path(piece["path"]) for piece in change.superseded],
        added=change.added,
        written=change.written,
    )


def discard_written(root: Path, change: Replacement) -> None:
    """Delete the files written for a change that did not happen."""
    for piece in change.written:
        (root / piece["path"]).unlink(missing_ok=True)


def _constant(text: str | None, kind: pa.DataType, count: int) -> pa.Array:
    import pyarrow as pa

    if text is None:
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(text).cast(kind), count)
