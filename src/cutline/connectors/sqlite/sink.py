"""A table in a SQLite database: for people who want a database and no server.

Executors stage Parquet files beside the database; the driver moves an epoch's rows into the table in one transaction,
which also records the epoch. Readers go on while it does (WAL) and see whole epochs: several tables of one flow in one
database show the same one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from cutline.base.crashpoints import crashpoint
from cutline.base.durable import fsync_dir, make_dir
from cutline.connectors.parquet_writer import ParquetStager
from cutline.connectors.rows import key_problems, rows_schema, storable_schema
from cutline.connectors.sqlite.ledger import EPOCH_COLUMN, PREFIX, Ledger, Shape
from cutline.connectors.sqlite.reader import BUSY_SECONDS, read_database
from cutline.connectors.sqlite.rows import tuples_of
from cutline.connectors.sqlite.share import Share, due_with, has_company, life, share_of, store_prepared
from cutline.connectors.staged_files import (
    STAGED_FOLDER,
    check_claim,
    check_commit,
    check_still_there,
    delete_staged,
    digest_of,
    local_path,
    pieces_of,
    sweep_staged,
)
from cutline.errors import ConfigError, InvariantViolation, NotDone, OutcomeUnknown, SinkError
from cutline.model.ids import Epoch, SinkId

if TYPE_CHECKING:
    from cutline.ports import Published, SinkContext, StagedBatch, Stager, Wish
    from cutline.protocol.publish.commit import CommitPermit

Mode = Literal["append", "upsert"]

#: How many epochs can be taken back, unless the flow says otherwise.
REWIND_EPOCHS = 1_000
_HINT = "restore the flow to an older checkpoint; who deletes beside the database?"


class SQLite:
    """Exactly-once rows in a SQLite table that belongs to this sink; the database may hold any others.

    ``append``: every row is a new row. ``upsert``: a row replaces the one with the same ``key``.
    """

    output_modes: frozenset[str] = frozenset({"append", "update"})

    def __init__(
        self,
        path: str | os.PathLike[str],
        table: str,
        *,
        mode: Mode = "append",
        key: Sequence[str] = (),
        rewindable: bool = True,
        rewind_epochs: int = REWIND_EPOCHS,
    ) -> None:
        self.path = local_path(path, sink="SQLite")
        self.table = table
        self.mode: Mode = mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.can_rewind = rewindable
        self._rewind_epochs = rewind_epochs
        if mode not in get_args(Mode):
            raise ConfigError(f"the SQLite sink has no mode {mode!r}", next_step="use 'append' or 'upsert'")
        if (mode == "upsert") != bool(self.key):
            raise ConfigError(
                "mode='upsert' and key=[…] go together", next_step="name the columns that tell rows apart"
            )
        if not table or table.lower().startswith((PREFIX, "sqlite_")):
            raise ConfigError(f"no table of a flow can be called {table!r}", next_step="choose another name")
        if rewind_epochs < 1:
            raise ConfigError("rewind_epochs must be at least 1", next_step="use rewindable=False to keep nothing")
        self._context: SinkContext | None = None
        self._schema_ipc = b""
        self._ledger: Ledger | None = None
        self._keeper: sqlite3.Connection | None = None
        self._own_claim = ""

    def __repr__(self) -> str:
        return f"SQLite({str(self.path)!r}, {self.table!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Make the table, or check that it is this sink's and takes such rows."""
        schema = storable_schema(rows_schema(context))
        problems = key_problems(schema, self.key)
        problems += [f"the column name {name} is taken" for name in schema.names if name.lower().startswith(PREFIX)]
        if problems:
            raise SinkError("; ".join(problems), next_step="rename columns in the flow, or name another key")
        make_dir(self.path.parent)
        shape = Shape(mode=self.mode, key=self.key, rewindable=self.can_rewind)
        ledger = Ledger(context.flow, context.sink, self.table, shape, schema)
        with self._transaction() as db:
            ledger.claim(db)
        fsync_dir(self.path.parent)
        self._keep_log()
        self._context, self._ledger = context, ledger
        self._schema_ipc = schema.serialize().to_pybytes()

    def claim(self) -> None:
        """The claim is looked at in the transaction that publishes."""
        # With the process in it: what one of its sinks publishes for another one of them must be its own too.
        ledger, claim = self._known(), f"{life()}-{secrets.token_hex(4)}"
        with self._transaction() as db:
            ledger.set_claim(db, claim)
        self._own_claim = claim

    def stager(self) -> Stager:
        return ParquetStager(
            root=str(self._staging),
            folder=STAGED_FOLDER,
            sink=self._opened().sink,
            schema_ipc=self._schema_ipc,
            key=self.key,
            in_calendar=tuple(self._known().schema.names),
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Make sure that the staged files are there, and tell the flow's other sinks in this database of them."""
        ledger = self._known()
        check_still_there(self._staging, pieces_of(staged), hint=_HINT)
        with self._transaction() as db:
            if has_company(db, self._opened().flow):
                store_prepared(db, ledger, epoch, staged, keep=self._rewind_epochs)
        return {"life": life()}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch in one transaction, for this sink and for all others of the flow in this database."""
        context, ledger = self._opened(), self._known()
        check_commit(context, permit, staged)
        own = share_of(context.sink, ledger, staged, self._rewind_epochs)
        shares: list[Share] = []
        with self._transaction() as db:
            if self._is_to_publish(db, permit, own):
                check_claim(ledger.claimed_by(db), self._own_claim, context, permit.epoch)
                check_still_there(self._staging, own.pieces, hint=_HINT)
                others = due_with(db, ledger, permit.epoch, str(token.get("life", "")))
                shares = [own, *(share for share in others if self._is_whole(share))]
                self._publish(db, permit, shares)
        for share in shares:
            crashpoint("sink-commit-done", share.sink)
        sweep_staged(self._staging, staged, permit.through_batch)

    def _is_to_publish(self, db: sqlite3.Connection, permit: CommitPermit, own: Share) -> bool:
        """An epoch without rows is published too if others may have some, so that all stay at the same epoch."""
        if own.pieces:
            return not own.ledger.is_published(db, permit, digest_of(own.pieces))
        return own.ledger.reached(db) < permit.epoch and has_company(db, permit.flow)

    def _publish(self, db: sqlite3.Connection, permit: CommitPermit, shares: Sequence[Share]) -> None:
        for share in shares:
            crashpoint("sink-commit-begun", share.sink)
        for share in shares:
            for rows in self._rows(share):
                share.ledger.write(db, permit.epoch, rows)
            if share.pieces:
                share.ledger.record(db, permit.epoch, digest_of(share.pieces), share.through, keep=share.keep)
            share.ledger.set_reached(db, permit.epoch)

    def _is_whole(self, share: Share) -> bool:
        """Whether another sink's files are there; if not, that is for its own commit to say."""
        folder = self._staging_of(share.sink)
        return all((folder / piece["path"]).exists() for piece in share.pieces)

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named staged files; what is published is in the table."""
        delete_staged(self._staging, pieces_of(staged))

    def published(self) -> Epoch | None:
        ledger = self._known()
        with self._transaction("DEFERRED") as db:
            return ledger.published(db) or None

    def highest(self) -> Epoch:
        ledger = self._known()
        with self._transaction("DEFERRED") as db:
            return max(ledger.published(db), ledger.rewound(db))

    def rewind(self, epoch: Epoch) -> None:
        """Make the table what it was when ``epoch`` was newest, in one transaction."""
        self.rewind_together([(self, epoch)])

    def rewind_group(self) -> object:
        """Sinks of which this is equal are taken back together."""
        return ("sqlite", self.path)

    def rewind_together(self, targets: Sequence[tuple[Any, Epoch]]) -> None:
        """Take several sinks back in one transaction, so that their tables never disagree."""
        with self._transaction() as db:
            for sink, epoch in targets:
                ledger = sink._known()
                if ledger.published(db) <= epoch:
                    continue
                if not sink.can_rewind:
                    raise SinkError("the sink was made with rewindable=False", next_step='use on_rollback="keep"')
                check_claim(ledger.claimed_by(db), sink._own_claim, sink._opened(), epoch)
                ledger.rewind(db, epoch)
                crashpoint("sink-rewind-half", sink._opened().sink)

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches."""
        ledger = self._known()
        with self._transaction("DEFERRED") as db:
            return ledger.forgotten(db)

    def read(self, wish: Wish) -> Published:
        """What one transaction sees of the table, and of which epoch that is."""
        return read_database(self.path, self.table, wish)

    # ------------------------------------------------------------------ the database

    def _opened(self) -> SinkContext:
        if self._context is None:
            raise InvariantViolation("the sink is used before it was opened", path=self.path)
        return self._context

    def _known(self) -> Ledger:
        if self._ledger is None:
            raise InvariantViolation("the sink is used before it was opened", path=self.path)
        return self._ledger

    @property
    def _staging(self) -> Path:
        return self._staging_of(self._opened().sink)

    def _staging_of(self, sink: SinkId) -> Path:
        """Beside the database: of one sink, since several may share the database."""
        return self.path.with_name(f"{self.path.name}.{PREFIX}staged") / self._opened().flow / sink

    def _keep_log(self) -> None:
        """Stay connected: the last one to leave puts the log away, and readers that come just then find a lock."""
        if self._keeper is None:
            self._keeper = sqlite3.connect(self.path, timeout=BUSY_SECONDS, check_same_thread=False)
            self._keeper.execute("SELECT COUNT(*) FROM cutline_sinks").fetchone()
            weakref.finalize(self, self._keeper.close)

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """A connection inside a transaction that is durable when the block ends, or did not happen if it raises.

        A connection for each: they are few, and the threads that use a sink differ.
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
            # Without COMMIT nothing has happened: closing the connection rolls back.
            raise (OutcomeUnknown if is_committing else NotDone)(
                f"the database did not take it: {error}",
                next_step="see whether another process holds the database locked; it is tried again",
                path=self.path,
            ) from error

    def _rows(self, share: Share) -> Iterator[list[tuple[Any, ...]]]:
        """The staged rows in their order, so many at a time as make a batch of Arrow."""
        import pyarrow.parquet as pq

        for index, piece in enumerate(share.pieces):
            if index == len(share.pieces) // 2:
                crashpoint("sink-commit-half", share.sink)
            with pq.ParquetFile(self._staging_of(share.sink) / piece["path"]) as file:
                for batch in file.iter_batches():
                    yield list(tuples_of(batch))


__all__ = ["EPOCH_COLUMN", "SQLite"]
