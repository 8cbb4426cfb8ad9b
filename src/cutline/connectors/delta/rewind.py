"""Rewinds a Delta table: one transaction restores an earlier version, with its rows and published epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.connectors.delta.commits import no_hooks, properties
from cutline.connectors.delta.fit import check_removable
from cutline.connectors.delta.log import Mark
from cutline.connectors.delta.publish import ATTEMPTS
from cutline.connectors.delta.replace import check_restorable
from cutline.errors import NotDone
from cutline.protocol.publish import sink_ledger

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from cutline.connectors.delta.table import SinkTable
    from cutline.model.ids import Epoch
    from cutline.protocol.publish.sink_ledger import SinkLedger


def rewind_table(view: SinkTable, epoch: Epoch, *, replaces: bool) -> None:
    """Restore the version in which ``epoch`` was newest. ``replaces``: the sink also removes files."""
    failure: Exception | None = None
    for _ in ATTEMPTS.attempts():
        table = view.refresh(after=failure)
        ledger = view.ledger(table)
        if not view.opened.is_to_rewind(ledger, epoch):
            break
        failure = _attempt(view, table, ledger, epoch, replaces=replaces)
    table = view.refresh(after=failure)
    if view.published_in(table) > epoch:
        raise NotDone(
            f"the table could not be rewound in {ATTEMPTS.limit} attempts: {failure}",
            next_step="check whether another writer blocks the table; the rewind can be repeated as it is",
            epoch=epoch,
            path=view.path,
        ) from failure
    view.sync_log(table)


def _attempt(
    view: SinkTable, table: DeltaTable, ledger: SinkLedger, epoch: Epoch, *, replaces: bool
) -> Exception | None:
    from deltalake.exceptions import DeltaError

    check_removable(table.metadata().configuration, view.path)
    version, after = view.log.rewind_target(table.version(), view.app, ledger.published, epoch)
    if replaces:
        check_restorable(view.path, table, version)
    mark = Mark(app=view.app, kind="rewind", before=ledger.published, after=after)
    rewound = sink_ledger.rewind(ledger, epoch).rewound
    view.opened.reach("sink-rewind-half")
    try:
        # Fails if another writer commits in between, so another writer's change is never lost unnoticed.
        table.restore(
            version,
            commit_properties=properties(mark, {view.rewound_app: rewound, **view.own_claim()}),
            post_commithook_properties=no_hooks(),
        )
    except (DeltaError, OSError) as error:
        return error
    return None


def oldest_rewind(view: SinkTable) -> Epoch:
    """A rewind reaches no further back than the log or the newest change by another writer."""
    table = view.refresh()
    return view.log.oldest_rewind(table.version(), view.app, view.published_in(table))
