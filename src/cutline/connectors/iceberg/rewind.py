"""Rewinds an Iceberg table: one commit makes a new snapshot with the rows of an earlier one, and sets the ledger back.

The new snapshot's parent is the earlier one, as after a rollback: for expiry and for incremental readers the snapshots
of rewound epochs are not part of the table's history. It is a new snapshot nevertheless: if the branch only moved back,
a commit that was computed before the rewind would find the branch where it expects it, and succeed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from cutline.connectors.iceberg.commits import Change
from cutline.connectors.iceberg.file_io import folder_of
from cutline.connectors.iceberg.history import tags_after_rewind
from cutline.connectors.iceberg.table import ATTEMPTS
from cutline.errors import NotDone, SinkError
from cutline.protocol.publish import sink_ledger

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from cutline.connectors.iceberg.history import State
    from cutline.connectors.iceberg.table import SinkTable, View
    from cutline.model.ids import Epoch

KEEP_MORE = "expire fewer snapshots, so that the next rewind reaches further back"


def rewind_table(target: SinkTable, epoch: Epoch) -> None:
    """Make readers see what they saw when ``epoch`` was newest."""
    failure: Exception | None = None
    for _ in ATTEMPTS.attempts():
        view = target.view(failure)
        check_no_foreign_change(target, view, epoch)
        if not target.opened.is_to_rewind(target.judged(view), epoch, keep_more=KEEP_MORE):
            target.note(view.published)
            return
        failure = _attempt(target, view, epoch)
        if failure is None:
            return
    raise NotDone(
        f"the table could not be rewound in {ATTEMPTS.limit} attempts: {target.describe(failure)}",
        next_step="check whether another writer blocks the table; the rewind can be repeated as it is",
        epoch=epoch,
        table=target.name,
    ) from None


def check_no_foreign_change(target: SinkTable, view: View, epoch: Epoch) -> None:
    """Refuse a rewind that would undo what another writer has done since, before anything changes."""
    past = view.past()
    if view.published <= epoch or past.at(epoch) is not None or past.foreign is None:
        return
    if not target.judged(view).is_held_by(target.opened.claim):
        return  # that is the better reason
    operation = past.foreign.summary.operation.value if past.foreign.summary is not None else "unknown operation"
    raise SinkError(
        f"another writer changed the table since (snapshot {past.foreign.snapshot_id}, {operation})",
        next_step="restore the flow without rewinding this sink and delete the duplicate rows by hand, "
        "or undo the other change first",
        epoch=epoch,
        table=target.name,
    )


def _attempt(target: SinkTable, view: View, epoch: Epoch) -> Exception | None:
    from pyiceberg.table.snapshots import Operation

    state = _state_at(target, view, epoch)
    start = view.snapshot(state.snapshot_id)
    if start is not None:
        check_restorable(view.table, start)
    mark = target.mark(view, "rewind", after=state.since, on=state.snapshot_id)
    try:
        draft = target.draft(view, start, Change(), Operation.OVERWRITE, mark)
    except OSError as error:
        return error
    target.opened.reach("sink-rewind-half")
    after = sink_ledger.rewind(target.judged(view), state.since)
    ledger = msgspec.structs.replace(
        view.ledger, published=state.since, digest=after.digests.get(state.since) or "", rewound=after.rewound
    )
    tagging = tags_after_rewind(view.table.metadata, view.ledger.flow, view.ledger.sink, state)
    failure = target.commit(view, draft, ledger, tagging)
    if failure is None:
        target.note(state.since)
    return failure


def _state_at(target: SinkTable, view: View, epoch: Epoch) -> State:
    """The state that shows ``epoch``; ``is_to_rewind`` has said that there is one."""
    state = view.past().at(epoch)
    if state is None:
        raise SinkError(
            "the snapshots that showed that epoch have expired",
            next_step=f"restore the flow to another checkpoint; {KEEP_MORE}",
            epoch=epoch,
            table=target.name,
        )
    return state


def check_restorable(table: Table, snapshot: Snapshot) -> None:
    """Refuse to restore a snapshot if some of its files are gone."""
    try:
        manifests = snapshot.manifests(table.io)
        entries = [entry for one in manifests for entry in one.fetch_manifest_entry(table.io, discard_deleted=True)]
        for entry in entries:
            os.stat(folder_of(entry.data_file.file_path))
    except FileNotFoundError as error:
        raise SinkError(
            f"files that snapshot {snapshot.snapshot_id} of the table needs were deleted",
            next_step="rewind to a newer epoch, or restore the flow without rewinding this sink",
            table=".".join(table.name()),
        ) from error
