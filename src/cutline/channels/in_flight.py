"""The part of every log that a restore to a checkpoint reads: entries up to its barriers, and their segments."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from cutline.channels import entry_files as codec
from cutline.model.checkpoint import Manifest
from cutline.model.entries import DataEntry, Segment
from cutline.model.ids import OperatorId, Position
from cutline.model.layout import Layout
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.history.retention import EpochNeeds, needs_of


def entry_paths(manifest: Manifest, layout: Layout, operators: Collection[OperatorId] | None = None) -> Iterator[Path]:
    """The entries of every log that a restore reads; ``operators``: only logs that these operators write."""
    needs: EpochNeeds = needs_of(manifest)
    for name, cut in manifest.channels.items():
        if operators is not None and name not in operators:
            continue
        lineage = lineage_of(cut.lineage)
        for seq in range(needs.channels[OperatorId(name)], cut.barrier + 1):
            position = Position(seq)
            yield codec.entry_path(layout.channel(name), lineage.owner(position), position)


def segments_of(entry_path: Path) -> tuple[Path, list[Segment]]:
    """The folder of an entry's segments, and the segments."""
    entry = codec.check_place(codec.load(entry_path), entry_path)
    return codec.data_dir(entry_path.parents[1]), entry.segments if isinstance(entry, DataEntry) else []
