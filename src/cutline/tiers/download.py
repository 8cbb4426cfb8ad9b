"""Brings checkpoints back from an object store into a flow's folder."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cutline.base import durable, records
from cutline.errors import MissingObject
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.ports import Manifest, ObjectStore, OperatorRecord
from cutline.tiers.checkpoint_files import blobs_of, entry_paths, record_paths, segments_of
from cutline.tiers.executor_transfer import PARALLELISM, Carrier
from cutline.tiers.transfer import FETCH, Carried, File, fetch_file, sha256_of

_RECORD = "operator"


class Fetching:
    """May be killed anywhere and done again: what is there and whole is left alone."""

    def __init__(self, store: ObjectStore, layout: Layout, carrier: Carrier) -> None:
        self._store = store
        self._layout = layout
        self._carrier = carrier

    def fetch_records(self) -> list[Epoch]:
        """Bring what is small into the flow's folder: who it is, its generations, every checkpoint's records.

        Manifests last: killed on the way, no checkpoint is there without its records. Returns the epochs.
        """
        # Generations are listed last: each is there before any checkpoint of it.
        names = [info.path for folder in ("checkpoints", "generations") for info in self._store.walk(folder)]
        manifests = [name for name in names if name.endswith("/manifest.json")]
        # Records of checkpoints that were let go of may lie there for a while yet: they are not worth a request each.
        whole = {name.rpartition("/")[0] for name in manifests} | {"generations"}
        small = [name for name in names if name.rpartition("/")[0] in whole and not name.endswith("/manifest.json")]
        with ThreadPoolExecutor(PARALLELISM) as pool:
            for some in (["flow.json", *small], manifests):
                list(pool.map(self._fetch_small, some))
        epochs = (Epoch(int(name.split("/")[1])) for name in manifests)
        return sorted(epoch for epoch in epochs if self._layout.manifest(epoch).exists())

    def _fetch_small(self, name: str) -> None:
        target = self._layout.root / name
        if target.exists() and records.is_whole(target.read_bytes()):
            return
        durable.make_dir(target.parent)
        with contextlib.suppress(MissingObject):  # collected meanwhile
            durable.replace(target, self._store.read(name))

    def fetch_content(self, manifest: Manifest) -> int:
        """Bring all that a restore to this epoch reads; what is there and whole is left alone. Returns bytes fetched.

        Blobs are checked against their names. Raises DamagedRecordError or StoreError.
        """
        blobs = {
            file.sha256: file.size_bytes
            for path in record_paths(manifest, self._layout).values()
            for file in blobs_of(records.load(_RECORD, path, OperatorRecord))
        }
        missing = [
            File(self._name(self._layout.blob(digest)), size_bytes)
            for digest, size_bytes in blobs.items()
            if not self._is_whole(digest, size_bytes)
        ]
        fetched = self._fetch_content(missing)
        # Only now: entries of a checkpoint that turns out to be damaged would leave holes in the flow's logs.
        with ThreadPoolExecutor(PARALLELISM) as pool:
            fetched += pool.map(self._fetch_entry, entry_paths(manifest, self._layout))
        fetched += self._fetch_content(
            [
                File(self._name(folder / segment.name), segment.size_bytes)
                for folder, segments in map(segments_of, entry_paths(manifest, self._layout))
                for segment in segments
            ]
        )
        return sum(one.file.size_bytes for one in fetched)

    def _fetch_content(self, files: list[File]) -> list[Carried]:
        fetched: list[Carried] = []
        self._carrier.carry(FETCH, files, lambda carried, _: fetched.append(carried))
        return fetched

    def _fetch_entry(self, path: Path) -> Carried:
        return fetch_file(self._store, self._layout.root, self._name(path))

    def _is_whole(self, digest: str, size_bytes: int) -> bool:
        path = self._layout.blob(digest)
        return path.exists() and path.stat().st_size == size_bytes and sha256_of(path) == digest

    def _name(self, path: Path) -> str:
        return path.relative_to(self._layout.root).as_posix()
