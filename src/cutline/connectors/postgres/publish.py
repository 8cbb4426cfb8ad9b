"""Moves staged rows into the user's table, and rewinds it, in a transaction that the caller commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.connectors.postgres.ledger import LedgerRow, check_there, delete_pieces, published_epoch
from cutline.connectors.postgres.tables import EPOCH_COLUMN, Plan, composed, one
from cutline.connectors.shared_epochs import Keep
from cutline.errors import SinkError
from cutline.model.ids import Epoch
from cutline.protocol.publish.rewind_points import thinned

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from psycopg import sql

    from cutline.connectors.postgres.connection import Connection
    from cutline.protocol.publish.commit import CommitPermit

#: Fewer staged rows than this are deleted one by one, by the transaction that publishes them.
FEW_ROWS = 10_000

_GONE_HINT = (
    "find out what deletes rows in the ledger's schema, then restore the flow to an older checkpoint "
    "and rewind the sink to it"
)

#: The last row of each key: of its last batch, of that batch's last task, the last row.
_NEWEST = (
    "SELECT DISTINCT ON ({keys}) {columns} FROM {own}.{staged} JOIN"
    " (SELECT piece AS cutline_piece, batch AS cutline_batch, partition AS cutline_task FROM {own}.pieces"
    " WHERE piece = ANY(%(pieces)s)) p USING (cutline_piece)"
    " ORDER BY {keys}, cutline_batch DESC, cutline_task DESC, cutline_row DESC"
)
#: Until the transaction ends, unless the server allows more anyway: a sort on disk takes longer.
_ROOM_TO_SORT = (
    "SELECT set_config('work_mem', '64MB', true)"
    " WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('64MB')"
)
#: For each key that was changed after an epoch: its row in that epoch.
_OLDEST = (
    "SELECT DISTINCT ON ({keys}) * FROM {own}.{before} WHERE cutline_epoch > %(epoch)s ORDER BY {keys}, cutline_epoch"
)


class TableChange:
    """Publishes an epoch, or rewinds epochs, for one sink."""

    def __init__(self, connection: Connection, ledger_schema: str, plan: Plan, *, process: str) -> None:
        self._connection = connection
        self._ledger_schema, self._plan, self._process = ledger_schema, plan, process

    # ------------------------------------------------------------------ forward

    def publish(self, pieces: Sequence[int], permit: CommitPermit) -> None:
        """Copy the rows that no earlier epoch has published, and enter the epoch in the ledger.

        After that the staged rows are not needed: few are deleted here, for many see ``collect_staged_rows``.
        """
        epoch, generation = permit.epoch, permit.generation
        there = check_there(self._connection, self._ledger_schema, self._plan, pieces, hint=_GONE_HINT)
        todo = [piece for piece, (_, published) in there.items() if published is None]
        expected = sum(there[piece][0] for piece in todo)
        found = self._upsert(todo, epoch, expected) if self._plan.key else self._append(todo, epoch)
        if found != expected:
            raise SinkError(
                f"only {found} of {expected} staged rows exist", next_step=_GONE_HINT, sink=self._plan.sink, epoch=epoch
            )
        if expected < FEW_ROWS:
            self._run("DELETE FROM {own}.{staged} WHERE cutline_piece = ANY(%(pieces)s)", pieces=todo)
        ledger = self._plan.ledger
        self._run("UPDATE {own}.pieces SET epoch = %(epoch)s WHERE piece = ANY(%(pieces)s)", pieces=todo, epoch=epoch)
        self._run(
            "INSERT INTO {own}.epochs (ledger, epoch, generation, rows) VALUES (%(l)s, %(epoch)s, %(g)s, %(rows)s)",
            l=ledger,
            epoch=epoch,
            g=generation,
            rows=expected,
        )
        self._run(
            "UPDATE {own}.ledger SET epoch = %(epoch)s, highest = greatest(highest, %(epoch)s), generation = %(g)s,"
            " version = version + 1, life = %(life)s WHERE ledger = %(l)s",
            l=ledger,
            epoch=epoch,
            g=generation,
            life=self._process,
        )
        self._run("DELETE FROM {own}.prepared WHERE ledger = %(l)s AND epoch <= %(epoch)s", l=ledger, epoch=epoch)
        self._collect_orphans(todo)
        self._trim_history(permit.rewind_points)

    def _append(self, pieces: list[int], epoch: Epoch) -> int:
        has_epoch = self._plan.is_rewindable
        return self._run(
            "INSERT INTO {schema}.{table} ({columns}"
            + (", {epoch_column}) SELECT {columns}, %(epoch)s" if has_epoch else ") SELECT {columns}")
            + " FROM {own}.{staged} WHERE cutline_piece = ANY(%(pieces)s)",
            pieces=pieces,
            epoch=epoch,
        )

    def _upsert(self, pieces: list[int], epoch: Epoch, expected: int) -> int:
        """The number of staged rows."""
        # All parts of one statement see the table as it was before the statement.
        keep = (
            ", kept AS (INSERT INTO {own}.{before} (cutline_epoch, cutline_existed, {keys_and_others})"
            " SELECT %(epoch)s, t.{first_key} IS NOT NULL, {new_keys_and_old_others}"
            " FROM newest n LEFT JOIN {schema}.{table} t ON {same_key})"
        )
        self._connection.execute(_ROOM_TO_SORT)
        changed = self._run(
            "WITH newest AS MATERIALIZED ("
            + _NEWEST
            + ")"
            + (keep if self._plan.is_rewindable else "")
            + " INSERT INTO {schema}.{table} ({columns}) SELECT {columns} FROM newest n "
            + self._on_conflict(),
            pieces=pieces,
            epoch=epoch,
        )
        if changed == expected:
            return expected  # all of them, each with another key
        count = "SELECT count(*) FROM {own}.{staged} WHERE cutline_piece = ANY(%s)"
        staged = composed(count, own=self._ledger_schema, staged=f"staged_{self._plan.ledger}")
        return int(one(self._connection.execute(staged, (pieces,)).fetchone())[0])

    def _on_conflict(self) -> str:
        others = [name for name in self._plan.columns if name not in self._plan.key]
        if not others:
            return "ON CONFLICT ({keys}) DO NOTHING"
        return "ON CONFLICT ({keys}) DO UPDATE SET ({others}) = ROW ({excluded})"

    def _collect_orphans(self, published: list[int]) -> None:
        """Delete what failed tasks have staged of the batches that are published now.

        A newer generation may be staging batches with the same numbers; those are not touched.
        """
        rows = self._connection.execute(
            composed(
                "SELECT o.piece FROM {own}.pieces o, (SELECT max(batch) AS batch, max(generation) AS generation"
                " FROM {own}.pieces WHERE piece = ANY(%s)) t WHERE o.ledger = %s AND o.epoch IS NULL"
                " AND o.batch <= t.batch AND o.generation <= t.generation",
                own=self._ledger_schema,
            ),
            (published, self._plan.ledger),
        )
        if orphans := [piece for (piece,) in rows]:
            delete_pieces(self._connection, self._ledger_schema, self._plan.ledger, orphans)

    def _trim_history(self, points: Collection[Epoch] | None) -> None:
        """Of the epochs before the newest ones, keep what rewinds to ``points`` need."""
        keep, plan = Keep.of(self._plan.keep_epochs), self._plan
        older = self._connection.execute(
            composed(
                "SELECT epoch FROM {own}.epochs WHERE ledger = %s ORDER BY epoch DESC OFFSET %s",
                own=self._ledger_schema,
            ),
            (plan.ledger, keep.epochs),
        ).fetchall()
        # Appended rows have their epoch, so older ones can be removed without a record.
        is_counted = keep.is_all or not (plan.key and plan.is_rewindable)
        thinning = thinned([Epoch(epoch) for (epoch,) in reversed(older)], () if is_counted else points)
        for older_epoch, newer in thinning.merges:
            self._merge(older_epoch, newer)
        if thinning.oldest is not None:
            self._forget(thinning.oldest)

    def _merge(self, older: Epoch, newer: Epoch) -> None:
        """The newer epoch stands for both. Of the former rows of a key the oldest stays, under the older number."""
        ledger = self._plan.ledger
        named = composed(
            "SELECT CASE merged_from WHEN 0 THEN epoch ELSE merged_from END FROM {own}.epochs"
            " WHERE ledger = %s AND epoch = ANY(%s) ORDER BY epoch",
            own=self._ledger_schema,
        )
        first, second = (row[0] for row in self._connection.execute(named, (ledger, [older, newer])).fetchall())
        self._run(
            "DELETE FROM {own}.{before} n USING {own}.{before} t"
            " WHERE n.cutline_epoch = %(second)s AND t.cutline_epoch = %(first)s AND {same_key}",
            first=first,
            second=second,
        )
        self._run(
            "UPDATE {own}.{before} SET cutline_epoch = %(first)s WHERE cutline_epoch = %(second)s",
            first=first,
            second=second,
        )
        self._forget_pieces("p.epoch = %(e)s", older)
        self._run("DELETE FROM {own}.epochs WHERE ledger = %(l)s AND epoch = %(e)s", l=ledger, e=older)
        self._run(
            "UPDATE {own}.epochs SET merged_from = %(first)s WHERE ledger = %(l)s AND epoch = %(e)s",
            first=first,
            l=ledger,
            e=newer,
        )

    def _forget(self, oldest: Epoch) -> None:
        """Delete what only a rewind to before this epoch would need."""
        ledger = self._plan.ledger
        self._run("DELETE FROM {own}.epochs WHERE ledger = %(l)s AND epoch <= %(e)s", l=ledger, e=oldest)
        self._forget_pieces("p.epoch <= %(e)s", oldest)
        self._run("UPDATE {own}.ledger SET forgotten = %(e)s WHERE ledger = %(l)s", l=ledger, e=oldest)
        if self._plan.key and self._plan.is_rewindable:
            self._run("DELETE FROM {own}.{before} WHERE cutline_epoch <= %(e)s", e=oldest)
            self._run("UPDATE {own}.ledger SET reach = greatest(reach, %(e)s) WHERE ledger = %(l)s", l=ledger, e=oldest)

    def _forget_pieces(self, which: str, epoch: Epoch) -> None:
        """Epochs that were open at the same time hold the same pieces, and must find them marked as published."""
        self._run(
            "DELETE FROM {own}.pieces p WHERE p.ledger = %(l)s AND "
            + which
            + " AND NOT EXISTS (SELECT FROM {own}.prepared o WHERE o.ledger = p.ledger AND p.piece = ANY(o.pieces))",
            l=self._plan.ledger,
            e=epoch,
        )

    # ------------------------------------------------------------------ rewind

    def rewind(self, row: LedgerRow, epoch: Epoch) -> None:
        """Restore the table as it was when ``epoch``, or the last one before it, was newest."""
        plan, ledger = self._plan, self._plan.ledger
        if plan.key:
            self._restore_rows(epoch)
        else:
            self._run("DELETE FROM {schema}.{table} WHERE {epoch_column} > %(epoch)s", epoch=epoch)
        for table in ("epochs", "pieces", "prepared"):
            self._run(f"DELETE FROM {{own}}.{table} WHERE ledger = %(l)s AND epoch > %(epoch)s", l=ledger, epoch=epoch)
        self._run(
            "UPDATE {own}.ledger SET epoch = %(now)s, rewound = %(rewound)s, version = version + 1, life = %(life)s"
            " WHERE ledger = %(l)s",
            l=ledger,
            now=published_epoch(self._connection, self._ledger_schema, ledger, up_to=epoch),
            rewound=max(row.rewound, row.epoch),
            life=self._process,
        )

    def _restore_rows(self, epoch: Epoch) -> None:
        self._run(
            "DELETE FROM {schema}.{table} t USING (" + _OLDEST + ") n WHERE NOT n.cutline_existed AND {same_key}",
            epoch=epoch,
        )
        back = "INSERT INTO {schema}.{table} ({columns}) SELECT {columns} FROM (" + _OLDEST + ") n"
        self._run(back + " WHERE n.cutline_existed " + self._on_conflict(), epoch=epoch)
        self._run("DELETE FROM {own}.{before} WHERE cutline_epoch > %(epoch)s", epoch=epoch)

    # ------------------------------------------------------------------

    def _run(self, text: str, **values: object) -> int:
        """Run a statement with the names of this sink's tables filled in; returns the number of changed rows."""
        plan = self._plan
        statement = composed(
            text,
            own=self._ledger_schema,
            staged=f"staged_{plan.ledger}",
            before=f"before_{plan.ledger}",
            schema=plan.target[0],
            table=plan.target[1],
            columns=plan.columns,
            keys=plan.key,
            epoch_column=EPOCH_COLUMN,
            **(self._key_parts() if plan.key else {}),
        )
        return self._connection.execute(statement, values).rowcount

    def _key_parts(self) -> dict[str, sql.Composable]:
        """Parts of statements in which ``t`` is the table and ``n`` the rows to compare it with."""
        from psycopg import sql

        def listed(*columns: tuple[str, str]) -> sql.Composable:
            return sql.SQL(", ").join(sql.Identifier(*column) for column in columns)

        keys, names = self._plan.key, self._plan.columns
        others = [name for name in names if name not in keys]
        equal = [sql.SQL("{} = {}").format(sql.Identifier("t", key), sql.Identifier("n", key)) for key in keys]
        return {
            "first_key": sql.Identifier(keys[0]),
            "same_key": sql.SQL(" AND ").join(equal),
            "keys_and_others": sql.SQL(", ").join(map(sql.Identifier, [*keys, *others])),
            "new_keys_and_old_others": listed(*(("n", key) for key in keys), *(("t", name) for name in others)),
            "others": sql.SQL(", ").join(map(sql.Identifier, others)),
            "excluded": sql.SQL(", ").join(sql.SQL("EXCLUDED.") + sql.Identifier(name) for name in others),
        }
