"""Reads an Iceberg table by the epochs of a sink: as of one, or what later ones added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cutline.connectors.iceberg.history import past_of, walk
from cutline.connectors.iceberg.ledger import load_ledger, owners_in
from cutline.connectors.reading import check_still_published, nothing_published, refuse_after
from cutline.connectors.rows import storable_schema
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.ports.reading import ReadRequest, ReadResult

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table

    from cutline.connectors.iceberg.history import Seen
    from cutline.connectors.iceberg.table import SinkTable


def read_table(target: SinkTable, request: ReadRequest, *, appends: bool) -> ReadResult:
    """``appends``: the sink only adds files, so that the files that an epoch added hold its rows."""
    if request.after and not appends:
        raise refuse_after("rows of this sink replace others")
    table = target.find()
    if table is None:
        raise nothing_published(target.name)
    flow, sink = _owner(table, request, target.name)
    found = load_ledger(table.metadata.properties, FlowName(flow), SinkId(sink), table=target.name)
    rewound = found.rewound if found is not None else NO_EPOCH
    # What readers see counts: someone may have moved the table to an earlier snapshot by hand.
    seen = list(walk(table.metadata, flow, sink))
    marks = [one.mark for one in seen if one.mark is not None]
    published = marks[0].after if marks else (found.published if found is not None else NO_EPOCH)
    epochs = [published, *(mark.before for mark in marks if mark.kind == "publish")]
    if request.after:
        _check_reaches(request.after, epochs, target.name)
    check_still_published(request, epochs, rewound=rewound)
    snapshot_id, newest = table.metadata.current_snapshot_id, published
    if request.as_of is not None and request.as_of < published:
        state = past_of(table.metadata, flow, sink, through_changes=True).at(request.as_of)
        if state is None:
            raise _expired(request.as_of, target.name)
        snapshot_id, newest = state.snapshot_id, state.since
    schema = _schema_at(table, snapshot_id)
    arrow = _arrow(schema)
    if request.after:
        tasks = _added(table, seen, request)
    else:
        tasks = _all(table, snapshot_id)
    return ReadResult(
        flow=flow,
        sink=sink,
        epoch=newest,
        schema=arrow,
        batches=lambda: _batches(table, tasks, schema, arrow, target.name),
    )


def _batches(
    table: Table, tasks: Sequence[FileScanTask], schema: Schema, arrow: pa.Schema, name: str
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    scan = ArrowScan(table.metadata, table.io, schema, AlwaysTrue())
    for task in tasks:  # one by one: a scan holds all rows of the tasks that it is given
        try:
            for batch in scan.to_record_batches([task]):
                arrays = [batch.column(position).cast(field.type) for position, field in enumerate(arrow)]
                yield pa.RecordBatch.from_arrays(arrays, schema=arrow)
        except FileNotFoundError as error:
            raise SinkError(
                "files of these epochs were deleted: their snapshots have expired",
                next_step="read again; read more often than the table's snapshots expire",
                table=name,
            ) from error


def _all(table: Table, snapshot_id: int | None) -> list[FileScanTask]:
    if snapshot_id is None:
        return []
    return list(table.scan(snapshot_id=snapshot_id).plan_files())


def _added(table: Table, seen: Sequence[Seen], request: ReadRequest) -> list[FileScanTask]:
    """The files that later epochs added, oldest first, whatever became of them since."""
    from pyiceberg.manifest import ManifestEntryStatus
    from pyiceberg.table import FileScanTask

    tasks: list[FileScanTask] = []
    for one in reversed(seen):
        mark, snapshot = one.mark, one.snapshot
        if mark is None or mark.kind != "publish" or mark.after <= request.after or not request.reaches(mark.after):
            continue
        for manifest in snapshot.manifests(table.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            tasks += [
                FileScanTask(entry.data_file)
                for entry in entries
                if entry.status == ManifestEntryStatus.ADDED and entry.snapshot_id == snapshot.snapshot_id
            ]
    return tasks


def _check_reaches(after: Epoch, epochs: Sequence[Epoch], name: str) -> None:
    """Refuse if an epoch later than ``after`` may have a snapshot that has expired."""
    if min(epochs) > after:
        raise _expired(after, name)


def _expired(epoch: Epoch, name: str) -> SinkError:
    return SinkError(
        "the snapshots that showed that epoch have expired, so it cannot be read",
        next_step="read without after= and as_of=; read more often than the table's snapshots expire",
        epoch=epoch,
        table=name,
    )


def _owner(table: Table, request: ReadRequest, name: str) -> tuple[str, str]:
    """The flow and sink whose epochs are read: the named ones, or the only ones that have a ledger in the table."""
    if request.flow is not None and request.sink is not None:
        return request.flow, request.sink
    owners = owners_in(table.metadata.properties)
    fitting = [(flow, sink) for flow, sink in owners if request.flow in (None, flow) and request.sink in (None, sink)]
    if len(fitting) == 1:
        return fitting[0]
    if not owners:
        return request.flow or "", request.sink or ""  # nothing is published yet
    known = ", ".join(f"{flow}/{sink}" for flow, sink in owners)
    raise SinkError(
        f"several sinks write to the table ({known})" if fitting else "no such sink has published to the table",
        next_step="name the flow= and the sink's name=",
        table=name,
    )


def _schema_at(table: Table, snapshot_id: int | None) -> Schema:
    snapshot = None if snapshot_id is None else table.metadata.snapshot_by_id(snapshot_id)
    if snapshot is None or snapshot.schema_id is None or snapshot_id == table.metadata.current_snapshot_id:
        return table.schema()
    return table.schemas().get(snapshot.schema_id, table.schema())


def _arrow(schema: Schema) -> pa.Schema:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    return storable_schema(schema_to_pyarrow(schema, include_field_ids=False))
