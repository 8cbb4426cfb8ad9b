"""Finds the state files that make up version V of every store of a query.

Spark keeps one folder per operator and partition (= subtask), ``state/<operator>/<partition>/``; an operator with
several stores per partition (a stream-stream join) has a folder below it for each. A store's version is a chain: the
newest snapshot at or below V, and the changes of every version after it. Every batch writes a version in every
partition, also a batch without data and a partition without rows.

| backend | snapshot | changes |
|---|---|---|
| RocksDB | ``V.zip``, which names files in ``SSTs/`` and ``logs/`` | ``V.changelog`` |
| HDFS-backed | ``V.snapshot`` | ``V.delta`` |

State format 2 names the files ``V_<unique id>.…``: failed attempts leave other ids behind, and only one is right.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable

import msgspec

from cutline.base.names import are_relative
from cutline.model.ids import BatchId
from cutline.spark_dir.changelog import read_lineage
from cutline.spark_dir.offsets import Commit, CommitLog, Offsets, damaged

#: Folders of a store that are not stores themselves.
_SSTS, _LOGS, _METADATA, _SCHEMA = "SSTs", "logs", "_metadata", "_stateSchema"
_STATE_SUFFIXES = (".zip", ".changelog", ".snapshot", ".delta")
_PARTITIONS_CONF = "spark.sql.shuffle.partitions"
#: A look-up costs about 1 µs on a local disk, listing a folder 0.5 µs per entry.
_LOOKUPS_BEFORE_LISTING = 64
#: It names tables, about 100 bytes each. A zip can promise to unpack to any size.
_MOST_METADATA_BYTES = 64 << 20


class SstFile(msgspec.Struct, frozen=True, rename="camel"):
    """A table of RocksDB that a snapshot uses."""

    dfs_sst_file_name: str
    size_bytes: int


class LogFile(msgspec.Struct, frozen=True, rename="camel"):
    """An archived write-ahead log of RocksDB that a snapshot uses."""

    dfs_log_file_name: str
    size_bytes: int


class _SnapshotHead(msgspec.Struct, frozen=True, rename="camel"):
    sst_files: list[SstFile] = []
    log_files: list[LogFile] | None = None


_SNAPSHOT_HEAD = msgspec.json.Decoder(_SnapshotHead)

#: Errors that reading a damaged zip can raise beside OSError.
UNREADABLE_SNAPSHOT = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    msgspec.MsgspecError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


def snapshot_parts(path: str) -> dict[str, int]:
    """The files that a RocksDB snapshot (zip) needs beside itself, relative to its folder, with their sizes.

    Raises OSError or one of UNREADABLE_SNAPSHOT.
    """
    with zipfile.ZipFile(path) as archive:
        if archive.getinfo("metadata").file_size > _MOST_METADATA_BYTES:
            raise ValueError("the metadata of a snapshot is too large")
        _, _, body = archive.read("metadata").partition(b"\n")
    head = _SNAPSHOT_HEAD.decode(body)
    names = [file.dfs_sst_file_name for file in head.sst_files]
    names += [file.dfs_log_file_name for file in head.log_files or ()]
    if not are_relative(names) or "/" in "".join(names):
        raise ValueError("a snapshot names a file outside of its folder")
    parts = {f"{_SSTS}/{file.dfs_sst_file_name}": file.size_bytes for file in head.sst_files}
    parts.update({f"{_LOGS}/{file.dfs_log_file_name}": file.size_bytes for file in head.log_files or ()})
    return parts


class StateClosure:
    """Collects the state files of one batch; call ``collect`` once, then read ``subtasks`` and ``shared``."""

    def __init__(self, root: str, batch: BatchId, commits: CommitLog, offsets: Offsets) -> None:
        self._root = root
        self._batch = batch
        self._version = batch + 1
        self._commits = commits
        self._offsets = offsets
        #: State files by partition.
        self.subtasks: dict[int, list[str]] = {}
        #: Schemas and operator metadata.
        self.shared: list[str] = []

    def collect(self) -> None:
        """Find all state files. Raises DamagedRecordError if a file of a chain is missing."""
        unique_ids = self._commits.load(self._batch).state_unique_ids
        if unique_ids is None:
            for operator in self._operators():
                self._collect_operator(operator, dict.fromkeys(self._partitions(operator)))
        else:
            for operator, partitions in unique_ids.items():
                self._collect_operator(operator, dict(enumerate(partitions)))

    def _collect_operator(self, operator: str, partitions: dict[int, list[str] | None]) -> None:
        base = f"state/{operator}"
        self._add_shared(f"{base}/{_METADATA}")
        self._add_shared(f"{base}/{_SCHEMA}")
        for partition, unique_ids in partitions.items():
            files = self.subtasks.setdefault(partition, [])
            if unique_ids is None:
                for store in self._stores(f"{base}/{partition}"):
                    files += self._chain(store, lambda _: None)
            else:
                for store, unique_id in self._owners(f"{base}/{partition}", unique_ids):
                    known = {self._version: unique_id}
                    files += self._chain(store, _UniqueIds(store, operator, partition, known, self._commits).of)

    # ------------------------------------------------------------------ operators, partitions, stores

    def _operators(self) -> Iterable[str]:
        """Format 1: every operator that has a folder."""
        try:
            return sorted(name for name in os.listdir(f"{self._root}/state") if name.isdigit())
        except FileNotFoundError:
            return ()

    def _partitions(self, operator: str) -> list[int]:
        """Format 1: the partitions in use. Shrinking the query leaves folders with higher numbers behind."""
        path = f"{self._root}/state/{operator}"
        found = {int(name) for name in os.listdir(path) if name.isdigit()}
        count = int(self._offsets.conf.get(_PARTITIONS_CONF, len(found)))
        if found == {0}:
            # An operator over all rows (an aggregation without keys) has one partition with any setting.
            return [0]
        for partition in range(count):
            if partition not in found:
                raise damaged("a state partition is missing", f"{path}/{partition}", self._batch)
        return list(range(count))

    def _stores(self, folder: str) -> list[_Store]:
        """Format 1: all stores of a partition, the one in its own folder and those below it."""
        own = self._open(folder)
        stores = [own, *self._inner_stores(own)] if own.has_state() else self._inner_stores(own)
        if not stores:
            raise damaged("a state partition holds no state", own.path, self._batch)
        return stores

    def _owners(self, folder: str, unique_ids: list[str]) -> Iterable[tuple[_Store, str]]:
        """Format 2: the store that each of a partition's unique ids belongs to."""
        stores = [self._open(folder)]
        for unique_id in unique_ids:
            owner = next((store for store in stores if store.has_version(self._version, unique_id)), None)
            if owner is None and len(stores) == 1:
                stores += self._inner_stores(stores[0])
                owner = next((store for store in stores if store.has_version(self._version, unique_id)), None)
            if owner is None:
                path = f"{self._root}/{folder}/**/{self._version}_{unique_id}.*"
                raise damaged("a state file is missing", path, self._batch)
            yield owner, unique_id

    def _inner_stores(self, store: _Store) -> list[_Store]:
        names = (name for name in store.folders() if name not in (_SSTS, _LOGS, _METADATA))
        return [self._open(f"{store.folder}/{name}") for name in sorted(names)]

    def _open(self, folder: str) -> _Store:
        self._add_shared(f"{folder}/{_METADATA}")
        return _Store(self._root, folder, self._batch)

    def _add_shared(self, folder: str) -> None:
        """Everything below a metadata folder, except the files of later batches."""
        for path, name in walk_files(self._root, folder):
            # Operator metadata of version 2 is written once per run, named by the run's first batch.
            is_later = name.isdigit() and int(name) > self._batch
            if not is_later:
                self.shared.append(f"{path}/{name}")

    # ------------------------------------------------------------------ the chain

    def _chain(self, store: _Store, unique_id_of: Callable[[int], str | None]) -> list[str]:
        """The files of the store's version, newest first, back to a snapshot or to the empty store (version 0)."""
        files: list[str] = []
        for version in range(self._version, 0, -1):
            stem = _stem(version, unique_id_of(version))
            if store.has(f"{stem}.zip"):
                return [*files, f"{store.folder}/{stem}.zip", *self._parts(store, f"{stem}.zip")]
            if store.has(f"{stem}.snapshot"):
                return [*files, f"{store.folder}/{stem}.snapshot"]
            for suffix in (".changelog", ".delta"):
                if store.has(stem + suffix):
                    files.append(f"{store.folder}/{stem}{suffix}")
                    break
            else:
                raise damaged("a state file is missing", f"{store.path}/{stem}.*", self._batch)
        return files

    def _parts(self, store: _Store, name: str) -> list[str]:
        path = f"{store.path}/{name}"
        try:
            return [f"{store.folder}/{part}" for part in snapshot_parts(path)]
        except (OSError, *UNREADABLE_SNAPSHOT) as error:
            raise damaged("a state snapshot cannot be read", path, self._batch) from error


