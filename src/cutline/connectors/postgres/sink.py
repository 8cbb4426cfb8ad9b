"""A PostgreSQL table, appended to or upserted, with one transaction for each epoch.

Several sinks of a flow on one database are published together. There is no meeting in memory: ``prepare`` writes down
in the database what the epoch will publish, and whichever sink is first told to publish it does so for all of them, in
one transaction. Its permit says that the checkpoint exists, and a checkpoint exists for all operators or for none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.connectors.postgres.cleanup import clear_staged
from cutline.connectors.postgres.connection import Address, Session, life
from cutline.connectors.postgres.copy_binary import fits_binary
from cutline.connectors.postgres.ledger import (
    LedgerRow,
    Share,
    check_owner,
    check_there,
    delete_pieces,
    is_published,
    ledgers_behind,
    load_ledger,
    load_prepared,
    store_claim,
    store_prepared,
)
from cutline.connectors.postgres.publish import Publication
from cutline.connectors.postgres.reader import read_table
from cutline.connectors.postgres.staging import PostgresStager
from cutline.connectors.postgres.tables import (
    BEFORE_COLUMNS,
    Plan,
    align_side_table,
    align_staging,
    columns_of,
    create_table,
    enter_ledger,
    find_table,
    fit_problems,
    open_books,
)
from cutline.connectors.postgres.types import is_usable_name, table_columns
from cutline.connectors.rows import rows_schema
from cutline.connectors.staged_files import check_claim, check_commit
from cutline.errors import InvariantViolation, SinkError, StoreError
from cutline.model.ids import NO_EPOCH, Epoch

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection
    from cutline.ports import Published, SinkContext, StagedBatch, Stager, Wish
    from cutline.protocol.publish.commit import CommitPermit

log = get_logger(__name__)


class Postgres:
    """Exactly-once rows in a table. Readers see whole epochs, in order; all tables of a flow at the same epoch."""

    output_modes: frozenset[str] = frozenset({"append", "update"})

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        mode: Literal["append", "upsert"] = "append",
        key: Sequence[str] = (),
        rewindable: bool = True,
        keep_epochs: int = 100,
        books: str = "cutline_books",
    ) -> None:
        """``dsn``: for libpq; what it leaves out comes from the environment. ``table``: may name a schema, too.

        ``rewindable``: the table gets a column ``cutline_epoch`` (append), or what rows were before they were replaced
        is kept for the last ``keep_epochs`` epochs (upsert). ``books``: the schema for the sink's own tables.
        """
        self._dsn = dsn
        self.table, self.mode = table, mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.can_rewind = rewindable
        self._keep_epochs, self._books = keep_epochs, books
        self._check_arguments()
        self._context: SinkContext | None = None
        self._plan: Plan | None = None
        self._seen_version = 0
        self._own_claim = ""
        self._is_binary = False

    def __repr__(self) -> str:
        # The connection string may hold a password.
        return f"Postgres(…, {self.table!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Create the table and the books, or check that the table takes such rows and is nobody else's."""
        columns = table_columns(rows_schema(context))
        if unknown := [name for name in self.key if name not in columns]:
            raise SinkError(
                "the rows have no such key column", next_step=f"use some of: {', '.join(columns)}", column=unknown
            )
        address = Address(self._dsn)
        self._reads, self._writes = Session(address), Session(address)
        self._context = context

        def prepare_tables(connection: Connection) -> tuple[Plan, LedgerRow]:
            open_books(connection, self._books)
            plan = self._enter(connection, context, columns)
            return plan, load_ledger(connection, self._books, [plan.ledger])[plan.ledger]

        self._plan, row = self._reads.run("be opened", prepare_tables, is_steady=False)
        self._seen_version = row.version

    def claim(self) -> None:
        """The claim is looked at in the transaction that publishes."""
        plan = self._opened()[1]
        # With the process in it: what one of its sinks publishes for another one of them must be its own too.
        claim = f"{life()}-{secrets.token_hex(4)}"

        def take(connection: Connection) -> int:
            return store_claim(connection, self._books, plan.ledger, claim=claim, life=life())

        self._seen_version = self._writes.run("be claimed", take)
        self._own_claim = claim

    def stager(self) -> Stager:
        plan = self._opened()[1]
        return PostgresStager(
            dsn=self._dsn, schema=self._books, ledger=plan.ledger, columns=plan.columns, is_binary=self._is_binary
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Write down what the epoch will publish, for whichever sink of the flow publishes it."""
        context, plan = self._opened()
        share = Share(plan=plan, pieces=_numbers(staged))

        def note(connection: Connection) -> None:
            check_there(connection, self._books, share, hint="take another checkpoint; who deletes in the books?")
            store_prepared(connection, self._books, share, flow=context.flow, epoch=epoch, life=life())

        if share.pieces:
            self._reads.run("prepare the epoch", note, epoch=epoch)
        return {"life": life()}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch for this sink and for all others of the flow on this database that have rows in it."""
        context, plan = self._opened()
        check_commit(context, permit, staged)
        share = Share(plan=plan, pieces=_numbers(staged))

        def publish(connection: Connection) -> list[Share]:
            # Also without rows of its own: a sink that passed by would be told of later epochs before the others.
            noted = load_prepared(connection, self._books, permit, str(token.get("life", "")))
            shares = [
                one for one in (share, *(other for other in noted if other.plan.ledger != plan.ledger)) if one.pieces
            ]
            if not shares:
                return []
            rows = load_ledger(connection, self._books, {plan.ledger, *(one.plan.ledger for one in shares)}, lock=True)
            if share.pieces and is_published(connection, self._books, rows[plan.ledger], permit, share.pieces):
                return []
            check_claim(rows[plan.ledger].claim, self._own_claim, context, permit.epoch)
            check_owner(rows[plan.ledger], permit.sink, seen_version=self._seen_version, life=life())
            # Another sink that is further on, was taken back, or has an earlier epoch to publish first, has its own
            # permits to be judged by.
            behind = ledgers_behind(connection, self._books, rows, permit.previous_epoch)
            shares = [
                one
                for one in shares
                if one is share or (one.plan.ledger not in behind and _is_due(rows.get(one.plan.ledger), permit.epoch))
            ]
            _pass("sink-commit-begun", shares)
            for one in shares:
                Publication(connection, self._books, one.plan, life=life()).publish(
                    one, epoch=permit.epoch, generation=permit.generation
                )
            _pass("sink-commit-half", shares)
            return shares

        published = self._writes.run("take the epoch", publish, flow=permit.flow, epoch=permit.epoch)
        _pass("sink-commit-done", published)
        if share.pieces:
            self._clear(plan)

    def _clear(self, plan: Plan) -> None:
        """That published rows lie staged for a while is no reason to call the epoch unpublished."""
        try:
            self._writes.run(
                "lose staged rows",
                lambda connection: clear_staged(connection, self._books, plan.ledger),
                is_steady=False,
            )
        except (StoreError, SinkError) as error:
            log.warning("staged_rows_stay", sink=plan.sink, reason=str(error))

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named pieces; what is published has no staged rows any more and stays."""
        plan = self._opened()[1]
        if pieces := _numbers(staged):
            self._writes.run(
                "lose staged rows", lambda connection: delete_pieces(connection, self._books, plan.ledger, pieces)
            )

    def published(self) -> Epoch | None:
        return Epoch(self._load().epoch) or None

    def highest(self) -> Epoch:
        """Highest epoch this table has ever seen from this sink, taken back or not: new ones must be above it."""
        row = self._load()
        return Epoch(max(row.highest, row.rewound, NO_EPOCH))

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches: what rows were before it is not known any more, or never was."""
        return Epoch(self._load().reach)

    def rewind(self, epoch: Epoch) -> None:
        """Rows and published epoch go back in one transaction."""
        self.rewind_together([(self, epoch)])

    def rewind_together(self, others: Sequence[tuple[Any, Epoch]]) -> None:
        """Take several sinks of one flow back in one transaction, so that their tables never disagree."""
        targets = [(sink._opened()[1], sink, epoch) for sink, epoch in others]
        for _, sink, _ in targets:
            sink._check_rewindable()

        def go_back(connection: Connection) -> None:
            rows = load_ledger(connection, self._books, [plan.ledger for plan, _, _ in targets], lock=True)
            for plan, sink, epoch in targets:
                row = rows[plan.ledger]
                if row.epoch <= epoch:
                    continue
                check_claim(row.claim, sink._own_claim, sink._opened()[0], epoch)
                check_owner(row, plan.sink, seen_version=sink._seen_version, life=life())
                if epoch < row.reach:
                    raise SinkError(
                        f"what rows were before epoch {row.reach} is not known",
                        next_step="restore the flow to a later epoch; keep_epochs says how many are kept",
                        sink=plan.sink,
                        epoch=epoch,
                    )
                Publication(connection, self._books, plan, life=life()).rewind(row, epoch)
                crashpoint("sink-rewind-half", plan.sink)

        self._writes.run("be rewound", go_back)

    def rewind_group(self) -> object:
        """Sinks of which this is equal are taken back together."""
        return ("postgres", self._dsn, self._books)

    def read(self, wish: Wish) -> Published:
        """What one transaction sees of the table, and of which epoch that is."""
        return read_table(self._dsn, self.table, self._books, wish)

    # ------------------------------------------------------------------

    def _check_arguments(self) -> None:
        if self.mode not in ("append", "upsert"):
            raise SinkError('mode is "append" or "upsert"', next_step="choose one of them", table=self.table)
        if (self.mode == "upsert") != bool(self.key) or len(set(self.key)) != len(self.key):
            raise SinkError(
                "a table is upserted by a key, and appended to without one",
                next_step='give both mode="upsert" and key=[…], or neither',
                table=self.table,
            )
        names = [*self.table.split("."), self._books]
        if len(names) > 3 or not all(map(is_usable_name, names)) or '"' in self._books or self._keep_epochs < 1:
            raise SinkError(
                "table is a name or schema.name; keep_epochs is 1 or more", next_step="correct it", table=self.table
            )

    def _check_rewindable(self) -> None:
        if not self.can_rewind:
            raise SinkError("the sink was made with rewindable=False", next_step="set on_rollback", table=self.table)

    def _opened(self) -> tuple[SinkContext, Plan]:
        if self._context is None or self._plan is None:
            raise InvariantViolation("the sink is used before it was opened", table=self.table)
        return self._context, self._plan

    def _load(self) -> LedgerRow:
        plan = self._opened()[1]
        return self._reads.run(
            "be read", lambda connection: load_ledger(connection, self._books, [plan.ledger])[plan.ledger]
        )

    def _enter(self, connection: Connection, context: SinkContext, columns: dict[str, str]) -> Plan:
        has_epoch = self.can_rewind and not self.key
        if find_table(connection, self.table) is None:
            create_table(connection, self.table, columns, self.key, has_epoch=has_epoch)
        target = find_table(connection, self.table)
        # A user of the same name as a schema looks there first for every table.
        if target is None or target[0] == self._books:
            raise SinkError(
                f"the name means a table in {self._books}, where the sink keeps its books, or none at all",
                next_step="name the table's schema too, as in public.totals",
                table=self.table,
            )
        if problems := fit_problems(connection, target, columns, self.key, has_epoch=has_epoch):
            raise SinkError(
                f"the table does not take these rows: {'; '.join(problems)}",
                next_step="change the rows or the table (ALTER TABLE …), or give the sink another one",
                flow=context.flow,
                sink=context.sink,
                table=self.table,
            )
        ledger = enter_ledger(
            connection, self._books, flow=context.flow, sink=context.sink, target=target, is_exclusive=self.can_rewind
        )
        found = columns_of(connection, target)
        like = {name: found[name] for name in columns}
        align_staging(connection, self._books, ledger, like)
        self._is_binary = fits_binary(columns, {name: column.type for name, column in like.items()})
        if self.can_rewind and self.key:
            loose = {name: column if name in self.key else column.optional() for name, column in like.items()}
            align_side_table(connection, (self._books, f"before_{ledger}"), BEFORE_COLUMNS, loose)
        return Plan(
            ledger=ledger,
            sink=context.sink,
            target=target,
            columns=tuple(columns),
            key=self.key,
            is_rewindable=self.can_rewind,
            keep_epochs=self._keep_epochs,
        )


def _numbers(staged: Iterable[StagedBatch]) -> list[int]:
    return [int(piece["piece"]) for batch in staged for piece in batch.pieces]


def _is_due(row: LedgerRow | None, epoch: Epoch) -> bool:
    if row is None or (row.claim and not row.claim.startswith(f"{life()}-")):
        return False  # another process is just taking all of them over
    return row.epoch < epoch and row.rewound < epoch


def _pass(point: str, shares: Iterable[Share]) -> None:
    for share in shares:
        crashpoint(point, share.plan.sink)
