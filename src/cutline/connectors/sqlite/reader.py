"""Reads a table of a SQLite sink: rows and epoch in one transaction."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cutline.connectors.reading import check_still_published, nothing_published, refuse_after, refuse_as_of
from cutline.connectors.sqlite.ledger import EPOCH_COLUMN, SinkTable
from cutline.connectors.sqlite.rows import arrow_of, quoted
from cutline.errors import NotDone
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.ports.reading import ReadRequest, ReadResult
from cutline.protocol.publish.flow_epochs import Standing

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

#: How long to wait for a process that holds the database locked.
BUSY_SECONDS = 30.0
_ROWS_AT_ONCE = 50_000


def read_database(path: Path, table: str, request: ReadRequest) -> ReadResult:
    """Fetches all rows in one transaction: the result is one snapshot and blocks no other process."""
    return _in_snapshot(path, lambda db: _read(db, path, table, request))


def table_standing(path: Path, table: str) -> Standing:
    """What the database says about the epochs of a table's sink."""
    return _in_snapshot(path, lambda db: _owned(db, path, table).standing(db))


def _in_snapshot(path: Path, look: Callable[[sqlite3.Connection], T]) -> T:
    if not path.exists():
        raise nothing_published(path)
    try:
        with _snapshot(path) as db:
            return look(db)
    except sqlite3.Error as error:
        raise NotDone(f"the database cannot be read: {error}", next_step="read again", path=path) from error


def _owned(db: sqlite3.Connection, path: Path, table: str) -> SinkTable:
    """The table, as its sink has recorded it."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'cutline_sinks'").fetchone():
        raise nothing_published(path)
    owner = db.execute("SELECT flow, sink FROM cutline_sinks WHERE target = ?", (table,)).fetchone()
    if owner is None:
        raise nothing_published(f"table {table} in {path}")
    return SinkTable.load(db, FlowName(owner[0]), SinkId(owner[1]))


def _read(db: sqlite3.Connection, path: Path, table: str, request: ReadRequest) -> ReadResult:
    known = _owned(db, path, table)
    flow, sink = known.owner
    epochs = db.execute("SELECT epoch FROM cutline_epochs WHERE (flow, sink) = (?, ?)", known.owner)
    listed = [Epoch(epoch) for (epoch,) in epochs]
    newest = max(listed, default=NO_EPOCH)
    is_current = request.reaches(newest)
    if (request.after or not is_current) and not known.has_epochs():
        refuse = refuse_after if request.after else refuse_as_of
        raise refuse("the table does not record the epoch of a row (it is upserted, or not rewindable)")
    check_still_published(request, listed, rewound=known.ledger(db).rewound)
    where = f" WHERE {EPOCH_COLUMN} > ? AND {EPOCH_COLUMN} <= ?" if known.has_epochs() else ""
    last = newest if request.as_of is None else min(newest, request.as_of)
    found = db.execute(f"SELECT {known.columns} FROM {quoted(table)}{where}", (request.after, last) if where else ())
    batches = list(_batches(found, known.schema))
    return ReadResult(
        flow=flow,
        sink=sink,
        epoch=max((epoch for epoch in listed if epoch <= last), default=last),
        schema=known.schema,
        batches=lambda: iter(batches),
    )


def _batches(found: sqlite3.Cursor, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while rows := found.fetchmany(_ROWS_AT_ONCE):
        yield arrow_of(rows, schema)


@contextlib.contextmanager
def _snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
        db.execute("BEGIN")
        yield db
