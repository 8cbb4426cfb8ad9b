"""What every sink of a flow has prepared in one SQLite database, see ``shared_epochs``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cutline.base.crashpoints import crashpoint
from cutline.connectors.shared_epochs import Keep, may_publish_for, process_name
from cutline.connectors.sqlite.ledger import SinkTable
from cutline.connectors.sqlite.rows import tuples_of
from cutline.connectors.staged_files import digest_of, pieces_of
from cutline.model.ids import Epoch, FlowName, SinkId
from cutline.model.staging import Piece, StagedBatch
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.immediate import place_of
from cutline.protocol.publish.sink_ledger import SinkLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteShare:
    """What one sink publishes of an epoch. See ``shared_epochs.Share``."""

    db: sqlite3.Connection
    table: SinkTable
    pieces: list[Piece]
    #: Place of the last batch with rows.
    through: int
    #: How many epochs stay rewindable; of a sink that was not told: at least so many.
    keep: Keep
    #: The folder of its staged files.
    folder: Path

    @property
    def sink(self) -> SinkId:
        return self.table.owner[1]

    @property
    def has_rows(self) -> bool:
        return bool(self.pieces)

    @property
    def digest(self) -> str:
        return digest_of(self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether all its files exist; if not, the sink's own commit reports it."""
        return all((self.folder / piece["path"]).exists() for piece in self.pieces)

    def ledger(self, epoch: Epoch) -> SinkLedger:
        return self.table.ledger(self.db, epoch)

    def publish(self, permit: CommitPermit) -> None:
        for rows in self._rows():
            self.table.write(self.db, permit.epoch, rows)
        if self.pieces:
            points = () if self.keep.is_all else permit.rewind_points
            self.table.record(self.db, permit.epoch, self.digest, self.through, keep=self.keep.epochs, points=points)
        self.table.set_reached(self.db, permit.epoch)

    def rewind(self, epoch: Epoch) -> None:
        self.table.rewind(self.db, epoch)

    def _rows(self) -> Iterator[list[tuple[Any, ...]]]:
        """The staged rows in their order, one Arrow batch at a time."""
        import pyarrow.parquet as pq

        for index, piece in enumerate(self.pieces):
            if index == len(self.pieces) // 2:
                crashpoint("sink-commit-half", self.sink)
            with pq.ParquetFile(self.folder / piece["path"]) as file:
                for batch in file.iter_batches():
                    yield list(tuples_of(batch))


def share_of(
    db: sqlite3.Connection, table: SinkTable, staged: Sequence[StagedBatch], *, keep: Keep, folder: Path
) -> SqliteShare:
    through = max((place_of(batch.generation, batch.batch) for batch in staged if batch.pieces), default=-1)
    return SqliteShare(db=db, table=table, pieces=pieces_of(staged), through=through, keep=keep, folder=folder)


def has_other_sinks(db: sqlite3.Connection, flow: FlowName) -> bool:
    """Whether the flow has several sinks in this database."""
    return bool(db.execute("SELECT COUNT(*) > 1 FROM cutline_sinks WHERE flow = ?", (flow,)).fetchone()[0])


def store_prepared(
    db: sqlite3.Connection, own: SinkTable, epoch: Epoch, staged: Sequence[StagedBatch], *, keep: Keep
) -> None:
    """Also without rows: the sink that publishes the epoch for all must know that this one has reached it."""
    db.execute(
        "INSERT OR REPLACE INTO cutline_prepared (flow, sink, epoch, life, keep, staged) VALUES (?, ?, ?, ?, ?, ?)",
        (*own.owner, epoch, process_name(), keep.number, msgspec.json.encode(staged).decode()),
    )


def due_with(own: SqliteShare, epoch: Epoch, prepared_by: str) -> list[SqliteShare]:
    """The other sinks whose next epoch this is too: those that have reached the same epoch as the one with the permit.

    The rest are left to their own permits.
    """
    query = "SELECT sink, keep, staged FROM cutline_prepared WHERE (flow, epoch, life) = (?, ?, ?) AND sink != ?"
    flow, sink = own.table.owner
    shares = []
    for name, keep, staged in own.db.execute(query, (flow, epoch, prepared_by, sink)).fetchall():
        table = SinkTable.load(own.db, flow, SinkId(name))
        if table.reached(own.db) != own.table.reached(own.db) or not may_publish_for(table.ledger(own.db), epoch):
            continue
        through = table.through(own.db)
        batches = msgspec.json.decode(staged, type=list[StagedBatch])
        # Bound again while the outcome of the epoch before was unknown; that epoch is published by now.
        batches = [batch for batch in batches if place_of(batch.generation, batch.batch) > through]
        shares.append(share_of(own.db, table, batches, keep=Keep.of(keep), folder=own.folder.with_name(name)))
    return [share for share in shares if share.is_whole]
