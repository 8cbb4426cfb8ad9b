"""Executors copy rows into the sink's staging table, one transaction for each task.

A piece is what one attempt of one task has staged. It has a number of its own (from a sequence, never reused) and a
row in ``pieces``, committed in the same transaction as its rows: both exist or neither does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cutline.connectors.postgres.connection import Address
from cutline.connectors.postgres.copy_binary import HEADER, TRAILER, copy_binary
from cutline.connectors.postgres.types import copy_text
from cutline.errors import NotDone, SinkError

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

    from cutline.connectors.postgres.connection import Connection, Cursor
    from cutline.model.staging import Piece
    from cutline.ports.sinks import StageAttempt

PIECE_COLUMN, ROW_COLUMN = "cutline_piece", "cutline_row"
#: Rows are converted in portions of this many, so that a large batch is not held twice.
_ROWS_AT_ONCE = 20_000
#: This many tables take the staged batches of a sink in turn: one is truncated while others are written to.
_TABLES = 4


def staged_tables(ledger: int) -> list[str]:
    """The tables that hold the staged rows of a sink."""
    return [f"staged_{ledger}_{number}" for number in range(_TABLES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresStager:
    """See ``cutline.ports.Stager``. It holds the credentials of the database, so its ``repr`` leaves them out."""

    dsn: str = field(repr=False)
    schema: str
    #: Number of the sink in the ledger; its staging tables are named after it.
    ledger: int
    columns: tuple[str, ...]
    #: Whether the table's columns have exactly the types of the rows, see ``copy_binary``.
    is_binary: bool

    def open(self, attempt: StageAttempt) -> PostgresWriter:
        return PostgresWriter(self, attempt)


class PostgresWriter:
    """See ``cutline.ports.StageWriter``. A task without rows never connects."""

    def __init__(self, stager: PostgresStager, attempt: StageAttempt) -> None:
        self._stager, self._attempt = stager, attempt
        self._address = Address(stager.dsn)
        self._name = f"g{attempt.generation}-b{attempt.batch}-p{attempt.partition}-{attempt.attempt}"
        self._transfer: _Transfer | None = None
        self._rows = self._size_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = batch.slice(start, _ROWS_AT_ONCE)
            with self._clear_errors():
                if self._transfer is None:
                    self._transfer = _Transfer(self._address.connect(), self._stager, self._attempt)
                convert = copy_binary if self._stager.is_binary else copy_text
                data = convert(part, self._rows, self._transfer.piece)
                self._transfer.write(data)
            self._rows += part.num_rows
            self._size_bytes += len(data)

    def close(self) -> list[Piece]:
        """Commit the rows together with the piece that names them."""
        if self._transfer is None:
            return []
        with self._clear_errors():
            self._transfer.commit(self._rows)
        return [{"piece": self._transfer.piece, "rows": self._rows, "size_bytes": self._size_bytes, "name": self._name}]

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """After any failure nothing is staged, and the error shows no password."""
        import psycopg

        try:
            yield
        except BaseException as error:
            if self._transfer is not None:
                self._transfer.give_up()
            if not isinstance(error, psycopg.Error):
                raise
            if isinstance(error, psycopg.OperationalError):
                raise NotDone(
                    f"the connection to PostgreSQL failed while rows were staged: {self._address.describe(error)}",
                    next_step="Spark runs the task again",
                    piece=self._name,
                ) from None
            raise SinkError(
                f"PostgreSQL does not take the rows: {self._address.describe(error)}",
                next_step="filter out or correct such rows in the flow; text cannot hold NUL, a key cannot be null",
                piece=self._name,
            ) from None


class _Transfer:
    """One COPY under way, on a connection of its own."""

    def __init__(self, connection: Connection, stager: PostgresStager, attempt: StageAttempt) -> None:
        from psycopg import sql

        self._connection, self._stager, self._attempt = connection, stager, attempt
        self._cursor: Cursor = connection.cursor()
        self._cursor.execute("SELECT nextval(%s::regclass)", (f'"{stager.schema}".piece_numbers',))
        self.piece = int(next(iter(self._cursor))[0])
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {})").format(
            sql.Identifier(stager.schema, staged_tables(stager.ledger)[attempt.batch % _TABLES]),
            sql.SQL(", ").join(map(sql.Identifier, (PIECE_COLUMN, ROW_COLUMN, *stager.columns))),
            sql.SQL("binary" if stager.is_binary else "text"),
        )
        self._exits = contextlib.ExitStack()
        self._copy: psycopg.Copy = self._exits.enter_context(self._cursor.copy(statement))
        if stager.is_binary:
            self.write(HEADER)

    def write(self, data: bytes) -> None:
        self._copy.write(data)

    def commit(self, rows: int) -> None:
        from psycopg import sql

        attempt = self._attempt
        if self._stager.is_binary:
            self.write(TRAILER)
        self._exits.close()
        if self._cursor.rowcount != rows:
            raise SinkError(f"PostgreSQL stored {self._cursor.rowcount} of {rows} rows", batch=attempt.batch)
        statement = sql.SQL(
            "INSERT INTO {} (piece, ledger, generation, batch, partition, attempt, rows)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s)"
        ).format(sql.Identifier(self._stager.schema, "pieces"))
        named = (attempt.generation, attempt.batch, attempt.partition, attempt.attempt)
        self._cursor.execute(statement, (self.piece, self._stager.ledger, *named, rows))
        self._connection.commit()
        self._connection.close()

    def give_up(self) -> None:
        import psycopg

        self._connection.close()
        with contextlib.suppress(psycopg.Error):
            self._exits.close()
