"""The snapshots of an Iceberg table as the epochs of a sink: which one shows which epoch, as far as they still exist.

Snapshots expire when someone maintains the table. The sink therefore tags the snapshots that a restore of the flow may
need: expiry does not touch what a tag names. A tag's name says for which epochs it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutline.connectors.iceberg.ledger import Mark, mark_of
from cutline.model.ids import Epoch

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

    from cutline.protocol.publish.rewind_points import Gap

#: The sequence number of a table's first snapshot.
_FIRST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One snapshot on the way from the newest to the oldest."""

    snapshot: Snapshot
    mark: Mark | None
    #: Whether it may have changed rows and was not made by the sink in question.
    is_foreign_change: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A snapshot that shows the table as it was while ``since`` was the newest published epoch, up to ``until``."""

    since: Epoch
    until: Epoch
    #: None: the table had no snapshot, and no rows.
    snapshot_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The states of the table that still exist, newest first, without the present one."""

    states: tuple[State, ...]
    #: Another writer's change, which keeps the sink from rewinding further.
    foreign: Snapshot | None = None

    def at(self, epoch: Epoch) -> State | None:
        """The state in which ``epoch`` was the newest published one, or in which none up to it was newer."""
        return next((state for state in self.states if state.since <= epoch <= state.until), None)

    def oldest(self, published: Epoch) -> Epoch:
        return min((state.since for state in self.states), default=published)

    def gaps(self, published: Epoch) -> tuple[Gap, ...]:
        """Epochs above the oldest that no state is of."""
        found, above = [], published
        for state in self.states:
            if state.until + 1 < above:
                found.append((Epoch(state.until + 1), above))
            above = state.since
        return tuple(reversed(found))


def walk(metadata: TableMetadata, flow: str, sink: str) -> Iterator[Seen]:
    """From the newest snapshot down, as far as snapshots exist."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    current = metadata.current_snapshot_id
    # Popped, so that marks which name one another in a circle end the walk.
    while current is not None and (snapshot := by_id.pop(current, None)) is not None:
        mark = mark_of(snapshot)
        is_own = mark is not None and (mark.flow, mark.sink) == (flow, sink)
        yield Seen(
            snapshot=snapshot,
            mark=mark if is_own else None,
            is_foreign_change=not is_own
            and not (mark is not None and mark.kind == "claim")
            and not _only_moves(snapshot),
        )
        current = (mark.on or None) if mark is not None else snapshot.parent_snapshot_id


def _only_moves(snapshot: Snapshot) -> bool:
    """Whether it has the same rows in other files, as compaction makes it."""
    from pyiceberg.table.snapshots import Operation

    return snapshot.summary is not None and snapshot.summary.operation == Operation.REPLACE


def past_of(metadata: TableMetadata, flow: str, sink: str, *, through_changes: bool = False) -> Past:
    """``through_changes``: also the states before another writer's changes, for readers: a rewind would undo those."""
    states: list[State] = []
    known = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    foreign = None
    for seen in walk(metadata, flow, sink):
        if seen.is_foreign_change and not through_changes:
            foreign = seen.snapshot
            break
        mark = seen.mark
        if mark is not None and mark.kind == "publish" and (mark.on == 0 or mark.on in known):
            states.append(State(since=mark.before, until=Epoch(mark.after - 1), snapshot_id=mark.on or None))
    if foreign is None:
        below = min((state.since for state in states), default=None)
        states += [state for state in tagged(metadata, flow, sink) if below is None or state.until < below]
    return Past(states=tuple(states), foreign=foreign)


# ------------------------------------------------------------------------------------------------------------ tags


def tag_name(flow: str, sink: str, state: State) -> str:
    return f"{_tag_prefix(flow, sink)}{state.since}-{state.until}"


def _tag_prefix(flow: str, sink: str) -> str:
    return f"cutline/{flow}/{sink}/"


def tagged(metadata: TableMetadata, flow: str, sink: str) -> list[State]:
    """The states that the sink has tagged, newest first."""
    name_of = re.compile(re.escape(_tag_prefix(flow, sink)) + r"(\d{1,19})-(\d{1,19})")
    found = [
        State(since=Epoch(int(match[1])), until=Epoch(int(match[2])), snapshot_id=ref.snapshot_id)
        for name, ref in metadata.refs.items()
        if (match := name_of.fullmatch(name))
    ]
    return sorted(found, key=lambda state: state.since, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagging:
    """How the tags change with a commit."""

    added: tuple[State, ...] = ()
    removed: tuple[State, ...] = ()


def tags_after_publish(
    metadata: TableMetadata, flow: str, sink: str, state: State, points: Collection[Epoch] | None
) -> Tagging:
    """``state``: the one before the publication; ``points``: the epochs that the flow may be restored to."""
    tags = tagged(metadata, flow, sink)
    if has_foreign_change_since_own(metadata, flow, sink):
        stale = tags  # a rewind to them would undo the other writer's change
    elif points is None:
        stale = []
    else:
        stale = [tag for tag in tags if not _is_needed(tag, points)]
    wants = state.snapshot_id is not None and points is not None and _is_needed(state, points)
    return Tagging(added=(state,) if wants else (), removed=tuple(stale))


def tags_after_rewind(metadata: TableMetadata, flow: str, sink: str, state: State) -> Tagging:
    """``state``: the one that the rewind restores. It needs no tag then, and later ones no longer count."""
    return Tagging(removed=tuple(tag for tag in tagged(metadata, flow, sink) if tag.until >= state.since))


def _is_needed(state: State, points: Collection[Epoch]) -> bool:
    return any(state.since <= point <= state.until for point in points)


def has_foreign_change_since_own(metadata: TableMetadata, flow: str, sink: str) -> bool:
    """Whether another writer has changed rows since this sink's newest snapshot; True if that cannot be known."""
    last = None
    for seen in walk(metadata, flow, sink):
        if seen.mark is not None:
            return False
        if seen.is_foreign_change:
            return True
        last = seen.snapshot
    return last is not None and last.sequence_number != _FIRST
