"""The parts of a checkpoint beside its manifest: records, blobs, and the part of every log that a restore reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from cutline.base import records
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths, segments_of
from cutline.errors import MissingObject
from cutline.model.checkpoint import Manifest, OperatorRecord, SnapshotFile
from cutline.model.entries import DataEntry, Entry
from cutline.model.ids import OperatorId
from cutline.model.layout import Layout
from cutline.ports.objects import ObjectStore
from cutline.tiers.transfer import PACKED_SUFFIX, unpacked

_RECORD = "operator"


def record_paths(manifest: Manifest, layout: Layout) -> dict[OperatorId, Path]:
    """By operator; the manifest's name was checked when it was decoded."""
    return {name: layout.record(manifest.epoch, name, cut.generation) for name, cut in manifest.operators.items()}


def blobs_of(record: OperatorRecord) -> Iterator[SnapshotFile]:
    """The files whose content is not in the record itself."""
    return (file for file in record.files() if file.content is None)


def content_paths(
    manifest: Manifest, layout: Layout, operators: Collection[OperatorId] | None = None
) -> Iterator[Path]:
    """Blobs, in-flight entries with their segments, and barriers; ``operators``: of these only. May repeat paths."""
    for name, path in record_paths(manifest, layout).items():
        if operators is None or name in operators:
            yield from (layout.blob(file.sha256) for file in blobs_of(records.load(_RECORD, path, OperatorRecord)))
    for entry_path in entry_paths(manifest, layout, operators):
        folder, segments = segments_of(entry_path)
        yield from (folder / segment.name for segment in segments)
        yield entry_path


def names_in(store: ObjectStore, manifest: Manifest, layout: Layout) -> Iterator[str]:
    """The same files and the records, by their names in an object store. Reads only the store."""
    for path in record_paths(manifest, layout).values():
        name = layout.name(path)
        yield name
        record = records.decode(_RECORD, store.read(name, records.MOST_BYTES), OperatorRecord, path=name)
        yield from (layout.name(layout.blob(file.sha256)) for file in blobs_of(record))
    for path in entry_paths(manifest, layout):
        name = layout.name(path)
        yield name
        entry = _read_entry(store, name)
        folder = layout.name(codec.data_dir(path.parents[1]))
        yield from (f"{folder}/{one.name}" for one in (entry.segments if isinstance(entry, DataEntry) else ()))


def _read_entry(store: ObjectStore, name: str) -> Entry:
    try:
        data = unpacked(store.read(name + PACKED_SUFFIX, records.MOST_BYTES), name)
    except MissingObject:
        data = store.read(name, records.MOST_BYTES)
    return codec.check_place(codec.decode(data, name), name)
