"""An Iceberg table as one sink sees it: what the catalog names now, and the sink's epochs and claims in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cutline.base.backoff import Backoff
from cutline.base.logs import get_logger
from cutline.base.retry import Retry
from cutline.connectors.iceberg.catalog import CatalogAddress, catalog_errors, gone
from cutline.connectors.iceberg.commits import Change, Draft, SnapshotWriter, commit_draft, discard_draft
from cutline.connectors.iceberg.history import Past, State, Tagging, past_of, walk
from cutline.connectors.iceberg.ledger import Mark, MarkKind, TableLedger, load_ledger
from cutline.errors import DamagedRecordError, NotDone, OutcomeUnknown, SinkError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.publish.sink_ledger import SinkLedger

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Operation, Snapshot

    from cutline.connectors.sink_base import OpenedSink

log = get_logger(__name__)

#: Attempts of one commit. A race that is lost costs an attempt, so that busy writers do not starve the sink.
ATTEMPTS = Retry(limit=10, backoff=Backoff(first_s=0.02, limit_s=1.0, jitter=0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The table as it was at one moment. A commit is made on top of exactly what was judged."""

    table: Table
    ledger: TableLedger
    #: The sink's newest snapshot among those that readers see, by its mark; None if it has none, or they are expired.
    newest: Mark | None
    #: Someone moved the table to an earlier state, so readers do not see the sink's newest snapshot.
    is_set_back: bool

    @property
    def published(self) -> Epoch:
        """What readers see, whatever the ledger says."""
        if not self.is_set_back:
            return self.ledger.published
        return self.newest.after if self.newest is not None else NO_EPOCH

    @property
    def rewound(self) -> Epoch:
        return max(self.ledger.rewound, self.ledger.published) if self.is_set_back else self.ledger.rewound

    def past(self) -> Past:
        return past_of(self.table.metadata, self.ledger.flow, self.ledger.sink)

    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        return None if snapshot_id is None else self.table.metadata.snapshot_by_id(snapshot_id)


