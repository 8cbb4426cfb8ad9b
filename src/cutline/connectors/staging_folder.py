"""Where rows for a log wait for their epoch: Parquet files in a folder that driver and executors share."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.base.durable import make_dir
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import differences, recorded_schema
from cutline.connectors.staged_files import check_still_there, local_path, pieces_of
from cutline.errors import SinkError

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.model.staging import StagedBatch
    from cutline.ports.sinks import SinkContext
    from cutline.protocol.publish.commit import CommitPermit

_FOLDER = "staged"
_BATCH_FOLDER = f"{_FOLDER}/g{{generation}}-b{{batch}}"
_BATCH_NAME = re.compile(r"g(\d+)-b(\d+)")


class StagingFolder:
    """The staged batches of one sink."""

    def __init__(self, path: str | os.PathLike[str], *, sink: str) -> None:
        self._root = local_path(path, sink=sink)
        self.path = self._root

    def enter(self, context: SinkContext) -> None:
        """Several sinks may share the folder: each has a folder of its own in it."""
        self.path = self._root / context.flow / context.sink
        make_dir(self.path)

    def stager(self, sink: str, schema_ipc: bytes) -> ParquetStager:
        import pyarrow as pa

        names = tuple(pa.ipc.read_schema(pa.BufferReader(schema_ipc)).names)
        return ParquetStager(
            root=str(self.path), folder=_BATCH_FOLDER, sink=sink, schema_ipc=schema_ipc, in_calendar=names
        )

    def check(self, staged: Sequence[StagedBatch], *, hint: str) -> None:
        check_still_there(self.path, pieces_of(staged), hint=hint)

    def rows(self, staged: Sequence[StagedBatch], *, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """All rows except the first ``skip``, always in the same order."""
        import pyarrow.parquet as pq

        for piece in pieces_of(staged):
            if skip >= piece["rows"]:
                skip -= piece["rows"]
                continue
            with pq.ParquetFile(self.path / piece["path"]) as file:
                for batch in file.iter_batches():
                    taken = min(skip, batch.num_rows)
                    skip -= taken
                    if taken < batch.num_rows:
                        yield batch.slice(taken)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly these files, and their folders once they are empty."""
        for piece in pieces_of(staged):
            path = self.path / piece["path"]
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def collect(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        """Delete what was staged up to the epoch's last batch: it is published now, or belongs to failed attempts.

        A newer generation may be staging batches with the same numbers; those are not touched.
        """
        generation = max((batch.generation for batch in staged), default=0)
        folder = self.path / _FOLDER
        for name in os.listdir(folder) if folder.is_dir() else ():
            match = _BATCH_NAME.fullmatch(name)
            if match and int(match[1]) <= generation and int(match[2]) <= permit.through_batch:
                shutil.rmtree(folder / name, ignore_errors=True)

    def file(self, name: str) -> Path:
        return self.path / name


# ------------------------------------------------------------------------------------------------- messages


def check_value_column(schema: pa.Schema, column: str | None, *, role: str) -> None:
    """Refuse a column that does not exist, or whose values are neither text nor bytes."""
    import pyarrow as pa

    if column is None:
        return
    if column not in schema.names:
        raise SinkError(
            f"the rows have no such column to take the {role} from",
            next_step=f"use one of: {', '.join(schema.names)}",
            column=column,
        )
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        raise SinkError(
            f"the {role} must be text or bytes, the column has type {kind}",
            next_step="cast it to string in the flow, or make it with to_json",
            column=column,
        )


def check_message(schema: pa.Schema, column: str | None) -> None:
    """Refuse rows that cannot be messages, before the first of them is published."""
    check_value_column(schema, column, role="message")
    for field in schema if column is None else ():
        if _has_other_keys(field.type):
            raise SinkError(
                f"JSON cannot express a map with such keys: {field.type}",
                next_step="cast the keys to string, or make the message with to_json and name its column as value",
                column=field.name,
            )


def _has_other_keys(kind: pa.DataType) -> bool:
    """Whether it contains a map whose keys are neither text, bytes, numbers nor times."""
    import pyarrow as pa

    if pa.types.is_map(kind) and (pa.types.is_nested(kind.key_type) or pa.types.is_boolean(kind.key_type)):
        return True
    return any(_has_other_keys(kind.field(index).type) for index in range(kind.num_fields))


def values_of(batch: pa.RecordBatch, column: str | None) -> list[bytes | None]:
    """Each row as a message: the bytes of a column (None where it is null), or the whole row as JSON."""
    if column is None:
        return [msgspec.json.encode(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    return [_bytes(value) for value in batch.column(column).to_pylist()]


def _bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else bytes(value)


def check_same_rows(context: SinkContext, schema: pa.Schema, before_ipc: bytes, before: str, now: str) -> None:
    """Refuse rows whose schema or target differs from the earlier ones. ``before``, ``now``: the targets."""
    problems = differences(schema, recorded_schema(before_ipc, target=before))
    if before != now:
        problems.append(f"earlier rows went to {before}, these would go to {now}")
    if problems:
        raise SinkError(
            f"the rows do not fit what the sink has published so far: {'; '.join(problems)}",
            next_step="give the changed rows a sink of another name, or cast them to the old schema",
            flow=context.flow,
            sink=context.sink,
        )
