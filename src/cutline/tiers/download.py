"""Downloads checkpoints from an object store into a flow's folder: records, then content."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cutline.base import durable, records
from cutline.base.paths import inside
from cutline.channels.in_flight import entry_paths, segments_of
from cutline.errors import MissingObject
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.tiers.checkpoint_files import blobs_of, record_paths
from cutline.tiers.driver_transfer import PARALLELISM, Transfer
from cutline.tiers.remote_checkpoints import epoch_of_manifest, is_record
from cutline.tiers.transfer import DOWNLOAD, File, Transferred, download_file, sha256_of

_RECORD = "operator"
_ENTRIES_AT_ONCE = 1_000

OnBytes = Callable[[int], None]


class Downloader:
    """A download may be killed at any point and repeated: files that are here and whole are not downloaded again."""

    def __init__(self, store: ObjectStore, layout: Layout, transfer: Transfer) -> None:
        self._store = store
        self._layout = layout
        self._transfer = transfer

    def download_records(self, *, with_manifests: bool = True) -> list[Epoch]:
        """Download the small files into the flow's folder: identity, generations, every checkpoint's records.

        Manifests come last: after a kill, no checkpoint is here without its records. Returns the epochs.
        ``with_manifests``: without them no checkpoint exists here, so their content can be downloaded first.
        """
        # Generations are listed last: each generation is stored before any of its checkpoints.
        walked = [info.path for folder in ("checkpoints", "generations") for info in self._store.walk(folder)]
        # Objects with other names belong to other programs, or to no one.
        names = [name for name in walked if is_record(name)]
        manifests = {name: epoch for name in names if (epoch := epoch_of_manifest(name)) is not None}
        # Records of collected checkpoints may remain for a while: they are not worth a request each.
        whole = {name.rpartition("/")[0] for name in manifests} | {"generations"}
        small = [name for name in names if name.rpartition("/")[0] in whole and name not in manifests]
        with ThreadPoolExecutor(PARALLELISM) as pool:
            for some in (["flow.json", *small], list(manifests) if with_manifests else []):
                list(pool.map(self._download_small, some))
        return sorted(epoch for epoch in manifests.values() if self._layout.manifest(epoch).exists())

    def _download_small(self, name: str) -> None:
        target = inside(self._layout.root, name, flow=self._layout.flow)
        if target.exists() and records.is_whole(target.read_bytes()):
            return
        durable.make_dir(target.parent)
        with contextlib.suppress(MissingObject):  # collected meanwhile
            durable.replace(target, self._store.read(name, records.MOST_BYTES))

    def download_content(self, manifest: Manifest, on_bytes: OnBytes = lambda size_bytes: None) -> int:
        """Download all files that a restore to this epoch reads, except those that are here and whole.

        ``on_bytes`` is called with the size of every large file that has arrived, on any thread.
        Checks blobs against their names. Returns the bytes downloaded. Raises DamagedRecordError or StoreError.
        """
        blobs = {
            file.sha256: file.size_bytes
            for path in record_paths(manifest, self._layout).values()
            for file in blobs_of(records.load(_RECORD, path, OperatorRecord, flow=self._layout.flow))
        }
        missing = [
            File(self._name(self._layout.blob(digest)), size_bytes)
            for digest, size_bytes in blobs.items()
            if not self._is_whole(digest, size_bytes)
        ]
        downloaded = self._download_files(missing, on_bytes)
        # Only after the blobs: the entries of a checkpoint that proves damaged would leave gaps in the flow's logs.
        paths = entry_paths(manifest, self._layout)
        with ThreadPoolExecutor(PARALLELISM) as pool:
            # A few at a time: whether there are as many as the manifest says is known only when they have arrived.
            while some := list(itertools.islice(paths, _ENTRIES_AT_ONCE)):
                downloaded += pool.map(self._download_entry, some)
        downloaded += self._download_files(
            [
                File(self._name(folder / segment.name), segment.size_bytes)
                for folder, segments in map(segments_of, entry_paths(manifest, self._layout))
                for segment in segments
            ],
            on_bytes,
        )
        return sum(one.file.size_bytes for one in downloaded)

    def _download_files(self, files: list[File], on_bytes: OnBytes) -> list[Transferred]:
        downloaded: list[Transferred] = []

        def arrived(transferred: Transferred, _: float) -> None:
            downloaded.append(transferred)
            on_bytes(transferred.file.size_bytes)

        self._transfer.run(DOWNLOAD, files, arrived)
        return downloaded

    def _download_entry(self, path: Path) -> Transferred:
        return download_file(self._store, self._layout.root, self._name(path))

    def _is_whole(self, digest: str, size_bytes: int) -> bool:
        path = self._layout.blob(digest)
        return path.exists() and path.stat().st_size == size_bytes and sha256_of(path) == digest

    def _name(self, path: Path) -> str:
        return self._layout.name(path)
