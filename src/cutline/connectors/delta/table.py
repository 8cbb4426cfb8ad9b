"""A Delta table as one sink sees it: the newest version, and the sink's epochs and claims in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.connectors.delta.log import DeltaLog, LoggedCommit, Mark, app_id, claim_id, rewound_id
from cutline.errors import InvariantViolation, NotDone, OutcomeUnknown
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.sink_ledger import SinkLedger

if TYPE_CHECKING:
    from pathlib import Path

    from deltalake import DeltaTable

    from cutline.connectors.sink_base import OpenedSink


class SinkTable:
    """Holds the version that was read last, so that a commit can be made on top of exactly what was judged."""

    def __init__(self, path: Path, opened: OpenedSink) -> None:
        self.path = path
        self.log = DeltaLog(path / "_delta_log")
        self.opened = opened
        self._table: DeltaTable | None = None

    # ------------------------------------------------------------------ versions

    def refresh(self, after: Exception | None = None) -> DeltaTable:
        """The table as it is now. ``after``: a failure whose effect the caller wants to find out."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        self.opened.require()
        try:
            if self._table is None:
                self._table = DeltaTable(str(self.path))
            else:
                self._table.update_incremental()
        except (DeltaError, OSError) as error:
            self._table = None
            kind = OutcomeUnknown if after is not None else NotDone
            raise kind(f"the table cannot be read: {error}", path=self.path) from (after or error)
        return self._table

    def read_anew(self) -> DeltaTable:
        """Reads the table again instead of updating it, so that callers' earlier versions do not change."""
        self.invalidate()
        return self.refresh()

    def invalidate(self) -> None:
        """The next refresh reads the whole table again."""
        self._table = None

    @property
    def current(self) -> DeltaTable:
        """The table as last seen."""
        if self._table is None:
            raise InvariantViolation("the table is used before it was read", path=self.path)
        return self._table

    # ------------------------------------------------------------------ the sink's ledger

    @property
    def app(self) -> str:
        """The application whose version is the sink's newest epoch."""
        context = self.opened.context
        return app_id(context.flow, context.sink)

    @property
    def claim_app(self) -> str:
        context = self.opened.context
        return claim_id(context.flow, context.sink)

    @property
    def rewound_app(self) -> str:
        context = self.opened.context
        return rewound_id(context.flow, context.sink)

    def published_in(self, table: DeltaTable) -> Epoch:
        return Epoch(table.transaction_version(self.app) or NO_EPOCH)

    def claim_in(self, table: DeltaTable) -> int:
        """The number of the newest claim; 0 if there is none."""
        return table.transaction_version(self.claim_app) or 0

    def own_claim(self) -> dict[str, int]:
        """What a commit carries so that it conflicts with a concurrent claim."""
        return {self.claim_app: int(self.opened.claim)} if self.opened.claim else {}

    def ledger(self, table: DeltaTable, publication: LoggedCommit | None = None) -> SinkLedger:
        """The sink's ledger in this version. ``publication``: a commit whose digest it includes."""
        context, published = self.opened.context, self.published_in(table)
        # The newest epoch may be so old that log cleanup deleted its commit; the transaction version proves it.
        digests: dict[Epoch, str | None] = {published: None} if published else {}
        if publication is not None and publication.mark is not None:
            digests[publication.mark.after] = publication.mark.digest
        return SinkLedger(
            flow=context.flow,
            sink=context.sink,
            published=published,
            rewound=Epoch(table.transaction_version(self.rewound_app) or NO_EPOCH),
            digests=digests,
            claim=str(self.claim_in(table) or ""),
        )

    def publication_of(self, table: DeltaTable, epoch: Epoch) -> LoggedCommit | None:
        """The commit that published this epoch, if it was not rewound and the log still has it."""
        return self.log.find_publish(table.version(), self.app, self.published_in(table), epoch)

    def mark(self, table: DeltaTable, epoch: Epoch, digest: str) -> Mark:
        """The mark of a commit on top of this version."""
        return Mark(app=self.app, kind="publish", before=self.published_in(table), after=epoch, digest=digest)

    def sync_log(self, table: DeltaTable) -> None:
        """Make this sink's newest commit, and all after it, durable."""
        if (newest := self.log.newest_of(table.version(), self.app)) is not None:
            self.log.make_durable(newest - 1, table.version())
