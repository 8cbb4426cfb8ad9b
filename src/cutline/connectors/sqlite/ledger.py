"""The ledger in a SQLite database: which sink owns which table, what is published, how to rewind.

Every function works inside the caller's transaction, so rows and ledger change together or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from cutline.connectors.reach import decoded, encoded
from cutline.connectors.rows import differences, recorded_schema
from cutline.connectors.sqlite.rows import declared_type, quoted
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId
from cutline.protocol.publish import sink_ledger
from cutline.protocol.publish.flow_epochs import Reach, Standing
from cutline.protocol.publish.rewind_points import Gap, thinned
from cutline.protocol.publish.sink_ledger import SinkLedger

if TYPE_CHECKING:
    import pyarrow as pa


EPOCH_COLUMN = "cutline_epoch"
#: Tables of this prefix are the ledger's own.
PREFIX = "cutline_"

_CREATE = """
CREATE TABLE IF NOT EXISTS cutline_sinks (
    flow TEXT NOT NULL, sink TEXT NOT NULL, target TEXT NOT NULL UNIQUE COLLATE NOCASE,
    shape TEXT NOT NULL,                   -- mode, key and rewindable, which never change
    schema_ipc BLOB NOT NULL,              -- of the rows
    rewound INTEGER NOT NULL DEFAULT 0,    -- highest epoch that a rewind removed: it and all below never return
    forgotten INTEGER NOT NULL DEFAULT 0,  -- oldest epoch that a rewind reaches
    reached INTEGER NOT NULL DEFAULT 0,    -- newest committed epoch, with rows or without
    claim TEXT NOT NULL DEFAULT '',        -- the instance that may publish; empty: unclaimed
    reach TEXT NOT NULL DEFAULT '',        -- for readers of several tables, see protocol.publish.flow_epochs
    PRIMARY KEY (flow, sink)
);
CREATE TABLE IF NOT EXISTS cutline_epochs (
    flow TEXT NOT NULL, sink TEXT NOT NULL, epoch INTEGER NOT NULL,
    digest TEXT NOT NULL,                  -- distinguishes a repeat from another epoch of the same number
    through INTEGER NOT NULL,              -- generation and number of its last batch with rows
    merged_from INTEGER NOT NULL DEFAULT 0,  -- the oldest of the epochs merged into this one; 0: none
    PRIMARY KEY (flow, sink, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cutline_prepared (
    flow TEXT NOT NULL, sink TEXT NOT NULL, epoch INTEGER NOT NULL,
    life TEXT NOT NULL,                    -- the process that prepared it
    keep INTEGER NOT NULL, staged TEXT NOT NULL,
    PRIMARY KEY (flow, sink, epoch)
) WITHOUT ROWID;
"""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that are fixed when the table is created."""

    mode: str
    key: tuple[str, ...]
    rewindable: bool


class SinkTable:
    """The table of one sink and its records in the database. ``schema``: of the rows."""

    def __init__(self, flow: FlowName, sink: SinkId, table: str, shape: Shape, schema: pa.Schema) -> None:
        self.owner = (flow, sink)
        self._table = table
        self._shape = shape
        self.schema = schema
        self._undo = f"{PREFIX}undo_{table}"
        self.columns = ", ".join(quoted(name) for name in schema.names)
        self._key = ", ".join(quoted(name) for name in shape.key)

    @classmethod
    def load(cls, db: sqlite3.Connection, flow: FlowName, sink: SinkId) -> SinkTable:
        """The table of a sink that has opened this database."""
        query = "SELECT target, shape, schema_ipc FROM cutline_sinks WHERE (flow, sink) = (?, ?)"
        table, shape, schema_ipc = db.execute(query, (flow, sink)).fetchone()
        schema = recorded_schema(schema_ipc, flow=flow, sink=sink, table=table)
        return cls(flow, sink, table, msgspec.json.decode(shape, type=Shape), schema)

    # ------------------------------------------------------------------ the tables

    def create(self, db: sqlite3.Connection) -> None:
        """Create the tables, or check that the existing ones belong to this sink and take such rows."""
        for statement in _CREATE.split(";\n"):
            db.execute(statement)
        if "merged_from" not in {row[1] for row in db.execute("PRAGMA table_info(cutline_epochs)")}:
            db.execute("ALTER TABLE cutline_epochs ADD COLUMN merged_from INTEGER NOT NULL DEFAULT 0")
        if not _has_reach(db):
            db.execute("ALTER TABLE cutline_sinks ADD COLUMN reach TEXT NOT NULL DEFAULT ''")
        found = db.execute(
            "SELECT flow, sink, target, shape, schema_ipc FROM cutline_sinks WHERE (flow, sink) = (?, ?) OR target = ?",
            (*self.owner, self._table),
        ).fetchone()
        if found is None:
            self._create(db)
            return
        problems = []
        if (found[0], found[1]) != self.owner:
            problems.append(f"table {self._table} belongs to sink {found[1]} of flow {found[0]}")
        elif found[2].lower() != self._table.lower():
            problems.append(f"this sink has written to table {found[2]} so far")
        else:
            problems += differences(self.schema, recorded_schema(found[4], table=self._table))
            before = msgspec.json.decode(found[3], type=Shape)
            if before != self._shape:
                problems.append(f"the table was created with {before}, the sink now has {self._shape}")
        if problems:
            raise SinkError(
                f"the rows do not fit the database: {'; '.join(problems)}",
                next_step="give the sink another table (or the flow or sink the old name)",
                flow=self.owner[0],
                sink=self.owner[1],
            )

    def _create(self, db: sqlite3.Connection) -> None:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = ? COLLATE NOCASE", (self._table,)).fetchone():
            raise SinkError(
                f"a table {self._table} exists already, and no Cutline sink created it",
                next_step="choose another table, or rename that one",
                sink=self.owner[1],
            )
        columns = [
            f"{quoted(field.name)} {declared_type(field.type)}{' NOT NULL' if field.name in self._shape.key else ''}"
            for field in self.schema
        ]
        if self._shape.mode == "upsert":
            if self._shape.rewindable:
                undo = [*columns, f"PRIMARY KEY ({EPOCH_COLUMN}, {self._key})"]
                first = f"{EPOCH_COLUMN} INTEGER NOT NULL, cutline_was_there INTEGER NOT NULL"
                db.execute(f"CREATE TABLE {quoted(self._undo)} ({first}, {', '.join(undo)}) WITHOUT ROWID")
            columns.append(f"PRIMARY KEY ({self._key})")
        elif self.has_epochs():
            columns.append(f"{EPOCH_COLUMN} INTEGER NOT NULL")
        db.execute(f"CREATE TABLE {quoted(self._table)} ({', '.join(columns)})")
        db.execute(
            "INSERT INTO cutline_sinks (flow, sink, target, shape, schema_ipc) VALUES (?, ?, ?, ?, ?)",
            (
                *self.owner,
                self._table,
                msgspec.json.encode(self._shape).decode(),
                self.schema.serialize().to_pybytes(),
            ),
        )

    # ------------------------------------------------------------------ publishing

    def published(self, db: sqlite3.Connection) -> Epoch:
        query = "SELECT MAX(epoch) FROM cutline_epochs WHERE (flow, sink) = (?, ?)"
        return Epoch(db.execute(query, self.owner).fetchone()[0] or NO_EPOCH)

    def reached(self, db: sqlite3.Connection) -> Epoch:
        query = "SELECT reached FROM cutline_sinks WHERE (flow, sink) = (?, ?)"
        return Epoch(db.execute(query, self.owner).fetchone()[0])

    def set_claim(self, db: sqlite3.Connection, claim: str) -> None:
        db.execute("UPDATE cutline_sinks SET claim = ? WHERE (flow, sink) = (?, ?)", (claim, *self.owner))

    def set_reached(self, db: sqlite3.Connection, epoch: Epoch) -> None:
        """The epoch is committed, with rows or without; records prepared up to it are deleted."""
        db.execute("UPDATE cutline_sinks SET reached = ? WHERE (flow, sink) = (?, ?)", (epoch, *self.owner))
        db.execute("DELETE FROM cutline_prepared WHERE (flow, sink) = (?, ?) AND epoch <= ?", (*self.owner, epoch))

    def standing(self, db: sqlite3.Connection) -> Standing:
        """What the database says about the sink's epochs."""
        ledger, (flow, sink) = self.ledger(db), self.owner
        query = "SELECT reach FROM cutline_sinks WHERE (flow, sink) = (?, ?)"
        return Standing(
            flow=flow,
            sink=sink,
            published=ledger.published,
            rewound=ledger.rewound,
            claim=ledger.claim,
            reach=decoded(db.execute(query, self.owner).fetchone()[0]) if _has_reach(db) else None,
            oldest=NO_EPOCH if self.has_epochs() else ledger.published,
        )

    def set_reach(self, db: sqlite3.Connection, reach: Reach) -> None:
        update = "UPDATE cutline_sinks SET reach = ? WHERE (flow, sink) = (?, ?)"
        db.execute(update, (encoded(reach).decode(), *self.owner))

    def through(self, db: sqlite3.Connection) -> int:
        """Place of the last published batch with rows; -1 if there is none."""
        query = "SELECT through FROM cutline_epochs WHERE (flow, sink) = (?, ?) ORDER BY epoch DESC LIMIT 1"
        found = db.execute(query, self.owner).fetchone()
        return int(found[0]) if found is not None else -1

    def ledger(self, db: sqlite3.Connection, epoch: Epoch = NO_EPOCH) -> SinkLedger:
        """The sink's ledger; its only digest is that of ``epoch``."""
        flow, sink = self.owner
        query = "SELECT rewound, forgotten, claim FROM cutline_sinks WHERE (flow, sink) = (?, ?)"
        rewound, forgotten, claim = db.execute(query, self.owner).fetchone()
        query = "SELECT epoch, digest FROM cutline_epochs WHERE (flow, sink, epoch) = (?, ?, ?)"
        return SinkLedger(
            flow=flow,
            sink=sink,
            published=self.published(db),
            rewound=Epoch(rewound),
            digests=dict(db.execute(query, (*self.owner, epoch)).fetchall()),
            reach=Epoch(forgotten),
            gaps=self.gaps(db),
            claim=claim,
        )

    def gaps(self, db: sqlite3.Connection) -> tuple[Gap, ...]:
        query = "SELECT merged_from, epoch FROM cutline_epochs WHERE (flow, sink) = (?, ?) AND merged_from > 0"
        return tuple((Epoch(first), Epoch(last)) for first, last in db.execute(query, self.owner))

    def write(self, db: sqlite3.Connection, epoch: Epoch, rows: Sequence[tuple[object, ...]]) -> None:
        """Write the rows to the table; keep the rows that they replace as they were before the epoch."""
        marks = ", ".join("?" * len(self.schema.names))
        table = quoted(self._table)
        if self._shape.mode == "append":
            if self._shape.rewindable:
                statement = f"INSERT INTO {table} ({self.columns}, {EPOCH_COLUMN}) VALUES ({marks}, {epoch})"
            else:
                statement = f"INSERT INTO {table} ({self.columns}) VALUES ({marks})"
            db.executemany(statement, rows)
            return
        if self._shape.rewindable:
            self._keep_images(db, epoch, rows)
        others = [name for name in self.schema.names if name not in self._shape.key]
        sets = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in others)
        conflict = f"ON CONFLICT ({self._key}) DO {f'UPDATE SET {sets}' if sets else 'NOTHING'}"
        db.executemany(f"INSERT INTO {table} ({self.columns}) VALUES ({marks}) {conflict}", rows)

    def _keep_images(self, db: sqlite3.Connection, epoch: Epoch, rows: Sequence[tuple[object, ...]]) -> None:
        """Keep the current row of each key, or that there is none. The first image of a key in an epoch counts."""
        places = [self.schema.names.index(name) for name in self._shape.key]
        keys = [tuple(row[place] for place in places) for row in rows]
        values = ", ".join(
            f"?{self._shape.key.index(name) + 1}" if name in self._shape.key else f"t.{quoted(name)}"
            for name in self.schema.names
        )
        match = " AND ".join(f"t.{quoted(name)} = ?{number}" for number, name in enumerate(self._shape.key, 1))
        now = f"(SELECT 1) LEFT JOIN {quoted(self._table)} t ON {match}"
        db.executemany(
            f"INSERT OR IGNORE INTO {quoted(self._undo)} ({EPOCH_COLUMN}, cutline_was_there, {self.columns}) "
            f"SELECT {epoch}, t.{quoted(self._shape.key[0])} IS NOT NULL, {values} FROM {now}",
            keys,
        )

    def record(
        self,
        db: sqlite3.Connection,
        epoch: Epoch,
        digest: str,
        through: int,
        *,
        keep: int,
        points: Collection[Epoch] | None,
    ) -> None:
        """Record a published epoch; of those before the last ``keep`` epochs, keep what rewinds to ``points`` need."""
        db.execute(
            "INSERT INTO cutline_epochs (flow, sink, epoch, digest, through) VALUES (?, ?, ?, ?, ?)",
            (*self.owner, epoch, digest, through),
        )
        query = "SELECT epoch FROM cutline_epochs WHERE (flow, sink) = (?, ?) ORDER BY epoch DESC LIMIT -1 OFFSET ?"
        older = [Epoch(one) for (one,) in db.execute(query, (*self.owner, keep))]
        plan = thinned(older[::-1], points)
        for one, following in plan.merges:
            self._merge(db, one, following)
        if plan.oldest is not None:
            self._forget(db, plan.oldest)

    def _forget(self, db: sqlite3.Connection, oldest: Epoch) -> None:
        """A rewind can end at the oldest epoch that stays, so the images of that epoch are not needed either."""
        db.execute("DELETE FROM cutline_epochs WHERE (flow, sink) = (?, ?) AND epoch < ?", (*self.owner, oldest))
        db.execute(
            "UPDATE cutline_sinks SET forgotten = MAX(forgotten, ?) WHERE (flow, sink) = (?, ?)", (oldest, *self.owner)
        )
        if self._has_images():
            db.execute(f"DELETE FROM {quoted(self._undo)} WHERE {EPOCH_COLUMN} <= ?", (oldest,))

    def _merge(self, db: sqlite3.Connection, older: Epoch, newer: Epoch) -> None:
        """The newer epoch stands for both. Of the images of a key the older one stays, under the older number."""
        query = "SELECT merged_from FROM cutline_epochs WHERE (flow, sink, epoch) = (?, ?, ?)"
        first, second = (db.execute(query, (*self.owner, one)).fetchone()[0] or one for one in (older, newer))
        if self._has_images():
            undo = quoted(self._undo)
            move = f"UPDATE OR IGNORE {undo} SET {EPOCH_COLUMN} = ? WHERE {EPOCH_COLUMN} = ?"
            db.execute(move, (first, second))
            db.execute(f"DELETE FROM {undo} WHERE {EPOCH_COLUMN} = ?", (second,))
        db.execute("DELETE FROM cutline_epochs WHERE (flow, sink, epoch) = (?, ?, ?)", (*self.owner, older))
        update = "UPDATE cutline_epochs SET merged_from = ? WHERE (flow, sink, epoch) = (?, ?, ?)"
        db.execute(update, (first, *self.owner, newer))

    # ------------------------------------------------------------------ rewind

    def rewind(self, db: sqlite3.Connection, epoch: Epoch) -> None:
        """Remove what was published above the epoch. The caller has checked that there is something to remove."""
        table = quoted(self._table)
        if self._has_images():
            undo, later = quoted(self._undo), f"{EPOCH_COLUMN} > {epoch}"
            db.execute(f"DELETE FROM {table} WHERE ({self._key}) IN (SELECT {self._key} FROM {undo} WHERE {later})")
            # SQLite takes the other columns from the row that has the minimum.
            first = f"SELECT *, MIN({EPOCH_COLUMN}) FROM {undo} WHERE {later} GROUP BY {self._key}"
            db.execute(
                f"INSERT INTO {table} ({self.columns}) SELECT {self.columns} FROM ({first}) WHERE cutline_was_there"
            )
            db.execute(f"DELETE FROM {undo} WHERE {later}")
        else:
            db.execute(f"DELETE FROM {table} WHERE {EPOCH_COLUMN} > ?", (epoch,))
        db.execute(
            "UPDATE cutline_sinks SET rewound = ? WHERE (flow, sink) = (?, ?)",
            (sink_ledger.rewind(self.ledger(db), epoch).rewound, *self.owner),
        )
        db.execute("DELETE FROM cutline_epochs WHERE (flow, sink) = (?, ?) AND epoch > ?", (*self.owner, epoch))
        self.set_reached(db, epoch)

    def has_epochs(self) -> bool:
        """Whether each row records its epoch."""
        return self._shape.mode == "append" and self._shape.rewindable

    def _has_images(self) -> bool:
        return self._shape.mode == "upsert" and self._shape.rewindable


def _has_reach(db: sqlite3.Connection) -> bool:
    """Not in a database of a former version that no sink has opened since."""
    return "reach" in {row[1] for row in db.execute("PRAGMA table_info(cutline_sinks)")}