class SinkTable:
    """The table of one sink."""

    def __init__(self, address: CatalogAddress, identifier: tuple[str, ...], opened: OpenedSink) -> None:
        self.address = address
        self.identifier = identifier
        self.opened = opened
        self._catalog: Catalog | None = None
        #: The newest epoch that this instance knows to be published: it may vanish only by a rewind of its own.
        self._known = NO_EPOCH

    @property
    def name(self) -> str:
        return ".".join(self.identifier)

    def catalog(self) -> Catalog:
        if self._catalog is None:
            self._catalog = self.address.load()
            # Drivers warn about a connection that is never closed, and a sink has no close.
            weakref.finalize(self, self._catalog.close)
        return self._catalog

    def find(self) -> Table | None:
        """The table as the catalog has it now; None if there is none."""
        return self.address.load_table(self.catalog(), self.identifier)

    def view(self, after: Exception | None = None) -> View:
        """The table as it is now. ``after``: a failure whose effect the caller wants to find out."""
        self.opened.require()
        try:
            table = self.find()
        except NotDone as error:
            if after is None:
                raise
            raise OutcomeUnknown(error.what, next_step=error.next_step, catalog=self.address, table=self.name) from None
        if table is None:
            raise gone(self.name, catalog=self.address)
        return self.view_of(table)

    def view_of(self, table: Table) -> View:
        context = self.opened.context
        found = load_ledger(table.metadata.properties, context.flow, context.sink, table=self.name)
        marks = (seen.mark for seen in walk(table.metadata, context.flow, context.sink))
        newest = next((mark for mark in marks if mark is not None), None)
        if found is None:
            if newest is not None:
                raise DamagedRecordError(
                    "the table has snapshots of this sink, and its ledger is gone from the table's properties",
                    next_step="set the property again to what an older metadata file of the table has; "
                    "or give the sink another table",
                    flow=context.flow,
                    sink=context.sink,
                    table=self.name,
                )
            found = TableLedger(flow=context.flow, sink=context.sink)
        return View(table=table, ledger=found, newest=newest, is_set_back=_is_set_back(table, found))

    def judged(self, view: View) -> SinkLedger:
        """The sink's ledger in this view, as the protocol judges it."""
        digests: dict[Epoch, str | None] = {}
        for seen in walk(view.table.metadata, view.ledger.flow, view.ledger.sink):
            if seen.mark is not None and seen.mark.kind == "publish":
                digests[seen.mark.after] = seen.mark.digest
        if not view.is_set_back and view.published:
            digests[view.published] = view.ledger.digest  # its snapshot may have expired
        past = view.past()
        return SinkLedger(
            flow=view.ledger.flow,
            sink=view.ledger.sink,
            published=view.published,
            rewound=view.rewound,
            digests=digests,
            reach=past.oldest(view.published),
            gaps=past.gaps(view.published),
            claim=view.ledger.claim,
        )

    # ------------------------------------------------------------------ what this instance knows

    def note(self, epoch: Epoch) -> None:
        """This instance has seen to it that ``epoch`` is the newest published one."""
        self._known = epoch

    def check_not_set_back(self, view: View) -> None:
        """Refuse to publish on top of a table that has lost epochs while the flow ran: they would be missing."""
        if view.published < self._known:
            context = self.opened.context
            raise SinkError(
                f"someone set the table back from epoch {self._known} to epoch {view.published} "
                "(a rollback by hand, or a catalog that was restored or lost what it had acknowledged)",
                next_step="restart the flow: it says which of its epochs are missing, and restores to where the sink "
                "is (cutline restore --to EPOCH)",
                flow=context.flow,
                sink=context.sink,
                table=self.name,
            )

    # ------------------------------------------------------------------ commits

    def draft(self, view: View, start: Snapshot | None, change: Change, operation: Operation, mark: Mark) -> Draft:
        """Write a snapshot that starts from ``start``'s rows. Raises OSError if the files cannot be written."""
        return SnapshotWriter(view.table, start).write(change, operation, mark)

    def commit(self, view: View, draft: Draft, ledger: TableLedger, tagging: Tagging | None = None) -> Exception | None:
        """None: the snapshot is what readers see. Otherwise only the table tells what happened.

        Conflicts with every other commit to the table's main branch since ``view``.
        """
        from pyiceberg.exceptions import CommitFailedException

        snapshot = draft.snapshot
        ledger = msgspec.structs.replace(ledger, snapshot=snapshot.snapshot_id, sequence=snapshot.sequence_number or 0)
        try:
            commit_draft(view.table, draft, ledger, tagging or Tagging())
        except CommitFailedException as error:
            discard_draft(view.table, draft)
            return error
        except catalog_errors() as error:
            log.warning("iceberg_commit_failed", table=self.name, error=self.address.describe(error))
            return error
        return None

    def mark(self, view: View, kind: MarkKind, *, after: Epoch, on: int | None, digest: str = "") -> Mark:
        """``on``: the snapshot that it starts from."""
        context = self.opened.context
        return Mark(
            flow=context.flow,
            sink=context.sink,
            kind=kind,
            before=view.published,
            after=after,
            digest=digest,
            on=on or 0,
        )

    def describe(self, error: Exception | None) -> str:
        return self.address.describe(error) if error is not None else "no answer"


def _is_set_back(table: Table, ledger: TableLedger) -> bool:
    """Whether readers see a state from before the sink's newest snapshot, which no rewind of the sink has made."""
    if not ledger.snapshot:
        return False
    head = table.current_snapshot()
    if head is None or (head.sequence_number or 0) < ledger.sequence:
        return True
    for seen in walk(table.metadata, ledger.flow, ledger.sink):
        if seen.mark is not None:
            return seen.snapshot.snapshot_id != ledger.snapshot
    return False


def state_at_head(view: View, until: Epoch) -> State:
    """The present state, as the one before a publication."""
    return State(since=view.published, until=until, snapshot_id=view.table.metadata.current_snapshot_id)
