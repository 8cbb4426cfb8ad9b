"""The ledger of a sink, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cutline.connectors.postgres.tables import Plan, composed, has_reach, one
from cutline.connectors.reach import decoded, encoded
from cutline.connectors.shared_epochs import process_name
from cutline.errors import SinkError
from cutline.model.ids import NO_EPOCH, Epoch, Generation
from cutline.protocol.publish.flow_epochs import Reach, Standing
from cutline.protocol.publish.rewind_points import Gap
from cutline.protocol.publish.sink_ledger import SinkLedger

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection
    from cutline.ports.sinks import SinkContext


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one sink."""

    ledger: int
    #: Newest epoch whose rows are in the table.
    epoch: int
    generation: int
    #: Highest epoch the table has ever seen.
    highest: int
    #: Highest epoch that a rewind removed. It and all below are never published again.
    rewound: int
    #: Epochs up to this one are no longer listed.
    forgotten: int
    #: The oldest epoch that the table can be rewound to.
    reach: int
    #: Grows with every change.
    version: int
    #: The process that made the last change.
    life: str
    #: The process and sink instance that may publish; empty: unclaimed.
    claim: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of the ledger that one instance of the sink reads."""

    #: The epoch, and the pieces that it publishes.
    epoch: Epoch = NO_EPOCH
    pieces: Sequence[int] = ()
    #: The version of the ledger when this instance opened or claimed the sink.
    seen_version: int


_FIELDS = ("ledger", "epoch", "generation", "highest", "rewound", "forgotten", "reach", "version", "life", "claim")


def load_ledger(
    connection: Connection, ledger_schema: str, ledgers: Iterable[int], *, lock: bool = False
) -> dict[int, LedgerRow]:
    """``lock``: no other session publishes or rewinds these until the transaction ends. Always in the same order."""
    statement = composed(
        "SELECT {fields} FROM {own}.ledger WHERE ledger = ANY(%s) ORDER BY ledger"
        + (" FOR NO KEY UPDATE" if lock else ""),
        own=ledger_schema,
        fields=_FIELDS,
    )
    rows = connection.execute(statement, (list(ledgers),))
    return {row[0]: LedgerRow(**dict(zip(_FIELDS, row, strict=True))) for row in rows}


def sink_ledger(
    connection: Connection, ledger_schema: str, row: LedgerRow, context: SinkContext, view: View
) -> SinkLedger:
    """The ledger of the sink; its only digest is that of the epoch in ``view``."""
    return SinkLedger(
        flow=context.flow,
        sink=context.sink,
        published=Epoch(row.epoch),
        rewound=Epoch(row.rewound),
        digests=_digests(connection, ledger_schema, row, view),
        reach=Epoch(row.reach),
        gaps=gaps_in(connection, ledger_schema, row.ledger),
        claim=row.claim,
        generation=Generation(row.generation),
        is_overtaken=row.life != process_name() and row.version != view.seen_version,
    )


def gaps_in(connection: Connection, ledger_schema: str, ledger: int) -> tuple[Gap, ...]:
    """The epochs that a rewind does not reach, though it reaches older ones."""
    merged = composed(
        "SELECT merged_from, epoch FROM {own}.epochs WHERE ledger = %s AND merged_from > 0", own=ledger_schema
    )
    return tuple((Epoch(first), Epoch(last)) for first, last in connection.execute(merged, (ledger,)))


def digest_of(pieces: Iterable[int]) -> str:
    """Identifies what an epoch publishes: the numbers of pieces are never reused."""
    return ",".join(map(str, sorted(set(pieces))))


def _digests(connection: Connection, ledger_schema: str, row: LedgerRow, view: View) -> dict[Epoch, str | None]:
    if not view.epoch:
        return {}
    there = composed("SELECT 1 FROM {own}.epochs WHERE ledger = %s AND epoch = %s", own=ledger_schema)
    if connection.execute(there, (row.ledger, view.epoch)).fetchone() is not None:
        named = composed("SELECT piece FROM {own}.pieces WHERE ledger = %s AND epoch = %s", own=ledger_schema)
        return {view.epoch: digest_of(piece for (piece,) in connection.execute(named, (row.ledger, view.epoch)))}
    if row.rewound < view.epoch <= row.forgotten and all(
        epoch is not None for _, epoch in staged_pieces(connection, ledger_schema, row.ledger, view.pieces).values()
    ):
        # Other sinks published it, and so many epochs after it that it is no longer listed, before this commit.
        return {view.epoch: None}
    return {}


def store_claim(connection: Connection, ledger_schema: str, ledger: int, *, claim: str, process: str) -> int:
    """The version of the ledger since which only the claimant publishes."""
    statement = composed(
        "UPDATE {own}.ledger SET claim = %s, life = %s, version = version + 1 WHERE ledger = %s RETURNING version",
        own=ledger_schema,
    )
    return int(one(connection.execute(statement, (claim, process, ledger)).fetchone())[0])


def load_reach(connection: Connection, ledger_schema: str, ledger: int) -> Reach | None:
    """None too in a ledger of a former version that no sink has opened since."""
    if not has_reach(connection, ledger_schema):
        return None
    statement = composed("SELECT reach_record FROM {own}.ledger WHERE ledger = %s", own=ledger_schema)
    return decoded(str(one(connection.execute(statement, (ledger,)).fetchone())[0]))


def store_reach(connection: Connection, ledger_schema: str, ledger: int, reach: Reach) -> None:
    """Not a change of the ledger: its version stays."""
    statement = composed("UPDATE {own}.ledger SET reach_record = %s WHERE ledger = %s", own=ledger_schema)
    connection.execute(statement, (encoded(reach).decode(), ledger))


def standing_of(
    connection: Connection, ledger_schema: str, row: LedgerRow, owner: tuple[str, str], *, has_epochs: bool
) -> Standing:
    """``has_epochs``: each row of the table records its epoch."""
    return Standing(
        flow=owner[0],
        sink=owner[1],
        published=Epoch(row.epoch),
        rewound=Epoch(row.rewound),
        claim=row.claim,
        reach=load_reach(connection, ledger_schema, row.ledger),
        oldest=NO_EPOCH if has_epochs else Epoch(row.epoch),
    )


def ledgers_behind(connection: Connection, ledger_schema: str, ledgers: Iterable[int], epoch: Epoch) -> set[int]:
    """Which of these sinks have yet to publish rows of this complete epoch or of an earlier one.

    A record of what an epoch publishes is deleted when that epoch or a later one is published. The rows of an aborted
    epoch are part of the next complete one.
    """
    statement = composed("SELECT ledger FROM {own}.prepared WHERE ledger = ANY(%s) AND epoch <= %s", own=ledger_schema)
    return {ledger for (ledger,) in connection.execute(statement, (list(ledgers), epoch))}


def staged_pieces(
    connection: Connection, ledger_schema: str, ledger: int, pieces: Sequence[int]
) -> dict[int, tuple[int, int | None]]:
    """Those of these pieces that exist: piece → its row count, and the epoch that has published it."""
    statement = composed(
        "SELECT piece, rows, epoch FROM {own}.pieces WHERE ledger = %s AND piece = ANY(%s)", own=ledger_schema
    )
    return {piece: (rows, epoch) for piece, rows, epoch in connection.execute(statement, (ledger, list(pieces)))}


def check_there(
    connection: Connection, ledger_schema: str, plan: Plan, pieces: Sequence[int], *, hint: str
) -> dict[int, tuple[int, int | None]]:
    found = staged_pieces(connection, ledger_schema, plan.ledger, pieces)
    if missing := sorted(set(pieces) - found.keys()):
        raise SinkError(
            f"{len(missing)} of {len(pieces)} staged pieces are gone ({missing[0]} …)",
            next_step=hint,
            sink=plan.sink,
        )
    return found


def delete_pieces(connection: Connection, ledger_schema: str, ledger: int, pieces: Sequence[int]) -> None:
    """Discard staged rows, their pieces, and the prepared epochs that name those.

    Published rows in the table do not change.
    """
    delete = composed(
        "DELETE FROM {own}.{staged} WHERE cutline_piece = ANY(%s)", own=ledger_schema, staged=f"staged_{ledger}"
    )
    connection.execute(delete, (list(pieces),))
    delete = composed(
        "DELETE FROM {own}.pieces WHERE ledger = %s AND piece = ANY(%s) AND epoch IS NULL", own=ledger_schema
    )
    connection.execute(delete, (ledger, list(pieces)))
    # An epoch that names them never becomes complete. Another sink must not publish it for this one.
    delete = composed("DELETE FROM {own}.prepared WHERE ledger = %s AND pieces && %s::bigint[]", own=ledger_schema)
    connection.execute(delete, (ledger, list(pieces)))


def published_epoch(connection: Connection, ledger_schema: str, ledger: int, *, up_to: Epoch) -> int:
    """The newest published epoch up to this one; 0 if there is none."""
    statement = composed(
        "SELECT coalesce(max(e.epoch), least(max(l.forgotten), %s)) FROM {own}.ledger l"
        " LEFT JOIN {own}.epochs e ON e.ledger = l.ledger AND e.epoch <= %s WHERE l.ledger = %s",
        own=ledger_schema,
    )
    return int(one(connection.execute(statement, (up_to, up_to, ledger)).fetchone())[0])
