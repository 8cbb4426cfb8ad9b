"""What every sink of a flow has prepared in one database, so that whichever commits first publishes for all of them.

A permit says that the manifest is stored, so every operator had prepared its sinks: one transaction can publish the
epoch for all. Only what the same process prepared counts: an older one may have prepared it otherwise and died.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cutline.connectors.sqlite.ledger import Ledger
from cutline.connectors.staged_files import pieces_of
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.ports import Piece, StagedBatch

_lives: dict[int, str] = {}


def life() -> str:
    """Names this process, so that what one has prepared is never mixed with what another has."""
    return _lives.setdefault(os.getpid(), secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one sink publishes of an epoch."""

    sink: SinkId
    ledger: Ledger
    pieces: list[Piece]
    #: Place of the last batch with rows.
    through: int
    #: How many epochs stay such that they can be taken back.
    keep: int


def place_of(batch: StagedBatch) -> int:
    """Grows along every history: one that goes back runs batches of the same numbers again, in a later generation."""
    return batch.generation * 10_000_000_000 + batch.batch


def share_of(sink: SinkId, ledger: Ledger, staged: Sequence[StagedBatch], keep: int) -> Share:
    through = max((place_of(batch) for batch in staged if batch.pieces), default=-1)
    return Share(sink=sink, ledger=ledger, pieces=pieces_of(staged), through=through, keep=keep)


def has_company(db: sqlite3.Connection, flow: FlowName) -> bool:
    """Whether the flow has several sinks in this database."""
    return bool(db.execute("SELECT COUNT(*) > 1 FROM cutline_sinks WHERE flow = ?", (flow,)).fetchone()[0])


def store_prepared(
    db: sqlite3.Connection, own: Ledger, epoch: Epoch, staged: Sequence[StagedBatch], *, keep: int
) -> None:
    """Also without rows: who publishes the epoch for all must know that the sink has come so far."""
    db.execute(
        "INSERT OR REPLACE INTO cutline_prepared (flow, sink, epoch, life, keep, staged) VALUES (?, ?, ?, ?, ?, ?)",
        (*own.owner, epoch, life(), keep, msgspec.json.encode(staged).decode()),
    )


def due_with(db: sqlite3.Connection, own: Ledger, epoch: Epoch, prepared_by: str) -> list[Share]:
    """The other sinks whose next epoch this is too: those that have come exactly as far as the one that has the permit.

    Others have a permit of their own to be judged by.
    """
    query = "SELECT sink, keep, staged FROM cutline_prepared WHERE (flow, epoch, life) = (?, ?, ?) AND sink != ?"
    flow, sink = own.owner
    shares = []
    for name, keep, staged in db.execute(query, (flow, epoch, prepared_by, sink)).fetchall():
        ledger = Ledger.load(db, flow, SinkId(name))
        if ledger.reached(db) != own.reached(db) or epoch <= max(ledger.published(db), ledger.rewound(db)):
            continue
        if (claim := ledger.claimed_by(db)) and not claim.startswith(f"{life()}-"):
            continue  # another process is just taking all of them over
        through = ledger.through(db)
        batches = msgspec.json.decode(staged, type=list[StagedBatch])
        # Bound again while the outcome of the epoch before was open; it is published by now.
        batches = [batch for batch in batches if place_of(batch) > through]
        shares.append(share_of(SinkId(name), ledger, batches, keep))
    return shares
