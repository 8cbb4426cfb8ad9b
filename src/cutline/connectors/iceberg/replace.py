"""What an epoch replaces in an Iceberg table. Rows are read by pyiceberg, with other writers' deletes applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.connectors.iceberg.data_files import bounds_of, data_file, partition_as_text
from cutline.connectors.iceberg.schema import file_schema, partition_columns
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.replaced_rows import Upsert
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import FileScanTask, Table

    from cutline.model.staging import Piece
    from cutline.ports.sinks import StageAttempt

#: Where data files lie in the table's folder.
DATA_FOLDER = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergFile:
    """One data file that is part of the table."""

    task: FileScanTask
    #: Empty if the file was written for other partitions than the table has now.
    partition: Mapping[str, str | None]
    least: Mapping[str, Any]
    most: Mapping[str, Any]

    @property
    def path(self) -> str:
        return self.task.file.file_path


def files_of(table: Table, columns: Sequence[str], partition_by: tuple[str, ...]) -> list[IcebergFile]:
    """The data files that readers see. ``columns``: those whose bounds are of interest."""
    from pyiceberg.manifest import DataFileContent

    schema = table.schema()
    types = {field.name: (field.field_id, field.field_type) for field in schema.fields}
    found = []
    for task in table.scan().plan_files():
        if any(one.content == DataFileContent.EQUALITY_DELETES for one in task.delete_files):
            raise SinkError(
                "another writer deletes rows of the table by equality deletes, which pyiceberg cannot read",
                next_step="rewrite the data files (compaction), or use mode='append'",
                table=".".join(table.name()),
            )
        spec_columns = partition_columns(table, task.file.spec_id)
        partition: dict[str, str | None] = {}
        if spec_columns == partition_by:
            values = zip(partition_by, task.file.partition._data, strict=True)
            partition = {name: partition_as_text(value, types[name][1]) for name, value in values}
        least, most = bounds_of(task.file, {name: types[name] for name in columns})
        found.append(IcebergFile(task=task, partition=partition, least=least, most=most))
    return found


def check_partitions(table: Table, files: Sequence[IcebergFile], partition_by: tuple[str, ...]) -> None:
    """Refuse to overwrite partitions if some rows are in files that were written for other partitions."""
    if any(set(file.partition) != set(partition_by) for file in files):
        raise SinkError(
            "the table has files that were written for other partitions than it has now",
            next_step="rewrite its data files (compaction), so that they have the table's partitions",
            table=".".join(table.name()),
        )


class IcebergRows:
    """Reads the rows of a table's files by the ids of their columns."""

    def __init__(self, table: Table, root: Path) -> None:
        self._table = table
        self._root = root

    def staged(self, piece: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from pyiceberg.table import FileScanTask

        return self._batches(FileScanTask(data_file(self._table, self._root, piece)), schema)

    def stored(self, file: IcebergFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self._batches(file.task, schema)

    def _batches(self, task: FileScanTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan
        from pyiceberg.schema import Schema

        columns = {field.name: field for field in self._table.schema().fields}
        projected = Schema(*(columns[name] for name in schema.names))
        try:
            for batch in ArrowScan(self._table.metadata, self._table.io, projected, AlwaysTrue()).to_record_batches(
                [task]
            ):
                arrays = [batch.column(position).cast(field.type) for position, field in enumerate(schema)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except FileNotFoundError as error:
            raise SinkError(
                "a file of the table is gone, so its rows cannot be replaced",
                next_step="roll the table back to a snapshot whose files all exist",
                path=task.file.file_path,
            ) from error


def upsert_of(
    table: Table, root: Path, key: Sequence[str], partition_by: tuple[str, ...], attempt: StageAttempt
) -> Upsert[IcebergFile]:
    """``attempt`` names the files that are written. They keep all columns of the table."""
    schema = file_schema(table.schema(), [field.name for field in table.schema().fields])
    stager = ParquetStager(
        root=str(root),
        folder=DATA_FOLDER,
        sink="upsert",
        schema_ipc=schema.serialize().to_pybytes(),
        partition_by=partition_by,
        keeps_partition_columns=True,
    )
    return Upsert(key, schema, stager, attempt, IcebergRows(table, root))