class _Store:
    """The folder of one store.

    A short chain is looked up name by name; only a long one is worth listing the folder, which holds four files
    (checksums included) for every version that Spark retains.
    """

    def __init__(self, root: str, folder: str, batch: BatchId) -> None:
        self.path = f"{root}/{folder}"
        #: Relative to the spark_checkpoint_dir.
        self.folder = folder
        #: The batch whose closure is being computed, for errors.
        self.batch = batch
        self._names: set[str] | None = None
        self._lookups = 0

    def has(self, name: str) -> bool:
        if self._names is None and self._lookups < _LOOKUPS_BEFORE_LISTING:
            self._lookups += 1
            return os.access(f"{self.path}/{name}", os.F_OK)
        return name in self._list()

    def has_version(self, version: int, unique_id: str) -> bool:
        stem = _stem(version, unique_id)
        return self.has(f"{stem}.changelog") or self.has(f"{stem}.zip")

    def has_state(self) -> bool:
        return any(name.endswith(_STATE_SUFFIXES) for name in self._list())

    def candidates(self, version: int) -> set[str]:
        """The unique ids that exist for this version, right or wrong."""
        prefix = f"{version}_"
        mine = (name for name in self._list() if name.startswith(prefix) and name.endswith(_STATE_SUFFIXES))
        return {name.removeprefix(prefix).rpartition(".")[0] for name in mine}

    def folders(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
        except FileNotFoundError as error:
            raise damaged("a state folder is missing", self.path, self.batch) from error

    def _list(self) -> set[str]:
        if self._names is None:
            try:
                self._names = set(os.listdir(self.path))
            except FileNotFoundError as error:
                raise damaged("a state folder is missing", self.path, self.batch) from error
        return self._names


class _UniqueIds:
    """Format 2: the unique id of each version of one store. Ask from the newest version downwards.

    The commit of the batch that wrote the version contains it. Spark purges old commits, and a restored directory never
    had them: then the next version's changelog names its ancestors. Otherwise there must be only one candidate.
    """

    def __init__(self, store: _Store, operator: str, partition: int, known: dict[int, str], commits: CommitLog) -> None:
        self._store = store
        self._operator = operator
        self._partition = partition
        self._commits = commits
        #: Determined ids, by version.
        self._known = known
        #: Ids of ancestors named by changelogs, by version.
        self._lineage: dict[int, str] = {}

    def of(self, version: int) -> str:
        if version not in self._known:
            self._known[version] = self._committed(version) or self._inherited(version) or self._only(version)
        return self._known[version]

    def _committed(self, version: int) -> str | None:
        commit = self._commits.find(version - 1)
        listed = None if commit is None else _ids_of(commit, self._operator, self._partition)
        if listed is None:
            return None
        for unique_id in listed:
            if self._store.has_version(version, unique_id):
                return unique_id
        raise self._damaged("a state file is missing", version)

    def _inherited(self, version: int) -> str | None:
        if version not in self._lineage:
            # The chain continues below version + 1, so that version is a changelog, not a snapshot.
            child = _stem(version + 1, self._known[version + 1])
            self._lineage.update(read_lineage(f"{self._store.path}/{child}.changelog") or {})
        return self._lineage.get(version)

    def _only(self, version: int) -> str:
        candidates = self._store.candidates(version)
        if len(candidates) != 1:
            what = "several attempts at a state version and no record of the right one"
            raise self._damaged(what if candidates else "a state file is missing", version)
        return candidates.pop()

    def _damaged(self, what: str, version: int) -> Exception:
        return damaged(what, f"{self._store.path}/{version}_*", self._store.batch)


def _stem(version: int, unique_id: str | None) -> str:
    return str(version) if unique_id is None else f"{version}_{unique_id}"


def _ids_of(commit: Commit, operator: str, partition: int) -> list[str] | None:
    partitions = (commit.state_unique_ids or {}).get(operator)
    return None if partitions is None or partition >= len(partitions) else partitions[partition]


def walk_files(root: str, folder: str) -> Iterable[tuple[str, str]]:
    """(folder, name) of every file below a folder, without checksums and temporary files; nothing if it is missing."""
    try:
        with os.scandir(f"{root}/{folder}") as entries:
            found = [entry for entry in entries if entry.name[0] != "." and not entry.name.endswith(".crc")]
    except FileNotFoundError:
        return
    for entry in found:
        if entry.is_dir():
            yield from walk_files(root, f"{folder}/{entry.name}")
        else:
            yield folder, entry.name
