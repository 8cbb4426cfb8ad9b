"""Publishes an epoch to an Iceberg table, on top of exactly the snapshot in which it was judged."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from cutline.base.crashpoints import crashpoint
from cutline.connectors.iceberg.commits import Change, Draft
from cutline.connectors.iceberg.data_files import data_file
from cutline.connectors.iceberg.history import tags_after_publish
from cutline.connectors.iceberg.replace import check_partitions, files_of, upsert_of
from cutline.connectors.iceberg.table import ATTEMPTS, state_at_head
from cutline.connectors.replaced_rows import Replaced, overwritten_partitions, rewriting
from cutline.connectors.staged_files import check_still_there, digest_of, pieces_of
from cutline.errors import NotDone
from cutline.model.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pyiceberg.table import Table

    from cutline.connectors.iceberg.replace import IcebergFile
    from cutline.connectors.iceberg.table import SinkTable, View
    from cutline.model.staging import Piece, StagedBatch
    from cutline.protocol.publish.commit import CommitPermit

ORPHANS_HINT = (
    "restore the flow to an older checkpoint; never remove orphan files that are younger than "
    "the longest time the flow may be stopped"
)

Mode = Literal["append", "upsert", "overwrite_partitions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows go into the table."""

    mode: Mode
    key: tuple[str, ...]
    partition_by: tuple[str, ...]
    #: The table's folder.
    root: Path


class Publication:
    """The publication of one epoch."""

    def __init__(
        self,
        target: SinkTable,
        layout: Layout,
        permit: CommitPermit,
        staged: Sequence[StagedBatch],
        check_fit: Callable[[Table], None],
    ) -> None:
        """``check_fit`` raises SinkError if the table no longer takes such rows."""
        self._target = target
        self._layout = layout
        self._permit = permit
        self._staged = staged
        self._check_fit = check_fit
        self._pieces = pieces_of(staged)
        self._digest = digest_of(self._pieces)

    def run(self) -> None:
        """Publish the epoch unless it is published; an epoch without rows makes no snapshot."""
        if not self._pieces:
            return
        view = self.due()
        if view is None:
            return
        self._target.opened.reach("sink-commit-begun")
        check_still_there(self._layout.root, self._pieces, hint=ORPHANS_HINT)
        superseded = self._publish(view)
        self._target.opened.reach("sink-commit-done")
        for piece in superseded:
            with contextlib.suppress(OSError):
                (self._layout.root / piece["path"]).unlink(missing_ok=True)

    def due(self, *, after: Exception | None = None) -> View | None:
        """The table as it is now, if the epoch is to be published in it; None: it is there already."""
        view = self._target.view(after)
        if not self._target.opened.is_to_publish(self._target.judged(view), self._permit, self._digest):
            self._target.note(view.published)
            return None
        self._target.check_not_set_back(view)
        return view

    def _publish(self, view: View) -> Sequence[Piece]:
        """The staged files that were rewritten, and are of no use any more."""
        failure: Exception | None = None
        for _ in ATTEMPTS.attempts():
            # A conflict may have been a change of the table's schema.
            self._check_fit(view.table)
            change, failure = self.attempt(view)
            if failure is None:
                self._target.note(self._permit.epoch)
                added = {piece["path"] for piece in change.added}
                return [piece for piece in self._pieces if piece["path"] not in added]
            # A failed attempt may have taken effect: only the table itself knows.
            again = self.due(after=failure)
            if again is None:
                return ()
            view = again
        raise NotDone(
            f"the table did not take the epoch in {ATTEMPTS.limit} attempts: {self._target.describe(failure)}",
            next_step="check whether another writer blocks the table; the commit can be repeated as it is",
            flow=self._permit.flow,
            sink=self._permit.sink,
            epoch=self._permit.epoch,
            table=self._target.name,
        ) from None

    def attempt(self, view: View) -> tuple[Replaced[IcebergFile], Exception | None]:
        """One attempt on top of what was judged. After a failure only the table tells what happened."""
        change = self._change(view.table)
        try:
            draft = self._draft(view, change)
        except OSError as error:
            return change, error
        crashpoint("sink-commit-half", self._permit.sink)
        head = state_at_head(view, Epoch(self._permit.epoch - 1))
        metadata, ledger = view.table.metadata, view.ledger
        tagging = tags_after_publish(metadata, ledger.flow, ledger.sink, head, self._permit.rewind_points)
        after = msgspec.structs.replace(ledger, published=self._permit.epoch, digest=self._digest, rewound=view.rewound)
        failure = self._target.commit(view, draft, after, tagging)
        self._discard(change, failure)
        return change, failure

    def _draft(self, view: View, change: Replaced[IcebergFile]) -> Draft:
        from pyiceberg.table.snapshots import Operation

        table, head = view.table, view.table.metadata.current_snapshot_id
        mark = self._target.mark(view, "publish", after=self._permit.epoch, on=head, digest=self._digest)
        files = Change(
            added=[data_file(table, self._layout.root, piece) for piece in change.added],
            removed=frozenset(file.path for file in change.files),
        )
        operation = Operation.OVERWRITE if change.files else Operation.APPEND
        return self._target.draft(view, view.snapshot(head), files, operation, mark)

    def _change(self, table: Table) -> Replaced[IcebergFile]:
        layout = self._layout
        if layout.mode == "append":
            return Replaced(added=self._pieces)
        files = files_of(table, layout.key or layout.partition_by, layout.partition_by)
        if layout.mode == "upsert":
            upsert = upsert_of(table, layout.root, layout.key, layout.partition_by, rewriting(self._permit))
            return upsert.replacement(files, self._pieces)
        check_partitions(table, files, layout.partition_by)
        return overwritten_partitions(files, self._staged)

    def _discard(self, change: Replaced[IcebergFile], failure: Exception | None) -> None:
        """Delete the files written for a change that certainly did not happen."""
        from pyiceberg.exceptions import CommitFailedException

        if isinstance(failure, CommitFailedException):
            for piece in change.written:
                (self._layout.root / piece["path"]).unlink(missing_ok=True)
