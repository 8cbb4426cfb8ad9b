"""Collects staged rows that no publication needs any more.

Deleting rows one by one costs as much as writing them, and leaves work for VACUUM. So the batches of a sink are staged
in a few tables in turn, and a table that no task writes to, and that holds no unpublished rows, is truncated. A staged
row is needed only while its piece is in the ledger without an epoch: rows that a crash leaves are never published.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cutline.connectors.postgres.staging import PIECE_COLUMN, staged_tables
from cutline.connectors.postgres.tables import composed, one

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection

#: A smaller table is left as it is: truncating it makes new files, which costs more than reading past its dead rows.
WORTH_TRUNCATING_BYTES = 1 << 20


def collect_staged_rows(connection: Connection, ledger_schema: str, ledger: int) -> None:
    """Remove rows that are published or belong to no piece. Each statement must see what exists when it begins."""
    for table in staged_tables(ledger):
        size = connection.execute("SELECT pg_table_size(%s::regclass)", (f'"{ledger_schema}".{table}',)).fetchone()
        if int(one(size)[0]) < WORTH_TRUNCATING_BYTES or _truncated(connection, ledger_schema, ledger, table):
            continue
        # Rows and their piece appear in one transaction, so one statement sees both or neither.
        delete = (
            "DELETE FROM {own}.{table} s WHERE NOT EXISTS"
            " (SELECT 1 FROM {own}.pieces p WHERE p.piece = s.{piece} AND p.epoch IS NULL)"
        )
        connection.execute(composed(delete, own=ledger_schema, table=table, piece=PIECE_COLUMN))


def _truncated(connection: Connection, ledger_schema: str, ledger: int, table: str) -> bool:
    """Truncate the table, unless a session uses it or it holds rows that are not published yet."""
    from psycopg import Rollback
    from psycopg.errors import LockNotAvailable

    is_truncated = False
    # Rolled back as a whole, so that no session waits for a lock that is of no use.
    with contextlib.suppress(LockNotAvailable), connection.transaction() as attempt:
        # From here on no task is staging into the table: all its committed pieces are in the ledger.
        connection.execute(
            composed("LOCK TABLE {own}.{table} IN ACCESS EXCLUSIVE MODE NOWAIT", own=ledger_schema, table=table)
        )
        waiting = composed("SELECT piece FROM {own}.pieces WHERE ledger = %s AND epoch IS NULL", own=ledger_schema)
        pieces = [piece for (piece,) in connection.execute(waiting, (ledger,))]
        held = composed(
            "SELECT 1 FROM {own}.{table} WHERE {piece} = ANY(%s) LIMIT 1",
            own=ledger_schema,
            table=table,
            piece=PIECE_COLUMN,
        )
        if pieces and connection.execute(held, (pieces,)).fetchone() is not None:
            raise Rollback(attempt)
        connection.execute(composed("TRUNCATE {own}.{table}", own=ledger_schema, table=table))
        is_truncated = True
    return is_truncated
