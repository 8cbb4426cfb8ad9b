"""Downloads checkpoints from an object store into a flow's folder: records, then content."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cutline.base import durable, records
from cutline.errors import MissingObject
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.tiers.checkpoint_files import blobs_of, entry_paths, record_paths, segments_of
from cutline.tiers.driver_transfer import PARALLELISM, Transfer
from cutline.tiers.transfer import DOWNLOAD, File, Transferred, download_file, sha256_of

_RECORD = "operator"


class Downloader:
    """A download may be killed at any point and repeated: files that are here and whole are not downloaded again."""

    def __init__(self, store: ObjectStore, layout: Layout, transfer: Transfer) -> None:
        self._store = store
        self._layout = layout
        self._transfer = transfer

    def download_records(self) -> list[Epoch]:
        """Download the small files into the flow's folder: identity, generations, every checkpoint's records.

        Manifests come last: after a kill, no checkpoint is here without its records. Returns the epochs.
        """
        # Generations are listed last: each generation is stored before any of its checkpoints.
        names = [info.path for folder in ("checkpoints", "generations") for info in self._store.walk(folder)]
        manifests = [name for name in names if name.endswith("/manifest.json")]
        # Records of collected checkpoints may remain for a while: they are not worth a request each.
        whole = {name.rpartition("/")[0] for name in manifests} | {"generations"}
        small = [name for name in names if name.rpartition("/")[0] in whole and not name.endswith("/manifest.json")]
        with ThreadPoolExecutor(PARALLELISM) as pool:
            for some in (["flow.json", *small], manifests):
                list(pool.map(self._download_small, some))
        epochs = (Epoch(int(name.split("/")[1])) for name in manifests)
        return sorted(epoch for epoch in epochs if self._layout.manifest(epoch).exists())

    def _download_small(self, name: str) -> None:
        target = self._layout.root / name
        if target.exists() and records.is_whole(target.read_bytes()):
            return
        durable.make_dir(target.parent)
        with contextlib.suppress(MissingObject):  # collected meanwhile
            durable.replace(target, self._store.read(name))

    def download_content(self, manifest: Manifest) -> int:
        """Download all files that a restore to this epoch reads, except those that are here and whole.

        Checks blobs against their names. Returns the bytes downloaded. Raises DamagedRecordError or StoreError.
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
        downloaded = self._download_files(missing)
        # Only after the blobs: the entries of a checkpoint that proves damaged would leave gaps in the flow's logs.
        with ThreadPoolExecutor(PARALLELISM) as pool:
            downloaded += pool.map(self._download_entry, entry_paths(manifest, self._layout))
        downloaded += self._download_files(
            [
                File(self._name(folder / segment.name), segment.size_bytes)
                for folder, segments in map(segments_of, entry_paths(manifest, self._layout))
                for segment in segments
            ]
        )
        return sum(one.file.size_bytes for one in downloaded)

    def _download_files(self, files: list[File]) -> list[Transferred]:
        downloaded: list[Transferred] = []
        self._transfer.run(DOWNLOAD, files, lambda transferred, _: downloaded.append(transferred))
        return downloaded

    def _download_entry(self, path: Path) -> Transferred:
        return download_file(self._store, self._layout.root, self._name(path))

    def _is_whole(self, digest: str, size_bytes: int) -> bool:
        path = self._layout.blob(digest)
        return path.exists() and path.stat().st_size == size_bytes and sha256_of(path) == digest

    def _name(self, path: Path) -> str:
        return self._layout.name(path)
