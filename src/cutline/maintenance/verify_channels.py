"""Verifies one epoch's channels: the entries and segments that a restore reads, and the amount in flight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base import durable
from cutline.channels import entry_files as codec
from cutline.channels.segment_store import SegmentStore
from cutline.errors import CutlineError, StoreError
from cutline.maintenance.findings import LIVE_LOG, OTHER_EPOCH
from cutline.maintenance.looking import Look, names_in_folder, text_of
from cutline.maintenance.stored_generations import StoredGenerations
from cutline.model.checkpoint import Manifest
from cutline.model.entries import BarrierEntry, DataEntry, Entry, Segment
from cutline.model.generation import GenerationRecord
from cutline.model.ids import OperatorId, Position
from cutline.model.layout import Layout
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.storage.detached import DetachedLogs


class ChannelCheck:
    """Reads the logs of one flow. ``deep``: every byte of segments, not only sizes."""

    def __init__(self, layout: Layout, *, deep: bool) -> None:
        self._layout = layout
        self._deep = deep

    def check(self, look: Look, manifest: Manifest, generations: StoredGenerations) -> None:
        holder = DetachedLogs(self._layout).holder(manifest.epoch)
        for name, cut in sorted(manifest.channels.items()):
            lineage = lineage_of(cut.lineage)
            for consumer, flight in cut.in_flight.items():
                if flight.first > cut.barrier:
                    text = f"{consumer} had read {name} up to {flight.first}, past the barrier at {cut.barrier}"
                    look.problem(self._layout.manifest(manifest.epoch), text, consumer)
            first = min((flight.first for flight in cut.in_flight.values()), default=cut.barrier)
            found = self._check_entries(look, holder.channel(name), lineage, first, cut.barrier)
            self._check_barrier(look, manifest, name, lineage, found.get(cut.barrier))
            if len(found) == cut.barrier - first + 1:
                self._check_amounts(look, manifest, name, found)
        current = generations.newest
        if current is not None and current.is_per_operator:
            self._check_catching_up(look, manifest, current)

    def _check_entries(
        self,
        look: Look,
        folder: Path,
        lineage: Lineage,
        first: Position,
        last: Position,
        *,
        next_step: str = OTHER_EPOCH,
    ) -> dict[Position, Entry]:
        """Entries in [first, last] must exist, be consecutive, and have their segments; returns the good ones."""
        channel = OperatorId(folder.name)
        found: dict[Position, Entry] = {}
        before: Entry | None = None
        for seq in map(Position, range(first, last + 1)):
            generation = lineage.owner(seq)
            path = codec.entry_path(folder, generation, seq)
            try:
                entry = codec.load(path)
            except (CutlineError, OSError) as error:
                look.problem(path, text_of(error), channel, next_step=next_step)
                before = None
                continue
            look.count(path)
            if (entry.seq, entry.generation) != (seq, generation):
                look.problem(
                    path, f"it is entry {entry.seq} of generation {entry.generation}", channel, next_step=next_step
                )
                before = None
                continue
            if before is not None and entry.batch != before.batch + isinstance(entry, DataEntry):
                text = f"it belongs to batch {entry.batch}, the entry before it to batch {before.batch}"
                look.problem(path, text, channel, next_step=next_step)
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                self._check_segment(look, folder, segment)
            found[seq] = before = entry
        return found

    def _check_segment(self, look: Look, folder: Path, segment: Segment) -> None:
        try:
            problem = SegmentStore.of(folder).problem(segment, deep=self._deep)
        except StoreError as error:
            problem = f"whether the segment exists is unknown: {error}"
        if problem is not None:
            look.problem(codec.data_dir(folder) / segment.name, problem, OperatorId(folder.name))
        look.add(segment.size_bytes)

    def _check_barrier(
        self, look: Look, manifest: Manifest, name: OperatorId, lineage: Lineage, entry: Entry | None
    ) -> None:
        cut = manifest.operators.get(name)
        if entry is None or cut is None:
            return  # reported already
        path = codec.entry_path(self._layout.channel(name), lineage.owner(entry.seq), entry.seq)
        if not isinstance(entry, BarrierEntry) or entry.epoch != manifest.epoch:
            look.problem(path, f"it is not the barrier of epoch {manifest.epoch}", name)
        elif entry.batch != cut.batch or entry.positions != cut.positions:
            look.problem(path, "barrier and manifest disagree about where the cut is", name)

    def _check_amounts(self, look: Look, manifest: Manifest, name: OperatorId, found: Mapping[Position, Entry]) -> None:
        for consumer, flight in manifest.channels[name].in_flight.items():
            if flight.entries is None:
                continue  # not measured
            inside = [entry for seq, entry in found.items() if flight.first <= seq < flight.end]
            data = [entry for entry in inside if isinstance(entry, DataEntry) and entry.rows]
            amount = (len(data), sum(entry.rows for entry in data), sum(entry.size_bytes for entry in data))
            if amount != (flight.entries, flight.rows, flight.size_bytes):
                text = f"the amount in flight from {name} to {consumer} differs from the manifest"
                look.problem(self._layout.manifest(manifest.epoch), text, consumer)

    def _check_catching_up(self, look: Look, manifest: Manifest, current: GenerationRecord) -> None:
        """Per-operator mode: from its snapshot, the operator repeats its own log and reads its inputs again."""
        for name, cut in sorted(manifest.operators.items()):
            needed = {name: cut.barrier + 1, **cut.positions}
            for channel, first in needed.items():
                lineage = lineage_of(current.lineage[channel])
                last = self._last_entry(channel, lineage)
                self._check_entries(
                    look, self._layout.channel(channel), lineage, Position(first), last, next_step=LIVE_LOG
                )

    def _last_entry(self, channel: OperatorId, lineage: Lineage) -> Position:
        last = lineage.spans[-1].start - 1
        for generation, begin, end in lineage.ranges():
            names = names_in_folder(codec.generation_dir(self._layout.channel(channel), generation))
            numbers = [int(name.removesuffix(".json")) for name in names if not durable.is_temporary(name)]
            last = max([last, *(seq for seq in numbers if seq >= begin and (end is None or seq < end))])
        return Position(last)
