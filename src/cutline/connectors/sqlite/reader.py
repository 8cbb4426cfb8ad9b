"""Reading a table of a SQLite sink: rows and epoch in one transaction."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.connectors.reading import check_stands, nothing_there, refuse_after, refuse_as_of
from cutline.connectors.sqlite.ledger import EPOCH_COLUMN, Ledger
from cutline.connectors.sqlite.rows import arrow_of, quoted
from cutline.errors import NotDone
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.ports import Published, Wish

if TYPE_CHECKING:
    import pyarrow as pa

#: How long to wait for somebody who holds the database locked.
BUSY_SECONDS = 30.0
_ROWS_AT_ONCE = 50_000


def read_database(path: Path, table: str, wish: Wish) -> Published:
    """The rows are fetched here and now: what is held is of one moment, and holds nobody up."""
    if not path.exists():
        raise nothing_there(path)
    try:
        with _snapshot(path) as db:
            return _read(db, path, table, wish)
    except sqlite3.Error as error:
        raise NotDone(f"the database cannot be read: {error}", next_step="read again", path=path) from error


def _read(db: sqlite3.Connection, path: Path, table: str, wish: Wish) -> Published:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'cutline_sinks'").fetchone():
        raise nothing_there(path)
    owner = db.execute("SELECT flow, sink FROM cutline_sinks WHERE target = ?", (table,)).fetchone()
    if owner is None:
        raise nothing_there(f"table {table} in {path}")
    flow, sink = FlowName(owner[0]), SinkId(owner[1])
    ledger = Ledger.load(db, flow, sink)
    listed = [
        Epoch(epoch) for (epoch,) in db.execute("SELECT epoch FROM cutline_epochs WHERE (flow, sink) = (?, ?)", owner)
    ]
    newest = max(listed, default=NO_EPOCH)
    is_current = wish.reaches(newest)
    if (wish.after or not is_current) and not ledger.has_epochs():
        refuse = refuse_after if wish.after else refuse_as_of
        raise refuse("the table does not say which epoch a row is of (it is upserted, or not rewindable)")
    check_stands(wish, listed, rewound=ledger.rewound(db))
    where = f" WHERE {EPOCH_COLUMN} > ? AND {EPOCH_COLUMN} <= ?" if ledger.has_epochs() else ""
    last = newest if wish.as_of is None else min(newest, wish.as_of)
    found = db.execute(f"SELECT {ledger.columns} FROM {quoted(table)}{where}", (wish.after, last) if where else ())
    batches = list(_batches(found, ledger.schema))
    return Published(
        flow=flow,
        sink=sink,
        epoch=max((epoch for epoch in listed if epoch <= last), default=last),
        schema=ledger.schema,
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
