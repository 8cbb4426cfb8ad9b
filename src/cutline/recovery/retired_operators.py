"""What operators leave behind that the flow no longer has, or has under another name: logs and Spark directories.

Checkpoints from before the change may be restored for as long as they are kept, so the logs that they need stay too.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels.segment_store import SegmentStore
from cutline.coordinator.manifests import lineage_of, spans_of
from cutline.errors import CutlineError, StoreError
from cutline.model import entries as codec
from cutline.model.entries import DataEntry
from cutline.model.ids import START, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, Manifest, SnapshotStore, Spans
from cutline.tiers.checkpoint_files import entry_paths

log = get_logger(__name__)

Begun = dict[OperatorId, Generation]
Left = dict[OperatorId, Spans]


def histories(
    generations: Sequence[GenerationRecord],
    *,
    generation: Generation,
    names: Collection[OperatorId],
    begun_now: Collection[OperatorId],
    restored: Manifest | None,
    layout: Layout,
) -> tuple[Begun, Left]:
    """For the record of ``generation``: since when logs are what they are, and the logs that nobody writes any more.

    ``names``: the operators of the flow; those in ``begun_now`` get a log that goes on from none of their name.
    ``restored``: the checkpoint that the whole flow goes back to.
    """
    if not generations:
        return dict.fromkeys(begun_now, generation), {}
    current = generations[-1]
    then = current
    if restored is not None:
        then = next((one for one in generations if one.generation == restored.generation), current)
    begun: Begun = {name: since for name, since in then.begun.items() if name in names}
    begun.update(dict.fromkeys(begun_now, generation))
    left: Left = {}
    for name in {*current.left, *current.lineage}:
        if not layout.channel(name).exists():
            continue
        if name in names and name not in begun_now:
            # Its log goes on. An older one of the same name may have been left long ago.
            if name in begun and name in current.left:
                left[name] = current.left[name]
        elif restored is not None and name in restored.channels:
            cut = restored.channels[name]
            left[name] = spans_of(lineage_of(cut.lineage).fork(generation, Position(cut.barrier + 1)))
        elif name in current.left:
            left[name] = current.left[name]
        elif restored is not None:
            left[name] = [(generation, START)]  # it came after the checkpoint: nothing of it is of the history
    return begun, left


def held_files(manifests: Iterable[Manifest], begun: Mapping[OperatorId, Generation], layout: Layout) -> set[Path]:
    """Entries and segments that older checkpoints need of logs whose names other operators have now."""
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
        return  # whoever restores that checkpoint hears of it
    for segment in entry.segments if isinstance(entry, DataEntry) else ():
        yield codec.data_dir(path.parents[1]) / segment.name


def left_folders(layout: Layout, snapshots: SnapshotStore, names: Collection[OperatorId]) -> list[Path]:
    """The channels of operators that neither the flow nor any checkpoint has."""
    folders = {OperatorId(path.name): path for path in _folders_in(layout.channels) if path.name not in names}
    if not folders:
        return []
    held: set[OperatorId] = set()
    for epoch in snapshots.epochs():
        held |= snapshots.recorded(epoch)
    return [path for name, path in sorted(folders.items()) if name not in held]


def forget_left(layout: Layout, snapshots: SnapshotStore, names: Collection[OperatorId]) -> list[OperatorId]:
    """Delete the logs that no checkpoint needs any more; returns whose they were."""
    folders = left_folders(layout, snapshots, names)
    gone = []
    for folder in folders:
        try:
            SegmentStore.of(folder).clear()
        except StoreError as error:  # the folder stays, by which the next one finds what is left in the store
            log.warning("segments_left", operator=folder.name, reason=str(error))
            continue
        shutil.rmtree(folder, ignore_errors=True)
        gone.append(OperatorId(folder.name))
    return gone


def sweep_spark_dirs(layout: Layout, spark_dirs: Mapping[OperatorId, Generation], *, is_all: bool = False) -> None:
    """Delete Spark directories that nobody runs on; ``is_all``: of operators that are not named here as well."""
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
