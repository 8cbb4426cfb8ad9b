"""Commits to an Iceberg table: a snapshot, the sink's ledger and its tags, in one step of the catalog.

pyiceberg's own transactions are not used: they repeat a commit that has lost a race on top of what they have not
judged, so a process that was replaced would publish nevertheless.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutline.connectors.iceberg.history import State, Tagging, tag_name
from cutline.connectors.iceberg.ledger import Mark, TableLedger, stored_ledger, stored_mark

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile, ManifestFile, ManifestWriter
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Operation, Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate

MAIN = "main"
#: Small manifests are merged when there are so many of them: every plan reads all manifests.
MANIFESTS_TO_MERGE = 100
#: Manifests of this size are not merged with others.
LARGE_MANIFEST_BYTES = 8 << 20
#: A tag that never expires by its age.
_FOR_EVER_MS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a snapshot changes compared with the one it starts from."""

    added: Sequence[DataFile] = ()
    #: Paths of data files.
    removed: frozenset[str] = frozenset()


@dataclass(slots=True)
class Draft:
    """A snapshot whose files are written, and which no catalog names yet."""

    snapshot: Snapshot
    #: Files that are of no use unless it is committed.
    written: list[str] = field(default_factory=list)


def head_of(table: Table) -> int | None:
    """The snapshot that readers see."""
    return table.metadata.current_snapshot_id


