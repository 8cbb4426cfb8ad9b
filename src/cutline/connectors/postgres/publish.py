"""Staged rows on their way into the user's table, and out again, in a transaction that somebody else commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.connectors.postgres.ledger import LedgerRow, Share, check_there, delete_pieces, published_epoch
from cutline.connectors.postgres.tables import EPOCH_COLUMN, Plan, composed, one
from cutline.errors import SinkError
from cutline.model.ids import Epoch

if TYPE_CHECKING:
    from psycopg import sql

    from cutline.connectors.postgres.connection import Connection

#: So many staged rows are deleted one by one, by the transaction that publishes them.
FEW_ROWS = 10_000

_GONE_HINT = "who deletes in the books? Restore the flow to an older checkpoint and rewind the sink to it"

#: Of several rows of a key the last one counts: of the last batch, in it of the last task, in that the last.
_NEWEST = (
    "SELECT DISTINCT ON ({keys}) {columns} FROM {books}.{staged} JOIN"
    " (SELECT piece AS cutline_piece, batch AS cutline_batch, partition AS cutline_task FROM {books}.pieces"
    " WHERE piece = ANY(%(pieces)s)) p USING (cutline_piece)"
    " ORDER BY {keys}, cutline_batch DESC, cutline_task DESC, cutline_row DESC"
)
#: Up to the end of the transaction, unless the server allows more anyway: a sort on disk takes longer.
_ROOM_TO_SORT = (
    "SELECT set_config('work_mem', '64MB', true)"
    " WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('64MB')"
)
#: For each key that was changed after an epoch: what it was then.
_OLDEST = (
    "SELECT DISTINCT ON ({keys}) * FROM {books}.{before} WHERE cutline_epoch > %(epoch)s ORDER BY {keys}, cutline_epoch"
)


class Publication:
    """Publishes an epoch, or takes epochs back, for one sink."""

    def __init__(self, connection: Connection, books: str, plan: Plan, *, life: str) -> None:
        self._connection = connection
        self._books, self._plan, self._life = books, plan, life

    # ------------------------------------------------------------------ forward

    def publish(self, share: Share, *, epoch: Epoch, generation: int) -> None:
        """Copy the rows that no earlier epoch has published, and enter the epoch in the books.

        From then on the staged rows are of no use: they go at once if they are few, otherwise see ``clear_staged``.
        """
        there = check_there(self._connection, self._books, share, hint=_GONE_HINT)
        todo = [piece for piece, (_, published) in there.items() if published is None]
        expected = sum(there[piece][0] for piece in todo)
        found = self._upsert(todo, epoch, expected) if self._plan.key else self._append(todo, epoch)
        if found != expected:
            raise SinkError(
                f"{found} of {expected} staged rows are there", next_step=_GONE_HINT, sink=self._plan.sink, epoch=epoch
            )
        if expected < FEW_ROWS:
            self._run("DELETE FROM {books}.{staged} WHERE cutline_piece = ANY(%(pieces)s)", pieces=todo)
        ledger = self._plan.ledger
        self._run("UPDATE {books}.pieces SET epoch = %(epoch)s WHERE piece = ANY(%(pieces)s)", pieces=todo, epoch=epoch)
        self._run(
            "INSERT INTO {books}.epochs (ledger, epoch, generation, rows) VALUES (%(l)s, %(epoch)s, %(g)s, %(rows)s)",
            l=ledger,
            epoch=epoch,
            g=generation,
            rows=expected,
        )
        self._run(
            "UPDATE {books}.ledger SET epoch = %(epoch)s, highest = greatest(highest, %(epoch)s), generation = %(g)s,"
            " version = version + 1, life = %(life)s WHERE ledger = %(l)s",
            l=ledger,
            epoch=epoch,
            g=generation,
            life=self._life,
        )
        self._run("DELETE FROM {books}.prepared WHERE ledger = %(l)s AND epoch <= %(epoch)s", l=ledger, epoch=epoch)
        self._sweep(todo)
        self._forget()

    def _append(self, pieces: list[int], epoch: Epoch) -> int:
        has_epoch = self._plan.is_rewindable
        return self._run(
            "INSERT INTO {schema}.{table} ({columns}"
            + (", {epoch_column}) SELECT {columns}, %(epoch)s" if has_epoch else ") SELECT {columns}")
            + " FROM {books}.{staged} WHERE cutline_piece = ANY(%(pieces)s)",
            pieces=pieces,
            epoch=epoch,
        )

    def _upsert(self, pieces: list[int], epoch: Epoch, expected: int) -> int:
        """How many staged rows there are."""
        # All parts of one statement see the table as it is before any of them.
        keep = (
            ", kept AS (INSERT INTO {books}.{before} (cutline_epoch, cutline_existed, {keys_and_others})"
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
            return expected  # all of them, each of another key
        count = "SELECT count(*) FROM {books}.{staged} WHERE cutline_piece = ANY(%s)"
        staged = composed(count, books=self._books, staged=f"staged_{self._plan.ledger}")
        return int(one(self._connection.execute(staged, (pieces,)).fetchone())[0])

    def _on_conflict(self) -> str:
        others = [name for name in self._plan.columns if name not in self._plan.key]
        if not others:
            return "ON CONFLICT ({keys}) DO NOTHING"
        return "ON CONFLICT ({keys}) DO UPDATE SET ({others}) = ROW ({excluded})"

    def _sweep(self, published: list[int]) -> None:
        """Throw away what failed tasks have staged of the batches that are published now.

        A newer generation may stage batches of the same numbers at this moment; those are not touched.
        """
        rows = self._connection.execute(
            composed(
                "SELECT o.piece FROM {books}.pieces o, (SELECT max(batch) AS batch, max(generation) AS generation"
                " FROM {books}.pieces WHERE piece = ANY(%s)) t WHERE o.ledger = %s AND o.epoch IS NULL"
                " AND o.batch <= t.batch AND o.generation <= t.generation",
                books=self._books,
            ),
            (published, self._plan.ledger),
        )
        if orphans := [piece for (piece,) in rows]:
            delete_pieces(self._connection, self._books, self._plan.ledger, orphans)

    def _forget(self) -> None:
        """Let go of what only a rewind behind the epochs that are kept would need."""
        row = self._connection.execute(
            composed(
                "SELECT epoch FROM {books}.epochs WHERE ledger = %s ORDER BY epoch DESC OFFSET %s LIMIT 1",
                books=self._books,
            ),
            (self._plan.ledger, self._plan.keep_epochs),
        ).fetchone()
        if row is None:
            return
        ledger = self._plan.ledger
        self._run("DELETE FROM {books}.epochs WHERE ledger = %(l)s AND epoch <= %(e)s", l=ledger, e=row[0])
        # Epochs that were open at the same time hold the same pieces, and have to find them marked as published.
        self._run(
            "DELETE FROM {books}.pieces p WHERE ledger = %(l)s AND epoch <= %(e)s AND NOT EXISTS"
            " (SELECT FROM {books}.prepared o WHERE o.ledger = p.ledger AND p.piece = ANY(o.pieces))",
            l=ledger,
            e=row[0],
        )
        self._run("UPDATE {books}.ledger SET forgotten = %(e)s WHERE ledger = %(l)s", l=ledger, e=row[0])
        if self._plan.key and self._plan.is_rewindable:
            self._run("DELETE FROM {books}.{before} WHERE cutline_epoch <= %(e)s", e=row[0])
            self._run(
                "UPDATE {books}.ledger SET reach = greatest(reach, %(e)s) WHERE ledger = %(l)s", l=ledger, e=row[0]
            )

    # ------------------------------------------------------------------ back

    def rewind(self, row: LedgerRow, epoch: Epoch) -> None:
        """Make the table what it was when ``epoch``, or the last one before it, was newest."""
        plan, ledger = self._plan, self._plan.ledger
        if plan.key:
            self._put_back(epoch)
        else:
            self._run("DELETE FROM {schema}.{table} WHERE {epoch_column} > %(epoch)s", epoch=epoch)
        for table in ("epochs", "pieces", "prepared"):
            self._run(
                f"DELETE FROM {{books}}.{table} WHERE ledger = %(l)s AND epoch > %(epoch)s", l=ledger, epoch=epoch
            )
        self._run(
            "UPDATE {books}.ledger SET epoch = %(now)s, rewound = %(rewound)s, version = version + 1, life = %(life)s"
            " WHERE ledger = %(l)s",
            l=ledger,
            now=published_epoch(self._connection, self._books, ledger, up_to=epoch),
            rewound=max(row.rewound, row.epoch),
            life=self._life,
        )

    def _put_back(self, epoch: Epoch) -> None:
        self._run(
            "DELETE FROM {schema}.{table} t USING (" + _OLDEST + ") n WHERE NOT n.cutline_existed AND {same_key}",
            epoch=epoch,
        )
        back = "INSERT INTO {schema}.{table} ({columns}) SELECT {columns} FROM (" + _OLDEST + ") n"
        self._run(back + " WHERE n.cutline_existed " + self._on_conflict(), epoch=epoch)
        self._run("DELETE FROM {books}.{before} WHERE cutline_epoch > %(epoch)s", epoch=epoch)

    # ------------------------------------------------------------------

    def _run(self, text: str, **values: object) -> int:
        """Run a statement with the names of this sink's tables in it; how many rows it has changed."""
        plan = self._plan
        statement = composed(
            text,
            books=self._books,
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
        """Parts of statements in which ``t`` is the table and ``n`` what it is compared with."""
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
