"""The checkpoint port: manifests, operator records and the content they name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile, SubtaskRecord, Tombstone
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.ports.query_dir import FileSet


class StoredRecord(NamedTuple):
    """An operator's record as stored."""

    record: OperatorRecord
    sha256: str


class HeldFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a snapshot, held so that Spark's own clean-up does not remove them, and not yet hashed."""

    operator: OperatorId
    epoch: Epoch
    files: FileSet
    #: Path inside the spark_checkpoint_dir → where it is held.
    paths: dict[str, Path]


class CheckpointStore(Protocol):
    """Keeps the checkpoints of one flow."""

    # ---- taking a snapshot
    def hold(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> HeldFiles:
        """Hold the files of a snapshot; fast, on the hot path."""
        ...

    def store_files(self, held: HeldFiles) -> tuple[list[SubtaskRecord], list[SnapshotFile]]:
        """Hash and keep the held files by content; returns them per subtask, and the shared ones."""
        ...

    def store_record(self, record: OperatorRecord) -> StoredRecord:
        """Create an operator's record of its generation; returns the stored record, which may be an older one."""
        ...

    def find_record(self, epoch: Epoch, operator: OperatorId, generation: Generation) -> StoredRecord | None:
        """The record of a pending epoch, if stored. Its content is referenced as if it had just been stored."""
        ...

    # ---- ending an epoch
    def store_manifest(self, manifest: Manifest) -> Manifest | Tombstone:
        """Create the manifest; returns the manifest or tombstone that is stored: this one, or an earlier one."""
        ...

    def store_tombstone(self, tombstone: Tombstone) -> Manifest | Tombstone:
        """Bar the epoch, so that no process can create its manifest; returns the manifest or tombstone that is stored.

        An unreadable file bars the epoch too: the tombstone is then returned, though it was not written.
        """
        ...

    def discard(self, epoch: Epoch) -> None:
        """Discard what an aborted epoch left behind. A manifest, all it names, and a tombstone stay."""
        ...

    # ---- reading
    def epochs(self) -> list[Epoch]:
        """Epochs that have a manifest, readable or not, ascending. Epochs with a tombstone have none."""
        ...

    def load_manifest(self, epoch: Epoch) -> Manifest:
        """Raises DamagedRecordError if the manifest is missing or unreadable."""
        ...

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        """The operators that have stored a record for an epoch, even if no record is readable."""
        ...

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        """Raises DamagedRecordError if the record is missing, unreadable, or not the one that the manifest names."""
        ...

    def damage(self, record: OperatorRecord) -> list[str]:
        """Human-readable problems of the stored files of a record; empty when every byte is as written."""
        ...

    # ---- collecting
    def collect(
        self, released: Collection[Epoch], open_from: Epoch, check_fence: Callable[[], None] = lambda: None
    ) -> Sequence[Epoch]:
        """Delete these checkpoints, and all content that no other complete or pending one needs; returns those deleted.

        The caller names the epochs to delete, not those to keep: another epoch may complete at any moment. Epochs from
        ``open_from`` on may be in progress, and what they have stored so far stays. ``check_fence`` raises when another
        process has taken over: content that the new process has stored and not yet bound to an epoch must stay.
        """
        ...

    def collect_unreferenced(
        self, open_from: Epoch, may_go: Callable[[str, Path], bool], check_fence: Callable[[], None] = lambda: None
    ) -> None:
        """Delete what no checkpoint needs and ``collect`` has not reached, if ``may_go`` returns True for it.

        ``may_go`` gets ("record" or "blob", file): records that no manifest names, of epochs below ``open_from`` (the
        others may be in progress), and content that neither a complete nor an open epoch references. Raises
        DamagedRecordError instead of guessing.
        """
        ...
