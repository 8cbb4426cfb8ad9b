"""What the books say of a sink, and who may change them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cutline.connectors.postgres.tables import Plan, composed, one
from cutline.errors import FencedError, SinkError
from cutline.model.ids import Epoch

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection
    from cutline.protocol.publish.commit import CommitPermit


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sink stands."""

    ledger: int
    #: Newest epoch whose rows are in the table.
    epoch: int
    generation: int
    #: Highest epoch the table has ever seen.
    highest: int
    #: Highest epoch that a rewind took away. It and all below are never published again.
    rewound: int
    #: Epochs up to this one are no longer listed.
    forgotten: int
    #: The oldest epoch that the table can be taken back to.
    reach: int
    #: Grows with every change, and who has made the last one.
    version: int
    life: str
    #: Who may publish: a process and a sink of it; empty: nobody has claimed it.
    claim: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink publishes with an epoch."""

    plan: Plan
    pieces: list[int]


_FIELDS = ("ledger", "epoch", "generation", "highest", "rewound", "forgotten", "reach", "version", "life", "claim")


def load_ledger(
    connection: Connection, books: str, ledgers: Iterable[int], *, lock: bool = False
) -> dict[int, LedgerRow]:
    """``lock``: nobody else publishes or rewinds these until the transaction ends. Always in the same order."""
    statement = composed(
        "SELECT {fields} FROM {books}.ledger WHERE ledger = ANY(%s) ORDER BY ledger"
        + (" FOR NO KEY UPDATE" if lock else ""),
        books=books,
        fields=_FIELDS,
    )
    rows = connection.execute(statement, (list(ledgers),))
    return {row[0]: LedgerRow(**dict(zip(_FIELDS, row, strict=True))) for row in rows}


def check_owner(row: LedgerRow, sink: str, *, seen_version: int, life: str) -> None:
    """Nobody but this process has changed the ledger since it was opened; whoever has is the one to go on."""
    if row.life != life and row.version != seen_version:
        raise FencedError(
            "another process has published to this table since this one began",
            next_step="stop this process: another one runs the flow. If there is none, start the flow again",
            sink=sink,
        )


def store_claim(connection: Connection, books: str, ledger: int, *, claim: str, life: str) -> int:
    """The version of the ledger from which on only the claimant publishes."""
    statement = composed(
        "UPDATE {books}.ledger SET claim = %s, life = %s, version = version + 1 WHERE ledger = %s RETURNING version",
        books=books,
    )
    return int(one(connection.execute(statement, (claim, life, ledger)).fetchone())[0])


def is_published(
    connection: Connection, books: str, row: LedgerRow, permit: CommitPermit, pieces: Sequence[int]
) -> bool:
    """Whether the epoch is there already, and is this one; raises if it must not be published at all."""
    where: dict[str, Any] = {"flow": permit.flow, "sink": permit.sink, "epoch": permit.epoch}
    there = composed("SELECT 1 FROM {books}.epochs WHERE ledger = %s AND epoch = %s", books=books)
    if connection.execute(there, (row.ledger, permit.epoch)).fetchone() is not None:
        named = composed("SELECT piece FROM {books}.pieces WHERE ledger = %s AND epoch = %s", books=books)
        if {piece for (piece,) in connection.execute(named, (row.ledger, permit.epoch))} == set(pieces):
            return True
        raise SinkError(
            "the table holds an epoch of this number with other rows: it belongs to another history",
            next_step="was the flow's storage deleted? Give the flow or the sink another name, or use another table",
            **where,
        )
    if permit.epoch <= row.rewound:
        raise FencedError("the epoch was taken back by a rewind; this commit comes from the abandoned history", **where)
    if permit.epoch <= row.forgotten and all(
        epoch is not None for _, epoch in staged_pieces(connection, books, row.ledger, pieces).values()
    ):
        return True  # others have published it, and so much after it that it is no longer listed, before it was told
    if permit.epoch <= row.epoch:
        raise SinkError(
            f"a later epoch ({row.epoch}) is published but this one is not: it belongs to another history",
            next_step="was the flow's storage deleted? Give the flow or the sink another name, or use another table",
            **where,
        )
    if permit.generation < row.generation:
        raise FencedError(f"generation {row.generation} has published to this table already", **where)
    return False


def store_prepared(connection: Connection, books: str, share: Share, *, flow: str, epoch: int, life: str) -> None:
    statement = composed(
        "INSERT INTO {books}.prepared (ledger, epoch, life, flow, plan, pieces) VALUES (%s, %s, %s, %s, %s::jsonb, %s)"
        " ON CONFLICT (ledger, epoch, life) DO UPDATE SET plan = EXCLUDED.plan, pieces = EXCLUDED.pieces",
        books=books,
    )
    plan = msgspec.json.encode(share.plan).decode()
    connection.execute(statement, (share.plan.ledger, epoch, life, flow, plan, share.pieces))


def load_prepared(connection: Connection, books: str, permit: CommitPermit, life: str) -> list[Share]:
    """What every sink of the flow on this database publishes with the epoch: its checkpoint exists for all of them."""
    statement = composed(
        "SELECT plan::text, pieces FROM {books}.prepared WHERE flow = %s AND epoch = %s AND life = %s", books=books
    )
    rows = connection.execute(statement, (permit.flow, permit.epoch, life))
    return [Share(plan=msgspec.json.decode(plan, type=Plan), pieces=pieces) for plan, pieces in rows]


def ledgers_behind(connection: Connection, books: str, ledgers: Iterable[int], epoch: Epoch) -> set[int]:
    """Those of these sinks that have yet to publish something of this complete epoch or of one before it.

    What was prepared for an epoch is forgotten when it, or a later one, is published. What an epoch had that was
    aborted, the complete one after it has too.
    """
    statement = composed("SELECT ledger FROM {books}.prepared WHERE ledger = ANY(%s) AND epoch <= %s", books=books)
    return {ledger for (ledger,) in connection.execute(statement, (list(ledgers), epoch))}


def staged_pieces(
    connection: Connection, books: str, ledger: int, pieces: Sequence[int]
) -> dict[int, tuple[int, int | None]]:
    """Of these pieces those that are there: piece → its rows, and the epoch that has published it."""
    statement = composed(
        "SELECT piece, rows, epoch FROM {books}.pieces WHERE ledger = %s AND piece = ANY(%s)", books=books
    )
    return {piece: (rows, epoch) for piece, rows, epoch in connection.execute(statement, (ledger, list(pieces)))}


def check_there(connection: Connection, books: str, share: Share, *, hint: str) -> dict[int, tuple[int, int | None]]:
    found = staged_pieces(connection, books, share.plan.ledger, share.pieces)
    if missing := sorted(set(share.pieces) - found.keys()):
        raise SinkError(
            f"{len(missing)} of {len(share.pieces)} staged pieces are gone ({missing[0]} …)",
            next_step=hint,
            sink=share.plan.sink,
        )
    return found


def delete_pieces(connection: Connection, books: str, ledger: int, pieces: Sequence[int]) -> None:
    """Throw away staged rows, the pieces that name them, and what was to publish them.

    Of what is published nothing in the table changes.
    """
    delete = composed(
        "DELETE FROM {books}.{staged} WHERE cutline_piece = ANY(%s)", books=books, staged=f"staged_{ledger}"
    )
    connection.execute(delete, (list(pieces),))
    delete = composed("DELETE FROM {books}.pieces WHERE ledger = %s AND piece = ANY(%s) AND epoch IS NULL", books=books)
    connection.execute(delete, (ledger, list(pieces)))
    # An epoch that names them will never be complete. Another sink must not try to publish it for this one.
    delete = composed("DELETE FROM {books}.prepared WHERE ledger = %s AND pieces && %s::bigint[]", books=books)
    connection.execute(delete, (ledger, list(pieces)))


def published_epoch(connection: Connection, books: str, ledger: int, *, up_to: Epoch) -> int:
    """The newest published epoch up to this one; 0 if there is none."""
    statement = composed(
        "SELECT coalesce(max(e.epoch), least(max(l.forgotten), %s)) FROM {books}.ledger l"
        " LEFT JOIN {books}.epochs e ON e.ledger = l.ledger AND e.epoch <= %s WHERE l.ledger = %s",
        books=books,
    )
    return int(one(connection.execute(statement, (up_to, up_to, ledger)).fetchone())[0])
