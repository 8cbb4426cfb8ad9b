"""A table in a SQLite database: a database without a server.

Executors stage Parquet files beside the database; the driver moves an epoch's rows into the table in one transaction,
which also records the epoch. Readers are not blocked (WAL) and see whole epochs: several tables of one flow in one
database show the same epoch.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from cutline.base.durable import settle_dir
from cutline.config.arguments import checked
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.reach import own_reach
from cutline.connectors.rows import key_problems, rows_schema, storable_schema
from cutline.connectors.shared_epochs import (
    Keep,
    RewindTarget,
    new_claim,
    pass_point,
    process_name,
    publish_for_all,
    rewind_targets,
)
from cutline.connectors.sink_base import OpenedSink, not_opened
from cutline.connectors.sqlite.ledger import EPOCH_COLUMN, PREFIX, Shape, SinkTable
from cutline.connectors.sqlite.reader import BUSY_SECONDS, read_database, table_standing
from cutline.connectors.sqlite.share import SqliteShare, due_with, has_other_sinks, share_of, store_prepared
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_still_there,
    collect_staged,
    delete_staged,
    local_path,
    pieces_of,
)
from cutline.errors import ConfigError, NotDone, OutcomeUnknown, SinkError

if TYPE_CHECKING:
    from cutline.model.ids import Epoch
    from cutline.model.staging import StagedBatch
    from cutline.ports.reading import ReadRequest, ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.flow_epochs import Standing
    from cutline.protocol.publish.rewind_points import Gap
    from cutline.protocol.publish.sink_ledger import SinkLedger

Mode = Literal["append", "upsert"]

#: How many epochs can be rewound, whatever checkpoints the flow has, unless a user says otherwise.
REWIND_EPOCHS = 1_000
_HINT = "find out what deletes files beside the database, then restore the flow to an older checkpoint"


class SQLite:
    """Exactly-once rows in a SQLite table that belongs to this sink; the database may hold any others.

    ``append``: every row is a new row. ``upsert``: a row replaces the one with the same ``key``.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})

    @checked("sinks.SQLite")
    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str,
        *,
        mode: Mode = "append",
        key: Sequence[str] = (),
        rewindable: bool = True,
        rewind_epochs: int | None = None,
    ) -> None:
        """``rewind_epochs``: how many epochs with rows can be rewound.

        Unset: the last thousand, and before that those to which the flow can be restored.
        """
        self.path = local_path(path, sink="SQLite")
        self.table = table
        self.mode: Mode = mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.can_rewind = rewindable
        self._keep = Keep.asked(rewind_epochs, REWIND_EPOCHS)
        if mode not in get_args(Mode):
            raise ConfigError(f"the SQLite sink has no mode {mode!r}", next_step="use 'append' or 'upsert'")
        if (mode == "upsert") != bool(self.key):
            raise ConfigError("mode='upsert' and key=[…] go together", next_step="name the columns that identify a row")
        if not table or table.lower().startswith((PREFIX, "sqlite_")):
            raise ConfigError(f"a table of a flow cannot be named {table!r}", next_step="choose another name")
        if self._keep.epochs < 1:
            raise ConfigError("rewind_epochs must be at least 1", next_step="use rewindable=False to keep nothing")
        self._opened = OpenedSink(f"table {table}", path=self.path)
        self._schema_ipc = b""
        self._sink_table: SinkTable | None = None
        self._keeper: sqlite3.Connection | None = None

    def __repr__(self) -> str:
        return f"SQLite({str(self.path)!r}, {self.table!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Create the table, or check that it belongs to this sink and takes such rows."""
        schema = storable_schema(rows_schema(context))
        problems = key_problems(schema, self.key)
        problems += [f"the column name {name} is taken" for name in schema.names if name.lower().startswith(PREFIX)]
        if problems:
            raise SinkError("; ".join(problems), next_step="rename columns in the flow, or name another key")
        settle_dir(self.path.parent)
        shape = Shape(mode=self.mode, key=self.key, rewindable=self.can_rewind)
        table = SinkTable(context.flow, context.sink, self.table, shape, schema)
        with self._transaction() as db:
            table.create(db)  # SQLite itself syncs the folder in which it creates a database
        self._keep_log()
        self._opened.enter(context)
        self._sink_table = table
        self._schema_ipc = schema.serialize().to_pybytes()

    def claimed(self) -> str:
        with self._transaction() as db:
            return self._table_of_sink().ledger(db).claim

    def claim(self, history: str, *, expected: str) -> None:
        """The transaction that publishes checks the claim."""
        table, claim = self._table_of_sink(), new_claim(history)
        with self._transaction() as db:
            self._opened.check_expected(table.ledger(db).claim, expected)
            table.set_claim(db, claim)
        self._opened.claim = claim

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self._staging),
            folder=STAGED_FOLDER,
            sink=self._opened.context.sink,
            schema_ipc=self._schema_ipc,
            key=self.key,
            in_calendar=tuple(self._table_of_sink().schema.names),
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Check that the staged files exist, and record them for the flow's other sinks in this database."""
        table = self._table_of_sink()
        check_still_there(self._staging, pieces_of(staged), hint=_HINT)
        with self._transaction() as db:
            if has_other_sinks(db, self._opened.context.flow):
                store_prepared(db, table, epoch, staged, keep=self._keep)
        return {"life": process_name()}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch in one transaction, for this sink and the flow's other sinks in this database."""
        self._opened.check_covered(permit, staged)
        shares: list[SqliteShare] = []
        with self._transaction() as db:
            own = self._share(db, staged)
            if self._is_to_publish(own, permit):
                check_still_there(self._staging, own.pieces, hint=_HINT)
                shares = [own, *due_with(own, permit.epoch, str(token.get("life", "")))]
                publish_for_all(shares, permit)
        pass_point("sink-commit-done", shares)
        collect_staged(self._staging, staged, permit.through_batch)

    def _is_to_publish(self, own: SqliteShare, permit: CommitPermit) -> bool:
        """An epoch without rows is published too if other sinks may have rows, so that all stay at the same epoch."""
        ledger = own.ledger(permit.epoch)
        if own.has_rows:
            return self._opened.is_to_publish(ledger, permit, own.digest)
        if own.table.reached(own.db) >= permit.epoch or not has_other_sinks(own.db, permit.flow):
            return False
        self._opened.check_held(ledger, permit.epoch)
        return True

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files; published rows are in the table."""
        delete_staged(self._staging, pieces_of(staged))

    def published(self) -> Epoch | None:
        return self._ledger().published or None

    def highest(self) -> Epoch:
        return self._ledger().highest

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches."""
        return self._ledger().reach

    def rewind_gaps(self) -> tuple[Gap, ...]:
        """Epochs that ``rewind`` does not reach, because no checkpoint of the flow needed them."""
        return self._ledger().gaps

    def rewind(self, epoch: Epoch) -> None:
        """Restore the table as it was when ``epoch`` was newest, in one transaction."""
        self.rewind_together([(self, epoch)])

    def rewind_group(self) -> object:
        """Sinks with equal groups are rewound in one transaction."""
        return ("sqlite", self.path)

    def rewind_together(self, targets: Sequence[tuple[Any, Epoch]]) -> None:
        """Rewind several sinks in one transaction, so that their tables never disagree."""
        with self._transaction() as db:
            rewind_targets(
                (
                    RewindTarget(
                        opened=sink._opened,
                        epoch=epoch,
                        can_rewind=sink.can_rewind,
                        in_transaction=sink._share(db, ()),
                    )
                    for sink, epoch in targets
                ),
                keep_more="a larger rewind_epochs keeps more for the next time",
            )

    def read(self, request: ReadRequest) -> ReadResult:
        """The table and its epoch, as one transaction sees them."""
        return read_database(self.path, self.table, request)

    def standing(self, request: ReadRequest) -> Standing:
        return table_standing(self.path, self.table)

    def record_reach(self, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
        table, claim = self._table_of_sink(), self._opened.claim
        with self._transaction() as db:
            reach = own_reach(table.standing(db), claim, epoch, is_per_operator=is_per_operator, at_start=at_start)
            if reach is not None:
                table.set_reach(db, reach)

    # ------------------------------------------------------------------ the database

    def _table_of_sink(self) -> SinkTable:
        if self._sink_table is None:
            raise not_opened(path=self.path)
        return self._sink_table

    def _ledger(self) -> SinkLedger:
        table = self._table_of_sink()
        with self._transaction("DEFERRED") as db:
            return table.ledger(db)

    def _share(self, db: sqlite3.Connection, staged: Sequence[StagedBatch]) -> SqliteShare:
        return share_of(db, self._table_of_sink(), staged, keep=self._keep, folder=self._staging)

    @property
    def _staging(self) -> Path:
        """A folder beside the database, with one folder for each sink: several may share the database."""
        context = self._opened.context
        return self.path.with_name(f"{self.path.name}.{PREFIX}staged") / context.flow / context.sink

    def _keep_log(self) -> None:
        """Stay connected: the last connection that closes deletes the WAL, and readers at that moment find a lock."""
        if self._keeper is None:
            self._keeper = sqlite3.connect(self.path, timeout=BUSY_SECONDS, check_same_thread=False)
            self._keeper.execute("SELECT COUNT(*) FROM cutline_sinks").fetchone()
            weakref.finalize(self, self._keeper.close)

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction that is durable when the block ends, and rolled back if it raises.

        Each transaction has its own connection: transactions are few, and several threads use a sink.
        """
        is_committing = False
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                db.execute(f"BEGIN {kind}")
                yield db
                is_committing = True
                db.execute("COMMIT")
        except sqlite3.Error as error:
            # Before COMMIT nothing has happened: closing the connection rolls back.
            raise (OutcomeUnknown if is_committing else NotDone)(
                f"the database rejected the transaction: {error}",
                next_step="check whether another process holds the database locked; Cutline retries",
                path=self.path,
            ) from error


__all__ = ["EPOCH_COLUMN", "SQLite"]
