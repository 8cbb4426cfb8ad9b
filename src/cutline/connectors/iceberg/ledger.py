"""What an Iceberg table records about a sink: its ledger, and a mark in each snapshot that the sink has made.

The ledger is a property of the table, set in the same commit as the snapshot: properties do not expire, snapshots do.
Every commit of a sink, also a claim, makes a new snapshot, and is valid only on top of the one it was computed from.
So a change of the ledger that a commit has not seen makes it fail, in every catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from cutline.base import records
from cutline.base.decoding import decoder_of
from cutline.errors import DamagedRecordError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, SinkId

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot

LEDGER_KIND = "iceberg-sink-ledger"
_PREFIX = "cutline"
#: The key of a Mark in a snapshot's summary.
MARK_KEY = "cutline"

#: Iceberg's ids are positive 64-bit numbers. 0: none.
SnapshotId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TableLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of one sink in the table."""

    flow: FlowName
    sink: SinkId
    #: Newest epoch whose rows readers see, and the digest of its files.
    published: Epoch = NO_EPOCH
    digest: str = ""
    #: The highest epoch that a rewind removed.
    rewound: Epoch = NO_EPOCH
    #: A token of the instance that may publish, a space, and the history it is of; empty: unclaimed.
    claim: str = ""
    #: The newest snapshot that this sink has made, and its sequence number; 0: none.
    snapshot: SnapshotId = 0
    sequence: SnapshotId = 0


MarkKind = Literal["claim", "publish", "rewind"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot of a Cutline sink did."""

    flow: FlowName
    sink: SinkId
    kind: MarkKind
    #: Newest published epoch before and after.
    before: Epoch
    after: Epoch
    #: Identifies the published files; empty unless it publishes.
    digest: str = ""
    #: The snapshot whose rows it starts from; 0: the table was empty. The snapshot's own ``parent-snapshot-id`` does
    #: not tell that from a parent that has expired.
    on: SnapshotId = 0
    format: int = 1


def ledger_key(flow: str, sink: str) -> str:
    """The property with the sink's ledger."""
    return f"{_PREFIX}/{flow}/{sink}"


def owners_in(properties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Flow and sink of every ledger in the table."""
    parts = (key.split("/") for key in properties)
    return sorted((part[1], part[2]) for part in parts if len(part) == 3 and part[0] == _PREFIX)


def load_ledger(properties: Mapping[str, str], flow: FlowName, sink: SinkId, **where: object) -> TableLedger | None:
    """None: the sink has never changed the table."""
    text = properties.get(ledger_key(flow, sink))
    if text is None:
        return None
    found = records.decode(LEDGER_KIND, text.encode(), TableLedger, flow=flow, sink=sink, **where)
    records.check_identity(LEDGER_KIND, (found.flow, found.sink), (flow, sink), **where)
    return found


def stored_ledger(ledger: TableLedger) -> dict[str, str]:
    """The ledger as a property of the table."""
    return {ledger_key(ledger.flow, ledger.sink): records.encode(LEDGER_KIND, ledger).decode()}


def mark_of(snapshot: Snapshot) -> Mark | None:
    """None: the snapshot was made by another writer."""
    text: Any = snapshot.summary.additional_properties.get(MARK_KEY) if snapshot.summary is not None else None
    if text is None:
        return None
    try:
        return decoder_of(Mark).decode(text.encode())
    except (msgspec.MsgspecError, AttributeError) as error:
        raise DamagedRecordError(
            f"snapshot {snapshot.snapshot_id} has a mark of Cutline's that cannot be read: {error}",
            next_step="find out what wrote it; a newer version of Cutline may be able to read it",
        ) from error


def stored_mark(mark: Mark) -> dict[str, str]:
    """The mark as a property of the snapshot's summary."""
    return {MARK_KEY: msgspec.json.encode(mark).decode()}
