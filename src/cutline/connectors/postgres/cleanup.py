"""Getting rid of staged rows that no publication needs any more.

Deleting rows one by one costs as much as writing them, and leaves work for VACUUM. So the batches of a sink are staged
in a few tables in turn, and a table that nobody writes to, and that holds nothing unpublished, is emptied at once. A
staged row is of use only as long as its piece is in the books without an epoch: what a crash leaves is never published.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cutline.connectors.postgres.staging import PIECE_COLUMN, staged_tables
from cutline.connectors.postgres.tables import composed, one

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection

#: A smaller table is left as it is: emptying it makes new files, which costs more than reading past what is dead in it.
WORTH_EMPTYING_BYTES = 1 << 20


def clear_staged(connection: Connection, books: str, ledger: int) -> None:
    """Remove what is published, or belongs to no piece. Each statement must see what is there when it begins."""
    for table in staged_tables(ledger):
        size = connection.execute("SELECT pg_table_size(%s::regclass)", (f'"{books}".{table}',)).fetchone()
        if int(one(size)[0]) < WORTH_EMPTYING_BYTES or _emptied(connection, books, ledger, table):
            continue
        # Rows and their piece appear in one transaction, so one statement sees both or neither.
        delete = (
            "DELETE FROM {books}.{table} s WHERE NOT EXISTS"
            " (SELECT 1 FROM {books}.pieces p WHERE p.piece = s.{piece} AND p.epoch IS NULL)"
        )
        connection.execute(composed(delete, books=books, table=table, piece=PIECE_COLUMN))


def _emptied(connection: Connection, books: str, ledger: int, table: str) -> bool:
    """Empty the table, unless somebody uses it or it holds rows that are not published yet."""
    from psycopg import Rollback
    from psycopg.errors import LockNotAvailable

    is_emptied = False
    # Taken back as a whole, so that nobody has to wait for the lock if it is of no use.
    with contextlib.suppress(LockNotAvailable), connection.transaction() as attempt:
        # From here on nobody is in the middle of staging: whoever has staged is in the books.
        connection.execute(
            composed("LOCK TABLE {books}.{table} IN ACCESS EXCLUSIVE MODE NOWAIT", books=books, table=table)
        )
        waiting = composed("SELECT piece FROM {books}.pieces WHERE ledger = %s AND epoch IS NULL", books=books)
        pieces = [piece for (piece,) in connection.execute(waiting, (ledger,))]
        held = composed(
            "SELECT 1 FROM {books}.{table} WHERE {piece} = ANY(%s) LIMIT 1",
            books=books,
            table=table,
            piece=PIECE_COLUMN,
        )
        if pieces and connection.execute(held, (pieces,)).fetchone() is not None:
            raise Rollback(attempt)
        connection.execute(composed("TRUNCATE {books}.{table}", books=books, table=table))
        is_emptied = True
    return is_emptied
