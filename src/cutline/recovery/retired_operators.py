"""Logs and Spark directories of operators that the flow no longer has, or has under another name.

Checkpoints from before the change can be restored as long as they are kept, so the logs that they need stay too.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths
from cutline.channels.segment_store import SegmentStore
from cutline.errors import CutlineError, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.entries import DataEntry
from cutline.model.ids import Generation, OperatorId
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore

log = get_logger(__name__)


def held_files(manifests: Iterable[Manifest], begun: Mapping[OperatorId, Generation], layout: Layout) -> set[Path]:
    """Entries and segments that older checkpoints need, in logs whose names other operators have now."""
    held: set[Path] = set()
    for manifest in manifests:
        renamed = [name for name, since in begun.items() if name in manifest.channels and manifest.generation < since]
        folders = {layout.channel(name) for name in renamed}
        for path in entry_paths(manifest, layout) if folders else ():
            if path.parents[1] in folders:
                held.update([path, *_segments(path)])
    return held


def _segments(path: Path) -> Iterator[Path]:
    try:
        entry = codec.load(path)
    except CutlineError:
        return  # a restore of that checkpoint reports it
    for segment in entry.segments if isinstance(entry, DataEntry) else ():
        yield codec.data_dir(path.parents[1]) / segment.name


def left_folders(layout: Layout, checkpoints: CheckpointStore, names: Collection[OperatorId]) -> list[Path]:
    """The channels of operators that neither the flow nor any checkpoint has."""
    folders = {OperatorId(path.name): path for path in _folders_in(layout.channels) if path.name not in names}
    if not folders:
        return []
    held: set[OperatorId] = set()
    for epoch in checkpoints.epochs():
        held |= checkpoints.recorded(epoch)
    return [path for name, path in sorted(folders.items()) if name not in held]


def channel_names(layout: Layout) -> frozenset[OperatorId]:
    """All channels that have a folder."""
    return frozenset(OperatorId(path.name) for path in _folders_in(layout.channels))


def collect_left_logs(layout: Layout, checkpoints: CheckpointStore, names: Collection[OperatorId]) -> list[OperatorId]:
    """Delete the logs that no checkpoint needs any more; returns their operators."""
    folders = left_folders(layout, checkpoints, names)
    gone = []
    for folder in folders:
        try:
            SegmentStore.of(folder).delete_all()
        except StoreError as error:  # the folder stays: by it the next collection finds what is left in the store
            log.warning("segments_left", operator=folder.name, reason=str(error))
            continue
        shutil.rmtree(folder, ignore_errors=True)
        gone.append(OperatorId(folder.name))
    return gone


def collect_spark_dirs(layout: Layout, spark_dirs: Mapping[OperatorId, Generation], *, is_all: bool = False) -> None:
    """Delete unused Spark directories; ``is_all``: also those of operators that are not named here."""
    for folder in _folders_in(layout.spark_dirs):
        name = OperatorId(folder.name)
        if name in spark_dirs:
            live = layout.spark_checkpoint_dir(name, spark_dirs[name])
            for other in _folders_in(folder):
                if other != live:
                    shutil.rmtree(other, ignore_errors=True)
        elif is_all:
            shutil.rmtree(folder, ignore_errors=True)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not durable.is_temporary(path.name))
    except FileNotFoundError:
        return []
