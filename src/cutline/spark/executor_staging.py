"""Stages a batch on executors: one pass over the rows writes the channel's segment and every sink's staged output.

Runs inside Spark's Python workers; imports little.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from cutline.ports.engine import StageJob

#: The one column of the report that each task returns.
REPORT_SCHEMA = "report string"


def stage_rows(job: StageJob) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for ``mapInArrow``: takes a task's rows, yields one row of JSON that describes what was written."""

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"report": [_stage_task(job, batches)]})

    return stage


def _conformed(given: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows with the names and types of the operator: Spark may have handed them over by position."""
    renamed = given if given.schema.names == schema.names else given.rename_columns(schema.names)
    return renamed.cast(schema)


def _stage_task(job: StageJob, batches: Iterator[pa.RecordBatch]) -> str:
    import msgspec
    import pyarrow as pa
    from pyspark import TaskContext

    from cutline.channels.segments import SegmentWriter
    from cutline.ports.sinks import StageAttempt

    context = TaskContext.get()
    partition = context.partitionId() if context else 0
    attempt = secrets.token_hex(6)  # retries, speculation and re-runs each write separate files
    named = StageAttempt(
        flow=job.flow,
        operator=job.operator,
        generation=job.generation,
        batch=job.batch,
        partition=partition,
        attempt=attempt,
    )
    name = f"g{job.generation:06d}-b{job.batch:08d}-p{partition:04d}-{attempt}.arrow"
    segment = SegmentWriter(job.segments, name) if job.segments else None
    schema = pa.ipc.read_schema(pa.BufferReader(job.schema_ipc))
    rows = 0
    try:
        writers = {sink: stager.open(named) for sink, stager in job.stagers.items()}
        for given in batches:
            batch = given if given.schema == schema else _conformed(given, schema)
            rows += batch.num_rows
            if segment is not None:
                segment.write(batch)
            for writer in writers.values():
                writer.write(batch)
        report: dict[str, Any] = {
            "rows": rows,
            "segment": segment.close() if segment else None,
            "pieces": {sink: writer.close() for sink, writer in writers.items()},
        }
    except BaseException:
        if segment is not None:
            segment.discard()
        raise
    return msgspec.json.encode(report).decode()
