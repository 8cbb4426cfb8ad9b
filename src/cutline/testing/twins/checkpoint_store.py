"""Checkpoints in memory."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from cutline.base import records
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile, SubtaskRecord, Tombstone
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.ports.checkpoint_store import HeldFiles, StoredRecord
from cutline.ports.query_dir import FileSet
from cutline.protocol.history.retention import unreachable

_Key = tuple[Epoch, OperatorId, Generation]


class MemoryCheckpointStore:
    """See ``cutline.ports.checkpoint_store`` for what each method promises."""

    def __init__(self, read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        """``read`` returns the content of a file in a query's directory; raises FileNotFoundError."""
        self._read = read
        self._lock = threading.RLock()
        self.blobs: dict[str, bytes] = {}
        self.held: dict[tuple[Epoch, OperatorId], dict[str, bytes]] = {}
        self.verdicts: dict[Epoch, Manifest | Tombstone] = {}
        self.records: dict[_Key, StoredRecord] = {}
        #: Reference counts of the content that each pending epoch references.
        self._referenced: dict[Epoch, Counter[str]] = {}

    # ------------------------------------------------------------------ taking a snapshot

    def hold(self, operator: OperatorId, epoch: Epoch, spark_checkpoint_dir: Path, files: FileSet) -> HeldFiles:
        try:
            content = {name: self._read(spark_checkpoint_dir / name) for name in files.names()}
        except FileNotFoundError as error:
            raise DamagedRecordError("a file of the snapshot is gone", operator=operator) from error
        self.held[epoch, operator] = content
        return HeldFiles(
            operator=operator, epoch=epoch, files=files, paths={name: spark_checkpoint_dir / name for name in content}
        )

    def store_files(self, held: HeldFiles) -> tuple[list[SubtaskRecord], list[SnapshotFile]]:
        with self._lock:
            content = self.held.pop((held.epoch, held.operator))
            referenced = self._referenced.setdefault(held.epoch, Counter())

            def keep(name: str) -> tuple[SnapshotFile, int]:
                data = content[name]
                digest = hashlib.sha256(data).hexdigest()
                new_bytes = 0 if digest in self.blobs else len(data)
                self.blobs[digest] = data
                referenced[digest] += 1
                return SnapshotFile(path=name, sha256=digest, size_bytes=len(data)), new_bytes

            subtasks = []
            for subtask, names in sorted(held.files.subtasks.items()):
                kept = [keep(name) for name in names]
                files = [file for file, _ in kept]
                subtasks.append(
                    SubtaskRecord(
                        subtask=subtask,
                        files=files,
                        size_bytes=sum(file.size_bytes for file in files),
                        new_bytes=sum(new for _, new in kept),
                    )
                )
            return subtasks, sorted(keep(name)[0] for name in held.files.shared)

    def store_record(self, record: OperatorRecord) -> StoredRecord:
        with self._lock:
            stored = StoredRecord(record, records.checksum(records.encode("operator", record)))
            return self.records.setdefault((record.epoch, record.operator, record.generation), stored)

    def find_record(self, epoch: Epoch, operator: OperatorId, generation: Generation) -> StoredRecord | None:
        with self._lock:
            stored = self.records.get((epoch, operator, generation))
            if stored is not None:
                self._referenced.setdefault(epoch, Counter()).update(_content(stored.record))
            return stored

    # ------------------------------------------------------------------ ending an epoch

    def store_manifest(self, manifest: Manifest) -> Manifest | Tombstone:
        with self._lock:
            there = self.verdicts.setdefault(manifest.epoch, manifest)
            if isinstance(there, Manifest):
                self._referenced.pop(manifest.epoch, None)
            return there

    def store_tombstone(self, tombstone: Tombstone) -> Manifest | Tombstone:
        with self._lock:
            return self.verdicts.setdefault(tombstone.epoch, tombstone)

    def discard(self, epoch: Epoch) -> None:
        with self._lock:
            if not isinstance(self.verdicts.get(epoch), Manifest):
                self._remove_records(epoch)
                for key in [key for key in self.held if key[0] == epoch]:
                    del self.held[key]
            self._referenced.pop(epoch, None)

    # ------------------------------------------------------------------ reading

    def epochs(self) -> list[Epoch]:
        with self._lock:
            return sorted(epoch for epoch, there in self.verdicts.items() if isinstance(there, Manifest))

    def load_manifest(self, epoch: Epoch) -> Manifest:
        there = self.verdicts.get(epoch)
        if not isinstance(there, Manifest):
            raise DamagedRecordError("there is no manifest", epoch=epoch)
        return there

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        with self._lock:
            return frozenset(operator for one, operator, _ in self.records if one == epoch)

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        cut = manifest.operators[operator]
        stored = self.records.get((manifest.epoch, operator, cut.generation))
        if stored is None:
            raise DamagedRecordError("operator record is missing", epoch=manifest.epoch, operator=operator)
        if stored.sha256 != cut.record_sha256:
            raise DamagedRecordError(
                "operator record is not the one the manifest names", epoch=manifest.epoch, operator=operator
            )
        return stored.record

    def damage(self, record: OperatorRecord) -> list[str]:
        problems = []
        for file in record.files():
            data = file.content if file.content is not None else self.blobs.get(file.sha256)
            if data is None:
                problems.append(f"{file.path}: blob {file.sha256[:12]} is missing")
            elif hashlib.sha256(data).hexdigest() != file.sha256:
                problems.append(f"{file.path}: blob {file.sha256[:12]} does not match its hash")
        return problems

    def content(self, file: SnapshotFile) -> bytes:
        """The content of a stored file. Raises DamagedRecordError if it is missing."""
        if file.content is not None:
            return file.content
        if file.sha256 not in self.blobs:
            raise DamagedRecordError("a blob is missing", path=file.path)
        return self.blobs[file.sha256]

    # ------------------------------------------------------------------ collecting

    def collect(
        self, released: Collection[Epoch], open_from: Epoch, check_fence: Callable[[], None] = lambda: None
    ) -> Sequence[Epoch]:
        with self._lock:
            gone = []
            for epoch in sorted(set(released).intersection(self.epochs())):
                check_fence()
                self._remove_epoch(epoch)
                gone.append(epoch)
            for epoch in {epoch for epoch, *_ in self.records if epoch < open_from}.difference(self.epochs()):
                self._remove_records(epoch)
            check_fence()
            for digest in self._unreferenced(self._reached()):
                del self.blobs[digest]
            return gone

    def collect_unreferenced(
        self, open_from: Epoch, may_go: Callable[[str, Path], bool], check_fence: Callable[[], None] = lambda: None
    ) -> None:
        with self._lock:
            check_fence()
            for key in sorted(key for key in self.records if key[0] < open_from and not self._is_named(key)):
                if may_go("record", Path(f"checkpoints/{key[0]}/{key[1]}.g{key[2]}")):
                    del self.records[key]
            open_content = [_content(one.record) for key, one in self.records.items() if key[0] >= open_from]
            check_fence()
            for digest in self._unreferenced([*self._reached(), *open_content]):
                if may_go("blob", Path(f"blobs/{digest}")):
                    del self.blobs[digest]

    def _remove_epoch(self, epoch: Epoch) -> None:
        manifest = self.load_manifest(epoch)
        if manifest.is_inherited:
            # The process that began it may still run and try to store its manifest: the tombstone prevents that.
            self.verdicts[epoch] = Tombstone(
                epoch=epoch, generation=Generation(0), reason="it was complete, and collected"
            )
        else:
            del self.verdicts[epoch]
        self._remove_records(epoch)

    def _remove_records(self, epoch: Epoch) -> None:
        for key in [key for key in self.records if key[0] == epoch]:
            del self.records[key]

    def _is_named(self, key: _Key) -> bool:
        there = self.verdicts.get(key[0])
        return (
            isinstance(there, Manifest) and key[1] in there.operators and there.operators[key[1]].generation == key[2]
        )

    def _reached(self) -> list[set[str]]:
        manifests = [self.load_manifest(epoch) for epoch in self.epochs()]
        return [_content(self.load_record(manifest, name)) for manifest in manifests for name in manifest.operators]

    def _unreferenced(self, reached: list[set[str]]) -> set[str]:
        referenced = {digest for counts in self._referenced.values() for digest in counts}
        return unreachable(self.blobs, reached, referenced)


def _content(record: OperatorRecord) -> set[str]:
    return {file.sha256 for file in record.files() if file.content is None}