class SnapshotWriter:
    """Writes the files of one snapshot: manifests and the list of them."""

    def __init__(self, table: Table, start: Snapshot | None) -> None:
        """``start``: the snapshot whose rows it starts from."""
        self._table = table
        self._start = start
        self._snapshot_id = table.metadata.new_snapshot_id()
        self._name = uuid.uuid4()
        self._written: list[str] = []
        self._removed: list[DataFile] = []

    def write(self, change: Change, operation: Operation, mark: Mark) -> Draft:
        from pyiceberg.manifest import write_manifest_list
        from pyiceberg.table.snapshots import Snapshot

        metadata = self._table.metadata
        manifests = [*self._added(change.added), *self._kept(change.removed)]
        sequence = metadata.next_sequence_number()
        parent = self._start.snapshot_id if self._start is not None else None
        path = self._place(f"snap-{self._snapshot_id}-0-{self._name}.avro")
        with write_manifest_list(
            format_version=metadata.format_version,
            output_file=self._table.io.new_output(path),
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent,
            sequence_number=sequence,
            avro_compression=self._compression(),
        ) as writer:
            writer.add_manifests(self._merged(manifests))
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": self._snapshot_id,
                "parent-snapshot-id": parent,
                "sequence-number": sequence,
                # The clocks of hosts differ, and readers order snapshots by their times.
                "timestamp-ms": max(time.time_ns() // 1_000_000, metadata.last_updated_ms),
                "manifest-list": path,
                "summary": self._summary(change, operation, mark),
                "schema-id": metadata.current_schema_id,
            }
        )
        return Draft(snapshot=snapshot, written=self._written)

    # ------------------------------------------------------------------ manifests

    def _added(self, files: Sequence[DataFile]) -> list[ManifestFile]:
        from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus

        by_spec: dict[int, list[DataFile]] = defaultdict(list)
        for file in files:
            by_spec[file.spec_id].append(file)
        found = []
        for spec_id, some in by_spec.items():
            with self._manifest(spec_id) as writer:
                for file in some:
                    writer.add(
                        ManifestEntry.from_args(
                            status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, data_file=file
                        )
                    )
            found.append(writer.to_manifest_file())
        return found

    def _kept(self, removed: Collection[str]) -> list[ManifestFile]:
        """The manifests of the snapshot it starts from, rewritten where files are removed."""
        if self._start is None:
            return []
        # Manifests without live files are of use to the snapshot that removed the files, and to no later one.
        manifests = [
            one for one in self._start.manifests(self._table.io) if one.has_added_files() or one.has_existing_files()
        ]
        return [self._without(one, removed) for one in manifests] if removed else manifests

    def _without(self, manifest: ManifestFile, removed: Collection[str]) -> ManifestFile:
        from pyiceberg.manifest import ManifestContent

        if manifest.content != ManifestContent.DATA:
            return manifest
        entries = manifest.fetch_manifest_entry(self._table.io, discard_deleted=True)
        if not any(entry.data_file.file_path in removed for entry in entries):
            return manifest
        with self._manifest(manifest.partition_spec_id) as writer:
            for entry in entries:
                if entry.data_file.file_path in removed:
                    self._removed.append(entry.data_file)
                    writer.delete(entry)
                else:
                    writer.existing(entry)
        return writer.to_manifest_file()

    def _merged(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        """Small manifests become one when there are many, as Iceberg's other writers do it."""
        from pyiceberg.manifest import ManifestContent, ManifestEntryStatus

        groups: dict[int, list[ManifestFile]] = defaultdict(list)
        for one in manifests:
            if one.content == ManifestContent.DATA and one.manifest_length < LARGE_MANIFEST_BYTES:
                groups[one.partition_spec_id].append(one)
        found = list(manifests)
        for spec_id, group in groups.items():
            if len(group) < MANIFESTS_TO_MERGE:
                continue
            with self._manifest(spec_id) as writer:
                for one in group:
                    for entry in one.fetch_manifest_entry(self._table.io, discard_deleted=False):
                        is_own = entry.snapshot_id == self._snapshot_id
                        if entry.status == ManifestEntryStatus.ADDED and is_own:
                            writer.add(entry)
                        elif entry.status != ManifestEntryStatus.DELETED:
                            writer.existing(entry)
                        elif is_own:
                            writer.delete(entry)
            paths = {one.manifest_path for one in group}
            found = [writer.to_manifest_file(), *(one for one in found if one.manifest_path not in paths)]
        return found

    def _manifest(self, spec_id: int) -> ManifestWriter:
        from pyiceberg.manifest import write_manifest

        metadata = self._table.metadata
        return write_manifest(
            format_version=metadata.format_version,
            spec=metadata.specs()[spec_id],
            schema=self._table.schema(),
            output_file=self._table.io.new_output(self._place(f"{self._name}-m{len(self._written)}.avro")),
            snapshot_id=self._snapshot_id,
            avro_compression=self._compression(),
        )

    def _place(self, name: str) -> str:
        path = self._table.location_provider().new_metadata_location(name)
        self._written.append(path)
        return path

    def _compression(self) -> Any:
        from pyiceberg.table import TableProperties

        return self._table.metadata.properties.get(
            TableProperties.WRITE_AVRO_COMPRESSION, TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT
        )

    def _summary(self, change: Change, operation: Operation, mark: Mark) -> Any:
        from pyiceberg.table.snapshots import SnapshotSummaryCollector, Summary, update_snapshot_summaries

        collector = SnapshotSummaryCollector()
        schema, specs = self._table.schema(), self._table.metadata.specs()
        for file in change.added:
            collector.add_file(data_file=file, partition_spec=specs[file.spec_id], schema=schema)
        for file in self._removed:
            collector.remove_file(data_file=file, partition_spec=specs[file.spec_id], schema=schema)
        return update_snapshot_summaries(
            summary=Summary(operation=operation, **collector.build(), **stored_mark(mark)),
            previous_summary=self._start.summary if self._start is not None else None,
        )


# --------------------------------------------------------------------------------------------------------- the commit


def commit_draft(table: Table, draft: Draft, ledger: TableLedger, tagging: Tagging) -> None:
    """Make the snapshot the one that readers see, on top of exactly the one that ``table`` shows.

    Raises what a catalog raises. CommitFailedException: it certainly did not happen. Else only the table tells.
    """
    from pyiceberg.table.update import AssertRefSnapshotId, AssertTableUUID, SetPropertiesUpdate

    requirements: tuple[TableRequirement, ...] = (
        AssertTableUUID(uuid=table.metadata.table_uuid),
        AssertRefSnapshotId.model_validate({"ref": MAIN, "snapshot-id": head_of(table)}),
    )
    updates = (
        *_snapshot_updates(table, draft.snapshot),
        SetPropertiesUpdate(updates=stored_ledger(ledger)),
        *_tag_updates(ledger, tagging),
    )
    former = {entry.metadata_file for entry in table.metadata.metadata_log}
    response = table.catalog.commit_table(table, requirements, updates)
    _collect_metadata(table, former - {entry.metadata_file for entry in response.metadata.metadata_log})
    table.metadata = response.metadata
    table.metadata_location = response.metadata_location


def _snapshot_updates(table: Table, snapshot: Snapshot) -> tuple[TableUpdate, ...]:
    from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate

    main = table.metadata.refs.get(MAIN)
    # How long its snapshots are kept is the owner's decision.
    kept = main.model_dump(by_alias=True, exclude_none=True) if main is not None else {}
    ref = {**kept, "ref-name": MAIN, "type": "branch", "snapshot-id": snapshot.snapshot_id}
    return AddSnapshotUpdate(snapshot=snapshot), SetSnapshotRefUpdate.model_validate(ref)


def _tag_updates(ledger: TableLedger, tagging: Tagging) -> list[TableUpdate]:
    from pyiceberg.table.update import RemoveSnapshotRefUpdate, SetSnapshotRefUpdate

    def name(state: State) -> str:
        return tag_name(ledger.flow, ledger.sink, state)

    removed: list[TableUpdate] = [
        RemoveSnapshotRefUpdate.model_validate({"ref-name": name(state)}) for state in tagging.removed
    ]
    return removed + [
        SetSnapshotRefUpdate.model_validate(
            {
                "ref-name": name(state),
                "type": "tag",
                "snapshot-id": state.snapshot_id,
                "max-ref-age-ms": _FOR_EVER_MS,
            }
        )
        for state in tagging.added
        if state.snapshot_id is not None
    ]


def discard_draft(table: Table, draft: Draft) -> None:
    """Delete the files of a snapshot that certainly was not committed."""
    for path in draft.written:
        with contextlib.suppress(OSError):
            table.io.delete(path)


def _collect_metadata(table: Table, paths: Collection[str]) -> None:
    """Delete metadata files that left the table's log of them, if the table wants it; readers have newer ones."""
    if table.metadata.properties.get("write.metadata.delete-after-commit.enabled", "false").lower() != "true":
        return
    for path in paths:
        with contextlib.suppress(OSError):
            table.io.delete(path)


def named_since(table: Table, names: Collection[str], timestamp_ms: int) -> set[str]:
    """Which data files of these names a snapshot since this time has: readers of it may need them. Names are unique."""
    io, found, read = table.io, set[str](), set[str]()
    for snapshot in table.metadata.snapshots:
        if snapshot.timestamp_ms < timestamp_ms:
            continue
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path in read:
                continue
            read.add(manifest.manifest_path)
            for entry in manifest.fetch_manifest_entry(io, discard_deleted=False):
                name = entry.data_file.file_path.rpartition("/")[2]
                if name in names:
                    found.add(name)
    return found
