"""A PostgreSQL table, appended to or upserted, with one transaction for each epoch.

Several sinks of a flow on one database are published together, see ``shared_epochs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cutline.base.logs import get_logger
from cutline.config.arguments import checked
from cutline.connectors.postgres.cleanup import collect_staged_rows
from cutline.connectors.postgres.connection import Address, Session
from cutline.connectors.postgres.copy_binary import fits_binary
from cutline.connectors.postgres.ledger import (
    LedgerRow,
    check_there,
    delete_pieces,
    gaps_in,
    load_ledger,
    standing_of,
    store_claim,
    store_reach,
)
from cutline.connectors.postgres.reader import read_table, table_standing
from cutline.connectors.postgres.share import (
    PostgresShare,
    Prepared,
    due_with,
    load_prepared,
    locked_rows,
    store_prepared,
)
from cutline.connectors.postgres.staging import PostgresStager
from cutline.connectors.postgres.tables import (
    BEFORE_COLUMNS,
    Plan,
    align_side_table,
    align_staging,
    columns_of,
    create_ledger_tables,
    create_table,
    enter_ledger,
    find_table,
    fit_problems,
)
from cutline.connectors.postgres.types import is_usable_name, table_columns
from cutline.connectors.reach import own_reach
from cutline.connectors.rows import rows_schema
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
from cutline.errors import SinkError, StoreError
from cutline.model.ids import NO_EPOCH, Epoch

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection
    from cutline.model.staging import StagedBatch
    from cutline.ports.reading import ReadRequest, ReadResult
    from cutline.ports.sinks import SinkContext, Stager
    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.flow_epochs import Standing
    from cutline.protocol.publish.rewind_points import Gap

log = get_logger(__name__)

#: How many epochs an upserted table can be rewound to, whatever checkpoints the flow has, unless a user names a number.
KEEP_EPOCHS = 100


class Postgres:
    """Exactly-once rows in a table. Readers see whole epochs, in order; all tables of a flow at the same epoch."""

    output_modes: frozenset[str] = frozenset({"append", "update"})

    @checked("sinks.Postgres")
    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        mode: Literal["append", "upsert"] = "append",
        key: Sequence[str] = (),
        rewindable: bool = True,
        keep_epochs: int | None = None,
        books: str = "cutline_books",
    ) -> None:
        """``dsn``: for libpq; what it leaves out comes from the environment. ``table``: a name or schema.name.

        ``rewindable``: the table gets a column ``cutline_epoch`` (append), or the sink keeps replaced rows for the last
        ``keep_epochs`` epochs (upsert); unset: for the last 100, and before that as far as a rewind to a checkpoint of
        the flow needs them. ``books``: the schema of the sink's ledger.
        """
        self._dsn = dsn
        self.table, self.mode = table, mode
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.can_rewind = rewindable
        self._keep, self._ledger_schema = Keep.asked(keep_epochs, KEEP_EPOCHS), books
        self._check_arguments()
        self._opened = OpenedSink(f"table {table}", table=table)
        self._plan: Plan | None = None
        self._seen_version = 0
        self._is_binary = False

    def __repr__(self) -> str:
        # The connection string may hold a password.
        return f"Postgres(…, {self.table!r}, mode={self.mode!r}, key={self.key!r})"

    def open(self, context: SinkContext) -> None:
        """Create the table and the ledger, or check that the table takes such rows and belongs to no other sink."""
        columns = table_columns(rows_schema(context))
        if unknown := [name for name in self.key if name not in columns]:
            raise SinkError(
                "the rows have no such key column", next_step=f"use some of: {', '.join(columns)}", column=unknown
            )
        address = Address(self._dsn)
        self._reads, self._writes = Session(address), Session(address)
        self._opened.enter(context)

        def prepare_tables(connection: Connection) -> tuple[Plan, LedgerRow]:
            create_ledger_tables(connection, self._ledger_schema)
            plan = self._enter(connection, context, columns)
            return plan, load_ledger(connection, self._ledger_schema, [plan.ledger])[plan.ledger]

        self._plan, row = self._reads.run("be opened", prepare_tables, is_steady=False)
        self._seen_version = row.version

    def claimed(self) -> str:
        plan = self._known_plan()

        def look(connection: Connection) -> str:
            return load_ledger(connection, self._ledger_schema, [plan.ledger])[plan.ledger].claim

        return self._reads.run("be read", look)

    def claim(self, history: str, *, expected: str) -> None:
        """The transaction that publishes checks the claim."""
        plan = self._known_plan()
        claim = new_claim(history)

        def take(connection: Connection) -> int:
            row = load_ledger(connection, self._ledger_schema, [plan.ledger], lock=True)[plan.ledger]
            if row.claim != claim:  # it is, if the answer to an earlier attempt was lost
                self._opened.check_expected(row.claim, expected)
            return store_claim(connection, self._ledger_schema, plan.ledger, claim=claim, process=process_name())

        self._seen_version = self._writes.run("be claimed", take)
        self._opened.claim = claim

    def stager(self) -> Stager:
        plan = self._known_plan()
        return PostgresStager(
            dsn=self._dsn,
            schema=self._ledger_schema,
            ledger=plan.ledger,
            columns=plan.columns,
            is_binary=self._is_binary,
        )

    def prepare(self, epoch: Epoch, staged: Sequence[StagedBatch]) -> dict[str, Any]:
        """Record what the epoch will publish, for the sink of the flow that publishes it."""
        flow, prepared = self._opened.context.flow, Prepared(plan=self._known_plan(), pieces=_numbers(staged))

        def note(connection: Connection) -> None:
            hint = "find out what deletes rows in the ledger's schema, then take another checkpoint"
            check_there(connection, self._ledger_schema, prepared.plan, prepared.pieces, hint=hint)
            store_prepared(connection, self._ledger_schema, prepared, flow=flow, epoch=epoch)

        if prepared.pieces:
            self._reads.run("prepare the epoch", note, epoch=epoch)
        return {"life": process_name()}

    def commit(self, permit: CommitPermit, staged: Sequence[StagedBatch], token: Mapping[str, Any]) -> None:
        """Publish the epoch for this sink and for the flow's other sinks on this database that have rows in it."""
        plan = self._known_plan()
        self._opened.check_covered(permit, staged)
        own = Prepared(plan=plan, pieces=_numbers(staged))
        prepared_by = str(token.get("life", ""))

        def publish(connection: Connection) -> list[PostgresShare]:
            return self._publish(
                connection, permit, own, load_prepared(connection, self._ledger_schema, permit, prepared_by)
            )

        published = self._writes.run("take the epoch", publish, flow=permit.flow, epoch=permit.epoch)
        pass_point("sink-commit-done", published)
        if own.pieces:
            self._collect_staged(plan)

    def _publish(
        self, connection: Connection, permit: CommitPermit, own: Prepared, noted: Sequence[Prepared]
    ) -> list[PostgresShare]:
        """Also without rows of its own: otherwise this sink could be told of later epochs before the others."""
        others = {one.plan.ledger: one for one in noted if one.pieces and one.plan.ledger != own.plan.ledger}
        if not own.pieces and not others:
            return []
        rows = locked_rows(connection, self._ledger_schema, {own.plan.ledger, *others})
        share = self._share(connection, own, rows)
        ledger = share.ledger(permit.epoch)
        if not own.pieces:
            self._opened.check_held(ledger, permit.epoch)
        elif not self._opened.is_to_publish(ledger, permit, share.digest):
            return []
        shares = [share] if own.pieces else []
        shares += due_with(share, others, rows, permit)
        publish_for_all(shares, permit)
        pass_point("sink-commit-half", shares)
        return shares

    def _share(self, connection: Connection, own: Prepared, rows: Mapping[int, LedgerRow]) -> PostgresShare:
        return PostgresShare(
            connection=connection,
            ledger_schema=self._ledger_schema,
            prepared=own,
            row=rows[own.plan.ledger],
            context=self._opened.context,
            seen_version=self._seen_version,
        )

    def _collect_staged(self, plan: Plan) -> None:
        """A failure here does not make the epoch unpublished: published rows may stay staged for a while."""
        try:
            self._writes.run(
                "lose staged rows",
                lambda connection: collect_staged_rows(connection, self._ledger_schema, plan.ledger),
                is_steady=False,
            )
        except (StoreError, SinkError) as error:
            log.warning("staged_rows_not_collected", sink=plan.sink, reason=str(error))

    def abort(self, staged: Iterable[StagedBatch]) -> None:
        """Delete exactly the named pieces; published rows are in the table and stay."""
        plan = self._known_plan()
        if pieces := _numbers(staged):
            self._writes.run(
                "lose staged rows",
                lambda connection: delete_pieces(connection, self._ledger_schema, plan.ledger, pieces),
            )

    def published(self) -> Epoch | None:
        return Epoch(self._load().epoch) or None

    def highest(self) -> Epoch:
        """Highest epoch this table has ever had from this sink, rewound or not: new ones must be above it."""
        row = self._load()
        return Epoch(max(row.highest, row.rewound, NO_EPOCH))

    def oldest_rewind(self) -> Epoch:
        """The oldest epoch that ``rewind`` reaches: earlier rows are no longer recorded, or never were."""
        return Epoch(self._load().reach)

    def rewind_gaps(self) -> tuple[Gap, ...]:
        """Epochs that ``rewind`` does not reach, because no checkpoint of the flow needed them."""
        plan = self._known_plan()
        return self._reads.run("be read", lambda connection: gaps_in(connection, self._ledger_schema, plan.ledger))

    def rewind(self, epoch: Epoch) -> None:
        """Rewind rows and published epoch in one transaction."""
        self.rewind_together([(self, epoch)])

    def rewind_together(self, targets: Sequence[tuple[Any, Epoch]]) -> None:
        """Rewind several sinks of one flow in one transaction, so that their tables never disagree."""
        plans = [sink._known_plan() for sink, _ in targets]
        for sink, _ in targets:
            sink._check_rewindable()

        def rewind(connection: Connection) -> None:
            rows = locked_rows(connection, self._ledger_schema, {plan.ledger for plan in plans})
            rewind_targets(
                (
                    RewindTarget(
                        opened=sink._opened,
                        epoch=epoch,
                        can_rewind=sink.can_rewind,
                        in_transaction=sink._share(connection, Prepared(plan=plan, pieces=[]), rows),
                    )
                    for plan, (sink, epoch) in zip(plans, targets, strict=True)
                ),
                keep_more="a larger keep_epochs keeps more for the next time",
            )

        self._writes.run("be rewound", rewind)

    def rewind_group(self) -> object:
        """Sinks with equal groups are rewound in one transaction."""
        return ("postgres", self._dsn, self._ledger_schema)

    def read(self, request: ReadRequest) -> ReadResult:
        """The table and its epoch, as one transaction sees them."""
        return read_table(self._dsn, self.table, self._ledger_schema, request)

    def standing(self, request: ReadRequest) -> Standing:
        return table_standing(self._dsn, self.table, self._ledger_schema, request)

    def record_reach(self, epoch: Epoch, *, is_per_operator: bool, at_start: bool = False) -> None:
        plan, claim, schema = self._known_plan(), self._opened.claim, self._ledger_schema
        owner = (str(self._opened.context.flow), str(self._opened.context.sink))

        def record(connection: Connection) -> None:
            row = load_ledger(connection, schema, [plan.ledger], lock=True)[plan.ledger]
            found = standing_of(connection, schema, row, owner, has_epochs=False)
            reach = own_reach(found, claim, epoch, is_per_operator=is_per_operator, at_start=at_start)
            if reach is not None:
                store_reach(connection, schema, plan.ledger, reach)

        self._writes.run("record its reach", record)

    # ------------------------------------------------------------------

    def _check_arguments(self) -> None:
        if self.mode not in ("append", "upsert"):
            raise SinkError('mode is "append" or "upsert"', next_step="choose one of them", table=self.table)
        if (self.mode == "upsert") != bool(self.key) or len(set(self.key)) != len(self.key):
            raise SinkError(
                "mode='upsert' needs a key, mode='append' takes none",
                next_step='give both mode="upsert" and key=[…], or neither',
                table=self.table,
            )
        names = [*self.table.split("."), self._ledger_schema]
        if len(names) > 3 or not all(map(is_usable_name, names)) or '"' in self._ledger_schema or self._keep.epochs < 1:
            raise SinkError(
                "table is a name or schema.name; keep_epochs is 1 or more", next_step="correct it", table=self.table
            )

    def _check_rewindable(self) -> None:
        if not self.can_rewind:
            raise SinkError("the sink was made with rewindable=False", next_step="set on_rollback", table=self.table)

    def _known_plan(self) -> Plan:
        if self._plan is None:
            raise not_opened(table=self.table)
        return self._plan

    def _load(self) -> LedgerRow:
        plan = self._known_plan()
        return self._reads.run(
            "be read", lambda connection: load_ledger(connection, self._ledger_schema, [plan.ledger])[plan.ledger]
        )

    def _enter(self, connection: Connection, context: SinkContext, columns: dict[str, str]) -> Plan:
        has_epoch = self.can_rewind and not self.key
        if find_table(connection, self.table) is None:
            create_table(connection, self.table, columns, self.key, has_epoch=has_epoch)
        target = find_table(connection, self.table)
        # PostgreSQL looks up a user's unqualified names first in the schema with the user's name.
        if target is None or target[0] == self._ledger_schema:
            raise SinkError(
                f"the name means a table in {self._ledger_schema}, where the sink keeps its ledger, or no table",
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
            connection,
            self._ledger_schema,
            flow=context.flow,
            sink=context.sink,
            target=target,
            is_exclusive=self.can_rewind,
        )
        found = columns_of(connection, target)
        like = {name: found[name] for name in columns}
        align_staging(connection, self._ledger_schema, ledger, like)
        self._is_binary = fits_binary(columns, {name: column.type for name, column in like.items()})
        if self.can_rewind and self.key:
            loose = {name: column if name in self.key else column.optional() for name, column in like.items()}
            align_side_table(connection, (self._ledger_schema, f"before_{ledger}"), BEFORE_COLUMNS, loose)
        return Plan(
            ledger=ledger,
            sink=context.sink,
            target=target,
            columns=tuple(columns),
            key=self.key,
            is_rewindable=self.can_rewind,
            keep_epochs=self._keep.number,
        )


def _numbers(staged: Iterable[StagedBatch]) -> list[int]:
    return [int(piece["piece"]) for batch in staged for piece in batch.pieces]
