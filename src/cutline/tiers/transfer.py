"""Transfers one file between a flow's folder and an object store; used by the driver's threads and by executors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cutline.base import durable
from cutline.base.paths import inside
from cutline.errors import DamagedRecordError, MissingObject
from cutline.ports.objects import ObjectStore

#: Larger files are uploaded in parts, uncompressed; smaller ones fit into memory, and are packed if that pays off.
MOST_PACKED_BYTES = 32 << 20
_SMALL_BYTES = 4 << 10
PACKED_SUFFIX = ".zst"
#: Packing pays off if it saves a fifth.
_PAYS = 0.8
_BLOBS = "blobs/"


class File(NamedTuple):
    """A file to transfer."""

    #: Relative to the flow's folder, with slashes; a packed file has an additional suffix in the store.
    name: str
    size_bytes: int


class Transferred(NamedTuple):
    """A file that was transferred."""

    file: File
    #: The object's name and size in the store.
    stored_as: str
    stored_bytes: int


class Direction(NamedTuple):
    """Upload or download. Both functions are module-level: executors receive them by name."""

    #: Raises StoreError, DamagedRecordError, or OSError if the file cannot be read or written.
    transfer: Callable[[ObjectStore, Path, File], Transferred]
    #: Whether a file that an executor reports as transferred has arrived, as the driver sees it. Raises StoreError.
    has_arrived: Callable[[ObjectStore, Path, Transferred], bool]


def _upload(store: ObjectStore, root: Path, file: File) -> Transferred:
    """Checks the file first, as far as possible: a damaged or different file must not count as uploaded."""
    path = inside(root, file.name)
    if path.stat().st_size != file.size_bytes:
        raise DamagedRecordError("a file of the checkpoint does not have its recorded size", path=file.name)
    if file.size_bytes > MOST_PACKED_BYTES:
        _check_name(file.name, sha256_of(path), where="here")
        store.upload(file.name, path)
        return Transferred(file, file.name, file.size_bytes)
    content = path.read_bytes()
    _check_name(file.name, hashlib.sha256(content).hexdigest(), where="here")
    packed = _packed(content)
    if packed is not None:
        store.replace(file.name + PACKED_SUFFIX, packed)
        return Transferred(file, file.name + PACKED_SUFFIX, len(packed))
    store.replace(file.name, content)
    return Transferred(file, file.name, len(content))


def _is_uploaded(store: ObjectStore, _: Path, transferred: Transferred) -> bool:
    found = store.find(transferred.stored_as)
    return found is not None and found.size_bytes == transferred.stored_bytes


def download_file(store: ObjectStore, root: Path, name: str) -> Transferred:
    """Replaces an existing file; the new one is whole and synced when the call returns."""
    path = inside(root, name)
    durable.make_dir(path.parent)
    stored_as = name + PACKED_SUFFIX
    try:
        packed = store.read(stored_as, MOST_PACKED_BYTES)
    except MissingObject:
        stored_as = name
        try:
            store.download(name, path)
        except MissingObject as error:
            raise DamagedRecordError("a file is missing in the remote tier", path=name) from error
        stored_bytes = path.stat().st_size
    else:
        durable.replace(path, unpacked(packed, name))
        stored_bytes = len(packed)
    return Transferred(File(name, path.stat().st_size), stored_as, stored_bytes)


def _download(store: ObjectStore, root: Path, file: File) -> Transferred:
    """Checks a blob against its name, any other file against its size."""
    path = inside(root, file.name)
    transferred = download_file(store, root, file.name)
    try:
        _check_name(file.name, sha256_of(path), where="in the remote tier")
        if transferred.file != file:
            raise DamagedRecordError("a file in the remote tier does not have its recorded size", path=file.name)
    except DamagedRecordError:
        path.unlink()
        raise
    return transferred


def _is_downloaded(_: ObjectStore, root: Path, transferred: Transferred) -> bool:
    path = root / transferred.file.name
    return path.is_file() and path.stat().st_size == transferred.file.size_bytes


UPLOAD = Direction(_upload, _is_uploaded)
DOWNLOAD = Direction(_download, _is_downloaded)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpacked(packed: bytes, name: str) -> bytes:
    """The content that ``_packed`` was given."""
    import pyarrow as pa  # takes a third of a second, and most commands transfer nothing

    try:
        size = int.from_bytes(packed[:8], "little")
        if size > MOST_PACKED_BYTES:
            raise ValueError("only smaller files are packed")
        content: bytes = pa.decompress(packed[8:], decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedRecordError("a packed file in the remote tier cannot be read", path=name) from error
    return content


def _packed(content: bytes) -> bytes | None:
    """None if packing does not pay off."""
    if len(content) < _SMALL_BYTES:
        return None
    import pyarrow as pa

    packed = pa.compress(content, codec="zstd", asbytes=True)
    header = len(content).to_bytes(8, "little")
    return header + packed if len(packed) + len(header) <= _PAYS * len(content) else None


def _check_name(name: str, digest: str, *, where: str) -> None:
    """Only the names of blobs contain their hash."""
    if name.startswith(_BLOBS) and digest != name.rpartition("/")[2]:
        raise DamagedRecordError(f"a blob {where} does not match its hash", path=name)
