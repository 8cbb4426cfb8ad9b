"""Imports a savepoint from a place that is not trusted: exactly the files that its records name, each verified.

Records are decoded first, and what is written is what was decoded. Content is copied, never linked, and checked against
the hash or checksum in the records. Any other file at the place is a reason to refuse it: no export writes such files.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from cutline.base import durable, records
from cutline.base.names import UNTRUSTED, shown
from cutline.base.paths import inside
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths
from cutline.channels.segments import crc32_of
from cutline.errors import DamagedRecordError, MissingObject
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.entries import DataEntry, Segment
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectInfo, ObjectStore
from cutline.tiers.checkpoint_files import blobs_of, record_paths
from cutline.tiers.remote_checkpoints import GENERATION, MANIFEST, is_record
from cutline.tiers.transfer import MOST_PACKED_BYTES, PACKED_SUFFIX, sha256_of, unpacked

T = TypeVar("T")


class _Content(NamedTuple):
    """A file that records name: its size, and what is wrong with it, in memory or on disk."""

    size_bytes: int
    is_whole: Callable[[bytes], bool]
    is_whole_file: Callable[[Path], bool]


class SavepointImport:
    """One import. Nothing of it is a savepoint before the caller writes the card."""

    def __init__(self, source: ObjectStore, card: str, folder: Path, layout: Layout) -> None:
        """``card``: the name of the savepoint's record, which the caller reads. ``folder``: the new savepoint's."""
        self._source = source
        self._card = card
        self._folder = folder
        self._layout = layout
        self._there: dict[str, ObjectInfo] = {}
        #: What the records name, as it is stored, as far as it was found.
        self._named: set[str] = set()

    def run(self, epoch: Epoch) -> Manifest:
        """Copy everything but the card. Raises DamagedRecordError or StoreError; what was copied then remains."""
        self._refuse_odd_files()
        self._there = {info.path: info for info in self._source.walk()}
        self._copy_record("flow.json", "flow", dict[str, Any])
        path = self._layout.name(self._layout.manifest(epoch))
        manifest = self._copy_record(path, MANIFEST, Manifest)
        records.check_identity(MANIFEST, manifest.epoch, epoch, path=path, flow=self._layout.flow)
        content = {**self._copy_records(manifest), **self._copy_entries(manifest)}
        self._copy_generations(manifest)
        chosen = {name: self._stored_as(name) for name in content}
        self._refuse_unnamed({*chosen.values(), *self._named, self._card})
        for name, one in content.items():
            self._copy_content(name, chosen[name], one)
        return manifest

    # ------------------------------------------------------------------ records

    def _copy_records(self, manifest: Manifest) -> dict[str, _Content]:
        """Copies the operators' records; returns the blobs that they name."""
        found: dict[str, _Content] = {}
        for operator, path in record_paths(manifest, self._layout).items():
            name, cut = self._layout.name(path), manifest.operators[operator]
            record = self._copy_record(name, "operator", OperatorRecord, sha256=cut.record_sha256)
            identity = (record.epoch, record.operator, record.generation)
            records.check_identity("operator", identity, (manifest.epoch, operator, cut.generation), path=name)
            for file in blobs_of(record):
                found[self._layout.name(self._layout.blob(file.sha256))] = _blob(file.sha256, file.size_bytes)
        return found

    def _copy_entries(self, manifest: Manifest) -> dict[str, _Content]:
        """Copies the entries of logs; returns the segments that they name."""
        found: dict[str, _Content] = {}
        for path in entry_paths(manifest, self._layout):
            name = self._layout.name(path)
            stored_as = self._stored_as(name)
            data = self._read(stored_as)
            plain = data if stored_as == name else unpacked(data, name)
            entry = codec.check_place(codec.decode(plain, name), name)
            self._write(stored_as, data)
            folder = self._layout.name(codec.data_dir(path.parents[1]))
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                found[f"{folder}/{segment.name}"] = _segment(segment)
        return found

    def _copy_generations(self, manifest: Manifest) -> None:
        for name in sorted(self._there):
            if name.startswith("generations/") and is_record(name):
                record = self._copy_record(name, GENERATION, GenerationRecord)
                expected = self._layout.name(self._layout.generation(record.generation))
                records.check_identity(GENERATION, expected, name, path=name, flow=self._layout.flow)
        if self._layout.name(self._layout.generation(manifest.generation)) not in self._named:
            raise self._refused("the savepoint lacks the record of its generation")

    def _copy_record(self, name: str, kind: str, type_: type[T], *, sha256: str | None = None) -> T:
        data = self._read(name)
        if sha256 is not None and records.checksum(data) != sha256:
            raise self._refused("operator record is not the one the manifest names", path=name)
        record = records.decode(kind, data, type_, path=name, flow=self._layout.flow)
        self._write(name, data)
        return record

    def _read(self, name: str) -> bytes:
        try:
            return self._source.read(name, records.MOST_BYTES)
        except MissingObject as error:
            raise self._refused("the savepoint lacks a file that its records name", path=name) from error

    def _write(self, name: str, data: bytes) -> None:
        target = self._target(name)
        durable.replace(target, data)
        self._named.add(name)

    # ------------------------------------------------------------------ content

    def _copy_content(self, name: str, stored_as: str, content: _Content) -> None:
        if stored_as != name:
            packed = self._source.read(stored_as, MOST_PACKED_BYTES)
            plain = unpacked(packed, name)
            if len(plain) != content.size_bytes or not content.is_whole(plain):
                raise self._refused("a file of the savepoint is not the one that its records name", path=name)
            self._write(stored_as, packed)
            return
        if self._there[name].size_bytes != content.size_bytes:
            raise self._refused("a file of the savepoint does not have its recorded size", path=name)
        target = self._target(name)
        self._source.download(name, target)
        if target.stat().st_size != content.size_bytes or not content.is_whole_file(target):
            raise self._refused("a file of the savepoint is not the one that its records name", path=name)

    def _stored_as(self, name: str) -> str:
        for stored_as in (name, name + PACKED_SUFFIX):
            if stored_as in self._there:
                return stored_as
        raise self._refused("the savepoint lacks a file that its records name", path=name)

    def _target(self, name: str) -> Path:
        target = inside(self._folder, name, flow=self._layout.flow)
        durable.make_dir(target.parent)
        return target

    # ------------------------------------------------------------------ refusing

    def _refuse_unnamed(self, named: set[str]) -> None:
        if unnamed := sorted(self._there.keys() - named):
            raise self._refused("the savepoint holds a file that its records do not name", path=shown(unnamed[0]))

    def _refuse_odd_files(self) -> None:
        """In a folder: links, pipes, devices. A hard link is a file that another program may still change."""
        parts = urlsplit(self._source.url)
        folders = [unquote(parts.path)] if parts.scheme == "file" else []
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
                    elif not stat.S_ISREG(status.st_mode):
                        raise self._refused("the savepoint holds something that is no plain file", path=entry.path)
                    elif status.st_nlink > 1:
                        raise self._refused("a file of the savepoint has a second name (hard link)", path=entry.path)

    def _refused(self, what: str, **where: object) -> DamagedRecordError:
        return DamagedRecordError(what, next_step=UNTRUSTED, flow=self._layout.flow, place=self._source.url, **where)


def _blob(sha256: str, size_bytes: int) -> _Content:
    return _Content(
        size_bytes, lambda data: hashlib.sha256(data).hexdigest() == sha256, lambda path: sha256_of(path) == sha256
    )


def _segment(segment: Segment) -> _Content:
    return _Content(
        segment.size_bytes,
        lambda data: zlib.crc32(data) == segment.crc32,
        lambda path: crc32_of(path) == segment.crc32,
    )
