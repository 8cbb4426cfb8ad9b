"""What a checkpoint is made of beside its manifest: records, blobs, and the part of every log that a restore reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from cutline.base import records
from cutline.coordinator.manifests import lineage_of
from cutline.coordinator.retention import needs_of
from cutline.errors import MissingObject
from cutline.model import entries as codec
from cutline.model.entries import DataEntry
from cutline.model.ids import OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports import Manifest, ObjectStore, OperatorRecord, Segment, SnapshotFile
from cutline.protocol.history.retention import EpochNeeds
from cutline.tiers.transfer import PACKED_SUFFIX, unpacked

_RECORD = "operator"


def record_paths(manifest: Manifest, layout: Layout) -> dict[OperatorId, Path]:
    return {name: layout.record(manifest.epoch, name, cut.generation) for name, cut in manifest.operators.items()}


def entry_paths(manifest: Manifest, layout: Layout, operators: Collection[OperatorId] | None = None) -> Iterator[Path]:
    """The entries of every log that a restore reads; ``operators``: of the logs that these write."""
    needs: EpochNeeds = needs_of(manifest)
    for name, cut in manifest.channels.items():
        if operators is not None and name not in operators:
            continue
        lineage = lineage_of(cut.lineage)
        for seq in range(needs.channels[OperatorId(name)], cut.barrier + 1):
            position = Position(seq)
            yield codec.entry_path(layout.channel(name), lineage.owner(position), position)


def segments_of(entry_path: Path) -> tuple[Path, list[Segment]]:
    """The folder of an entry's segments, and which they are."""
    entry = codec.load(entry_path)
    return codec.data_dir(entry_path.parents[1]), entry.segments if isinstance(entry, DataEntry) else []


def blobs_of(record: OperatorRecord) -> Iterator[SnapshotFile]:
    """What is not in the record itself."""
    return (file for file in record.files() if file.content is None)


def content_paths(
    manifest: Manifest, layout: Layout, operators: Collection[OperatorId] | None = None
) -> Iterator[Path]:
    """Blobs, and what is in flight, with its rows, and the barrier; ``operators``: of these only. Some come twice."""
    for name, path in record_paths(manifest, layout).items():
        if operators is None or name in operators:
            yield from (layout.blob(file.sha256) for file in blobs_of(records.load(_RECORD, path, OperatorRecord)))
    for entry_path in entry_paths(manifest, layout, operators):
        folder, segments = segments_of(entry_path)
        yield from (folder / segment.name for segment in segments)
        yield entry_path


def names_in(store: ObjectStore, manifest: Manifest, layout: Layout) -> Iterator[str]:
    """The same and the records, by their names in an object store, as the store itself tells them."""
    for path in record_paths(manifest, layout).values():
        name = path.relative_to(layout.root).as_posix()
        yield name
        record = records.decode(_RECORD, store.read(name), OperatorRecord, path=name)
        yield from (layout.blob(file.sha256).relative_to(layout.root).as_posix() for file in blobs_of(record))
    for path in entry_paths(manifest, layout):
        name = path.relative_to(layout.root).as_posix()
        yield name
        entry = _read_entry(store, name)
        folder = codec.data_dir(path.parents[1]).relative_to(layout.root).as_posix()
        yield from (f"{folder}/{one.name}" for one in (entry.segments if isinstance(entry, DataEntry) else ()))


def _read_entry(store: ObjectStore, name: str) -> codec.Entry:
    try:
        data = unpacked(store.read(name + PACKED_SUFFIX), name)
    except MissingObject:
        data = store.read(name)
    return codec.decode(data, name)
