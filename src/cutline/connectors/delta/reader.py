"""Reads a Delta table by the epochs of a sink: as of one, or what later ones added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.connectors.delta.claim_files import ClaimFiles
from cutline.connectors.delta.log import DeltaLog, app_id, claim_id, parts_of_app_id, rewound_id
from cutline.connectors.parquet.reader import file_batches
from cutline.connectors.reach import file_in, load_reach
from cutline.connectors.reading import check_still_published, nothing_published, refuse_after
from cutline.connectors.rows import storable_schema
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.ports.reading import ReadRequest, ReadResult
from cutline.protocol.publish.flow_epochs import Standing

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

#: How many of the newest versions are searched for the sinks that write to the table.
_VERSIONS_ASKED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A commit that published an epoch which was not rewound."""

    version: int
    epoch: Epoch
    #: The newest epoch before it.
    before: Epoch
    files: frozenset[str]


def read_table(path: Path, log: DeltaLog, request: ReadRequest, *, appends: bool) -> ReadResult:
    """``appends``: the sink only adds files, so that the files that an epoch added hold its rows."""
    from deltalake import DeltaTable

    if request.after and not appends:
        raise refuse_after("rows of this sink replace others")
    if not DeltaTable.is_deltatable(str(path)):
        raise nothing_published(path)
    table = DeltaTable(str(path))
    flow, sink = _owner(log, table.version(), request, path)
    published = Epoch(table.transaction_version(app_id(flow, sink)) or NO_EPOCH)
    rewound = Epoch(table.transaction_version(rewound_id(flow, sink)) or NO_EPOCH)
    standing = _standing(log, table.version(), app_id(flow, sink), published)
    later = _later_than(request.after or request.as_of, published, standing, path)
    check_still_published(request, [published, *(addition.before for addition in later)], rewound=rewound)
    too_new = [addition for addition in later if not request.reaches(addition.epoch)]
    if too_new:
        _check_files(log, path, table.version(), too_new[-1].version, epoch=request.as_of)
        table.load_as_version(too_new[-1].version - 1)
        published = too_new[-1].before
    schema = storable_schema(_schema_of(table))
    if request.after:
        files = [name for addition in later if request.reaches(addition.epoch) for name in sorted(addition.files)]
        return ReadResult(
            flow=flow, sink=sink, epoch=published, schema=schema, batches=lambda: _added(table, files, schema, path)
        )
    return ReadResult(flow=flow, sink=sink, epoch=published, schema=schema, batches=lambda: _all(table, schema, path))


def table_standing(path: Path, log: DeltaLog, request: ReadRequest) -> Standing:
    """What the table says about the epochs of a sink."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(path)):
        raise nothing_published(path)
    table = DeltaTable(str(path))
    flow, sink = _owner(log, table.version(), request, path)
    number = table.transaction_version(claim_id(flow, sink)) or 0
    return Standing(
        flow=flow,
        sink=sink,
        published=Epoch(table.transaction_version(app_id(flow, sink)) or NO_EPOCH),
        rewound=Epoch(table.transaction_version(rewound_id(flow, sink)) or NO_EPOCH),
        claim=f"{number} {ClaimFiles.of(path, flow, sink).history(number)}" if number else "",
        reach=load_reach(file_in(path, flow, sink)),
    )


def _all(table: DeltaTable, schema: pa.Schema, path: Path) -> Iterator[pa.RecordBatch]:
    try:
        for batch in table.to_pyarrow_dataset().to_batches():
            yield batch.cast(schema)
    except FileNotFoundError as error:
        raise _vacuumed(path) from error


def _check_files(log: DeltaLog, path: Path, newest: int, since: int, *, epoch: Epoch | None) -> None:
    """Refuse a version whose files a vacuum has deleted: only files that were removed since can be missing."""
    for commit in islice(log.commits(newest), newest - since + 1):
        if any(not (path / name).exists() for name in commit.removed):
            raise _vacuumed(path, epoch=epoch)


def _vacuumed(path: Path, **where: object) -> SinkError:
    return SinkError(
        "a vacuum has deleted files of that version of the table",
        next_step="read a newer epoch, or without as_of=; vacuum with a longer retention to keep more",
        path=path,
        **where,
    )


def _added(table: DeltaTable, files: list[str], schema: pa.Schema, path: Path) -> Iterator[pa.RecordBatch]:
    try:
        partition_by = table.metadata().partition_columns
        yield from file_batches([str(path / name) for name in files], schema, partition_by, path)
    except FileNotFoundError as error:
        raise SinkError(
            "files of these epochs were compacted and deleted by a vacuum",
            next_step="read without after=, or more often than the table is vacuumed",
            path=path,
        ) from error


def _later_than(until: Epoch | None, published: Epoch, standing: Iterator[Addition], path: Path) -> list[Addition]:
    """The commits since the requested epoch, newest first."""
    if until is None or published <= until:
        return []
    found = []
    for addition in standing:
        found.append(addition)
        if addition.before <= until:
            return found
    raise SinkError(
        "the table's log no longer reaches back to that epoch",
        next_step="read without after= and as_of=; delta.logRetentionDuration says how much is kept",
        epoch=until,
        path=path,
    )


def _standing(log: DeltaLog, newest: int, app: str, published: Epoch) -> Iterator[Addition]:
    """The commits whose epochs are still published, newest first; rewound ones are left out."""
    stands = published
    for commit in log.commits(newest):
        mark = commit.mark
        if mark is not None and mark.app == app and mark.kind == "publish" and mark.after == stands:
            yield Addition(version=commit.version, epoch=mark.after, before=mark.before, files=commit.added)
            stands = mark.before


def _owner(log: DeltaLog, newest: int, request: ReadRequest, path: Path) -> tuple[str, str]:
    """The flow and sink whose epochs are read: the named ones, or the only ones that published recently."""
    if request.flow is not None and request.sink is not None:
        return request.flow, request.sink
    marks = (commit.mark for commit in islice(log.commits(newest), _VERSIONS_ASKED))
    owners = {parts_of_app_id(mark.app) for mark in marks if mark is not None}
    fitting = [(flow, sink) for flow, sink in owners if request.flow in (None, flow) and request.sink in (None, sink)]
    if len(fitting) == 1:
        return fitting[0]
    if not owners:
        return request.flow or "", request.sink or ""  # nothing is published yet
    known = ", ".join(sorted(f"{flow}/{sink}" for flow, sink in owners))
    raise SinkError(
        f"several sinks write to the table ({known})"
        if fitting
        else "no such sink has published to the table recently",
        next_step="name the flow= and the sink's name=",
        path=path,
    )


def _schema_of(table: DeltaTable) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(table.schema().to_arrow())
