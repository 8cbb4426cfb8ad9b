"""What every sink of a flow has prepared in one PostgreSQL database, see ``shared_epochs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cutline.connectors.postgres.ledger import LedgerRow, View, digest_of, ledgers_behind, load_ledger, sink_ledger
from cutline.connectors.postgres.publish import TableChange
from cutline.connectors.postgres.tables import Plan, composed
from cutline.connectors.shared_epochs import may_publish_for, process_name
from cutline.model.ids import NO_EPOCH, Epoch, SinkId

if TYPE_CHECKING:
    from cutline.connectors.postgres.connection import Connection
    from cutline.ports.sinks import SinkContext
    from cutline.protocol.publish.commit import CommitPermit
    from cutline.protocol.publish.sink_ledger import SinkLedger


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What one sink publishes with an epoch."""

    plan: Plan
    pieces: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresShare:
    """A sink inside a transaction that holds its row of the ledger locked. See ``shared_epochs.Share``."""

    connection: Connection
    ledger_schema: str
    prepared: Prepared
    row: LedgerRow
    context: SinkContext
    #: See ``View.seen_version``.
    seen_version: int

    @property
    def sink(self) -> SinkId:
        return SinkId(self.prepared.plan.sink)

    @property
    def has_rows(self) -> bool:
        return bool(self.prepared.pieces)

    @property
    def digest(self) -> str:
        return digest_of(self.prepared.pieces)

    def ledger(self, epoch: Epoch = NO_EPOCH) -> SinkLedger:
        view = View(epoch=epoch, pieces=self.prepared.pieces, seen_version=self.seen_version)
        return sink_ledger(self.connection, self.ledger_schema, self.row, self.context, view)

    def publish(self, permit: CommitPermit) -> None:
        self._change().publish(self.prepared.pieces, permit)

    def rewind(self, epoch: Epoch) -> None:
        self._change().rewind(self.row, epoch)

    def _change(self) -> TableChange:
        return TableChange(self.connection, self.ledger_schema, self.prepared.plan, process=process_name())


def store_prepared(connection: Connection, ledger_schema: str, prepared: Prepared, *, flow: str, epoch: int) -> None:
    statement = composed(
        "INSERT INTO {own}.prepared (ledger, epoch, life, flow, plan, pieces) VALUES (%s, %s, %s, %s, %s::jsonb, %s)"
        " ON CONFLICT (ledger, epoch, life) DO UPDATE SET plan = EXCLUDED.plan, pieces = EXCLUDED.pieces",
        own=ledger_schema,
    )
    plan = msgspec.json.encode(prepared.plan).decode()
    connection.execute(statement, (prepared.plan.ledger, epoch, process_name(), flow, plan, prepared.pieces))


def load_prepared(connection: Connection, ledger_schema: str, permit: CommitPermit, prepared_by: str) -> list[Prepared]:
    """What each sink of the flow on this database publishes with the epoch: its checkpoint exists for all of them."""
    statement = composed(
        "SELECT plan::text, pieces FROM {own}.prepared WHERE flow = %s AND epoch = %s AND life = %s", own=ledger_schema
    )
    rows = connection.execute(statement, (permit.flow, permit.epoch, prepared_by))
    return [Prepared(plan=msgspec.json.decode(plan, type=Plan), pieces=pieces) for plan, pieces in rows]


def due_with(
    own: PostgresShare, others: Mapping[int, Prepared], rows: Mapping[int, LedgerRow], permit: CommitPermit
) -> list[PostgresShare]:
    """The other sinks, by number in the ledger, for which the epoch may be published in the same transaction.

    A sink that is ahead, was rewound, or must publish an earlier epoch first is left to its own permits.
    """
    behind = ledgers_behind(own.connection, own.ledger_schema, rows, permit.previous_epoch)
    shares = [
        PostgresShare(
            connection=own.connection,
            ledger_schema=own.ledger_schema,
            prepared=prepared,
            row=rows[number],
            context=msgspec.structs.replace(own.context, sink=SinkId(prepared.plan.sink)),
            seen_version=rows[number].version,
        )
        for number, prepared in others.items()
        if number in rows and number not in behind
    ]
    return [share for share in shares if may_publish_for(share.ledger(), permit.epoch)]


def locked_rows(connection: Connection, ledger_schema: str, ledgers: set[int]) -> dict[int, LedgerRow]:
    """No other process publishes or rewinds these sinks until the transaction ends."""
    return load_ledger(connection, ledger_schema, ledgers, lock=True)
