"""One file of a flow's folder, to an object store and back; the same in the driver's threads and in executors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cutline.base import durable
from cutline.errors import DamagedRecordError, MissingObject
from cutline.ports.objects import ObjectStore

#: Larger files are sent in parts as they are; smaller ones fit into memory, and are packed if that pays.
_PACKED_BYTES = 32 << 20
_SMALL_BYTES = 4 << 10
PACKED_SUFFIX = ".zst"
#: Packing pays if it saves a fifth.
_PAYS = 0.8
_BLOBS = "blobs/"


class File(NamedTuple):
    """A file that is to be carried."""

    #: Relative to the flow's folder, with slashes; what is packed has a suffix more in the store.
    name: str
    size_bytes: int


class Carried(NamedTuple):
    """A file that was carried."""

    file: File
    #: The object's name and size in the store.
    stored_as: str
    stored_bytes: int


class Errand(NamedTuple):
    """What is done with each file. Both are functions of a module: they travel to executors by their names."""

    #: Raises StoreError, DamagedRecordError, or OSError if the file cannot be read or written.
    carry: Callable[[ObjectStore, Path, File], Carried]
    #: Whether what somebody else says it has carried has arrived, as seen from here. Raises StoreError.
    has_arrived: Callable[[ObjectStore, Path, Carried], bool]


def _send(store: ObjectStore, root: Path, file: File) -> Carried:
    """Checked first, as far as can be: what is rotten here, or another file, must not be taken for safe there."""
    path = root / file.name
    if path.stat().st_size != file.size_bytes:
        raise DamagedRecordError("a file of the checkpoint has not the size it should have", path=file.name)
    if file.size_bytes > _PACKED_BYTES:
        _check_name(file.name, sha256_of(path), where="here")
        store.upload(file.name, path)
        return Carried(file, file.name, file.size_bytes)
    content = path.read_bytes()
    _check_name(file.name, hashlib.sha256(content).hexdigest(), where="here")
    packed = _packed(content)
    if packed is not None:
        store.replace(file.name + PACKED_SUFFIX, packed)
        return Carried(file, file.name + PACKED_SUFFIX, len(packed))
    store.replace(file.name, content)
    return Carried(file, file.name, len(content))


def _is_sent(store: ObjectStore, _: Path, carried: Carried) -> bool:
    found = store.find(carried.stored_as)
    return found is not None and found.size_bytes == carried.stored_bytes


def fetch_file(store: ObjectStore, root: Path, name: str) -> Carried:
    """Whole and synced when it returns; replaces what is there."""
    path = root / name
    durable.make_dir(path.parent)
    stored_as = name + PACKED_SUFFIX
    try:
        packed = store.read(stored_as)
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
    return Carried(File(name, path.stat().st_size), stored_as, stored_bytes)


def _fetch(store: ObjectStore, root: Path, file: File) -> Carried:
    """A blob is checked against its name, whatever is not one against its size."""
    path = root / file.name
    carried = fetch_file(store, root, file.name)
    try:
        _check_name(file.name, sha256_of(path), where="in the remote tier")
        if carried.file != file:
            raise DamagedRecordError("a file in the remote tier has not the size it should have", path=file.name)
    except DamagedRecordError:
        path.unlink()
        raise
    return carried


def _is_fetched(_: ObjectStore, root: Path, carried: Carried) -> bool:
    path = root / carried.file.name
    return path.is_file() and path.stat().st_size == carried.file.size_bytes


SEND = Errand(_send, _is_sent)
FETCH = Errand(_fetch, _is_fetched)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpacked(packed: bytes, name: str) -> bytes:
    """What ``_packed`` was given."""
    try:
        size = int.from_bytes(packed[:8], "little")
        content: bytes = pa.decompress(packed[8:], decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedRecordError("a packed file in the remote tier cannot be read", path=name) from error
    return content


def _packed(content: bytes) -> bytes | None:
    """None when packing does not pay."""
    if len(content) < _SMALL_BYTES:
        return None
    packed = pa.compress(content, codec="zstd", asbytes=True)
    header = len(content).to_bytes(8, "little")
    return header + packed if len(packed) + len(header) <= _PAYS * len(content) else None


def _check_name(name: str, digest: str, *, where: str) -> None:
    """Only blobs say in their names what they hold."""
    if name.startswith(_BLOBS) and digest != name.rpartition("/")[2]:
        raise DamagedRecordError(f"a blob {where} does not match its hash", path=name)
