"""Finds and removes garbage in a flow's storage: leftovers of interrupted work that no checkpoint needs.

The records mark what is needed. Garbage is collected only if it is old enough, and kept if a record cannot be read.
Manifests in the flow's own folder are never collected here: the running flow decides which checkpoints stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.channels.segment_store import SegmentStore
from cutline.errors import CutlineError, FencedError
from cutline.maintenance.findings import WHY, Collected, Garbage, OnFound, _ignore
from cutline.model.entries import DataEntry
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.generation_store import GenerationStore
from cutline.ports.objects import ObjectInfo
from cutline.ports.query_dir import QueryDir
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.history.retention import EpochNeeds, needs_of, truncation_points
from cutline.recovery.retired_operators import held_files, left_folders
from cutline.savepoints.store import is_finished
from cutline.storage.detached import DetachedLogs
from cutline.worker.log_replay import needs_behind_log


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionScope:
    """What a collection may remove, and whether it is a dry run."""

    #: Epochs from here on may be in progress.
    open_from: Epoch
    #: Files changed within this time stay.
    grace_ms: int
    is_dry_run: bool
    #: Start of the running flow: younger files may be its own and in no record yet. None: the flow does not run.
    running_since_ms: int | None = None


class LocalCollector:
    """Collects the flow's own folder. The caller ensures that no other process collects or restores meanwhile."""

    def __init__(
        self,
        layout: Layout,
        checkpoints: CheckpointStore,
        generations: GenerationStore,
        scope: CollectionScope,
        *,
        check_fence: Callable[[], None] = lambda: None,
        on_found: OnFound = _ignore,
    ) -> None:
        self._layout = layout
        self._checkpoints = checkpoints
        self._generations = generations
        self._open_from = scope.open_from
        self._is_dry_run = scope.is_dry_run
        self._is_running = scope.running_since_ms is not None
        self._check_fence = check_fence
        self._on_found = on_found
        self._limit_ms = now_ms() - scope.grace_ms
        self._others_limit_ms = min(self._limit_ms, scope.running_since_ms or self._limit_ms)
        self._collected = Collected(findings=[], in_doubt=[])
        self._found: set[Path] = set()

    def collect(self, channels: Mapping[OperatorId, ChannelLog], live_needs: Iterable[EpochNeeds]) -> Collected:
        """``live_needs``: what operators that are behind their own logs need."""
        for step in (
            self._collect_spark_dirs,
            self._collect_savepoints,
            self._collect_held_files,
            self._collect_requests,
            self._collect_temporary,
            self._collect_checkpoints,
            lambda: self._collect_channels(channels, list(live_needs)),
            self._collect_left_channels,
        ):
            self._carefully(step)
        return self._collected

    def _carefully(self, step: Callable[[], None]) -> None:
        """Keeps and reports what cannot be read; the other steps still run."""
        self._check_fence()
        try:
            step()
        except FencedError:
            raise
        except (CutlineError, OSError) as error:
            self._collected.in_doubt.append(str(error).partition("\n")[0])

    # ------------------------------------------------------------------ one file or folder

    def _may_go(self, kind: str, path: Path, *, is_others: bool = False) -> bool:
        """Note the path if it is old enough; True if the caller must delete it. ``is_others``: no record names it."""
        try:
            size_bytes, changed_ms = _measure(path)
        except FileNotFoundError:
            return False
        if changed_ms > (self._others_limit_ms if is_others else self._limit_ms):
            return False
        finding = Garbage(kind=kind, path=self._name(path), size_bytes=size_bytes, why=WHY[kind])
        self._found.add(path)
        self._collected.findings.append(finding)
        self._on_found(finding)
        return not self._is_dry_run

    def _is_found(self, kind: str, path: Path) -> bool:
        """Whether the file is collectable; the caller deletes it (True also in a dry run)."""
        self._may_go(kind, path)
        return path in self._found

    def _name(self, path: Path) -> str:
        return path.relative_to(self._layout.root).as_posix()

    def _collect_folder(self, kind: str, folder: Path) -> None:
        if self._may_go(kind, folder, is_others=True):
            shutil.rmtree(folder, ignore_errors=True)

    def _collect_file(self, kind: str, path: Path) -> None:
        if self._may_go(kind, path, is_others=True):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ leftovers of dead processes

    def _collect_spark_dirs(self) -> None:
        newest = self._newest_generation()
        for operator, generation in newest.spark_dirs.items() if newest else ():
            live = self._layout.spark_checkpoint_dir(operator, generation)
            for folder in _entries_of(live.parent):
                if folder != live and folder.is_dir():
                    self._collect_folder("spark", folder)
        for folder in _entries_of(self._layout.spark_dirs) if newest else ():
            if newest is not None and folder.name not in newest.spark_dirs and folder.is_dir():
                self._collect_folder("spark", folder)

    def _newest_generation(self) -> GenerationRecord | None:
        generations = self._generations.load_all()
        return generations[-1] if generations else None

    def _collect_savepoints(self) -> None:
        for folder in _entries_of(self._layout.savepoints):
            if folder.is_dir() and not is_finished(folder):
                self._collect_folder("savepoint", folder)

    def _collect_held_files(self) -> None:
        for folder in _entries_of(self._layout.pins):
            self._collect_folder("pins", folder)

    def _collect_requests(self) -> None:
        for path in _entries_of(self._layout.requests) if not self._is_running else ():
            self._collect_file("request", path)

    def _collect_temporary(self) -> None:
        for folder, folders, names in os.walk(self._layout.root):
            here = Path(folder)
            for name in sorted(filter(durable.is_temporary, folders)):
                if here != self._layout.root and here / name not in self._found:
                    self._collect_folder("temporary", here / name)
            # Spark manages its own temporary files; folders that are collected whole are not searched.
            folders[:] = [
                name for name in folders if here / name != self._layout.spark_dirs and here / name not in self._found
            ]
            for name in sorted(names):
                if durable.is_temporary(name) and here / name not in self._found:
                    self._collect_file("temporary", here / name)

    # ------------------------------------------------------------------ checkpoints

    def _collect_checkpoints(self) -> None:
        if self._layout.checkpoints.is_dir():
            self._checkpoints.collect_unreferenced(self._open_from, self._may_go, self._check_fence)

    # ------------------------------------------------------------------ channels

    def _collect_channels(self, channels: Mapping[OperatorId, ChannelLog], live_needs: list[EpochNeeds]) -> None:
        newest = self._newest_generation()
        if newest is None:
            return
        manifests = [self._checkpoints.load_manifest(epoch) for epoch in self._checkpoints.epochs()]
        attached = [one for one in manifests if not DetachedLogs(self._layout).has(one.epoch)]
        live = {one.epoch for one in of_present_history(manifests, self._generations.load_all())}
        needs = [needs_of(one) if one.epoch in live else _without_owners(needs_of(one)) for one in attached]
        touched_by = {
            name: {name, *(reader for reader, inputs in newest.inputs.items() if name in inputs)} for name in channels
        }
        points = truncation_points([*needs, *live_needs], touched_by)
        held = held_files(manifests, newest.begun, self._layout)
        for name, channel in channels.items():
            self._check_fence()
            segments, stored = channel.segments.files_here(), channel.segments.stored()
            if name in points:
                self._truncate(channel, points[name])
            self._collect_invisible(channel, held)
            # Segments were listed first: the entry of a segment appended meanwhile names it.
            self._collect_segments(channel, segments, held)
            self._collect_stored(channel, stored, held)

    def _truncate(self, channel: ChannelLog, below: int) -> None:
        """Collects from the oldest entry on, without a gap; one entry always stays."""
        limit = channel.start
        for entry in channel.entries()[:-1]:
            path = codec.entry_path(channel.folder, channel.lineage.owner(entry.seq), entry.seq)
            if entry.seq >= below or not self._is_found("entry", path):
                break
            limit = type(limit)(entry.seq + 1)
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                self._is_found("segment", codec.data_dir(channel.folder) / segment.name)
        if not self._is_dry_run:
            channel.truncate(limit)

    def _collect_left_channels(self) -> None:
        """Collects the channels of dropped or renamed operators once no checkpoint contains them."""
        newest = self._newest_generation()
        for folder in left_folders(self._layout, self._checkpoints, newest.spark_dirs) if newest else ():
            if self._may_go("channel", folder, is_others=True):
                SegmentStore.of(folder).delete_all()
                shutil.rmtree(folder, ignore_errors=True)

    def _collect_invisible(self, channel: ChannelLog, held: set[Path]) -> None:
        """Collects entries of abandoned histories. Those with sink output stay: the next start discards it by them."""
        for entry in channel.invisible_entries():
            path = codec.entry_path(channel.folder, entry.generation, entry.seq)
            if path not in held and not (isinstance(entry, DataEntry) and entry.staged):
                self._collect_file("entry", path)

    def _collect_segments(self, channel: ChannelLog, segments: list[Path], held: set[Path]) -> None:
        if not channel.is_whole:
            return
        named = {segment.name for entry in channel.data_entries() for segment in entry.segments}
        for path in segments:
            is_known = path.name in named or path in held or path in self._found
            if not is_known and not durable.is_temporary(path.name):
                self._collect_file("segment", path)

    def _collect_stored(self, channel: ChannelLog, stored: list[ObjectInfo], held: set[Path]) -> None:
        """Collects segments in the object store, if the rows are in one."""
        named = {segment.name for entry in channel.data_entries() for segment in entry.segments}
        named.update(path.name for path in held if path.parent == codec.data_dir(channel.folder))
        doomed = []
        for info in stored if channel.is_whole else ():
            if info.path in named or info.modified_ms > self._others_limit_ms:
                continue
            doomed.append(info.path)
            path = f"channels/{channel.operator}/data/{info.path}"
            finding = Garbage(
                kind="segment", path=path, size_bytes=info.size_bytes, why=WHY["segment"], tier="channel store"
            )
            self._collected.findings.append(finding)
            self._on_found(finding)
        if not self._is_dry_run:
            channel.segments.delete(doomed)


def _measure(path: Path) -> tuple[int, int]:
    """Bytes and time of the last change; of a folder including its content."""
    status = path.lstat()
    size_bytes, changed_ns = status.st_size if not path.is_dir() else 0, status.st_mtime_ns
    for folder, folders, names in os.walk(path):
        for name in [*folders, *names]:
            try:
                inner = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            changed_ns = max(changed_ns, inner.st_mtime_ns)
            size_bytes += inner.st_size if name in names else 0
    return size_bytes, changed_ns // 1_000_000


def _entries_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _without_owners(needs: EpochNeeds) -> EpochNeeds:
    """The epoch's needs must be kept, but no operator can restore from it."""
    return EpochNeeds(operators=(), channels=needs.channels)


# ----------------------------------------------------------------------------------------- a flow that does not run


def collect_stopped(
    layout: Layout,
    query_dirs: QueryDir,
    checkpoints: CheckpointStore,
    generations: GenerationStore,
    *,
    open_from: Epoch,
    grace_ms: int,
    is_dry_run: bool,
    on_found: OnFound = _ignore,
) -> Collected:
    """Collect the folder of a flow that does not run; the caller holds its lock, except for a dry run."""
    collector = LocalCollector(
        layout,
        checkpoints,
        generations,
        CollectionScope(open_from=open_from, grace_ms=grace_ms, is_dry_run=is_dry_run),
        on_found=on_found,
    )
    in_doubt: list[str] = []
    channels, needs = _stored_channels(layout, query_dirs, generations.load_all, in_doubt)
    collected = collector.collect(channels, needs)
    collected.in_doubt += in_doubt
    return collected


def _stored_channels(
    layout: Layout, query_dirs: QueryDir, load_generations: Callable[[], list[GenerationRecord]], in_doubt: list[str]
) -> tuple[dict[OperatorId, ChannelLog], list[EpochNeeds]]:
    """The logs as the next start would read them; none if one cannot be read, because others may depend on it."""
    channels: dict[OperatorId, ChannelLog] = {}
    try:
        generations = load_generations()
        if not generations:
            return {}, []
        newest = generations[-1]
        for name, spans in newest.lineage.items():
            channels[name] = ChannelLog.open(name, layout.channel(name), lineage_of(spans), is_reader=True)
        if not newest.is_per_operator:
            return channels, []
        committed = {
            name: query_dirs.last_committed(layout.spark_checkpoint_dir(name, generation))
            for name, generation in newest.spark_dirs.items()
        }
        behind = (needs_behind_log(channels[name], batch) for name, batch in committed.items())
        return channels, [one for one in behind if one is not None]
    except (CutlineError, OSError) as error:
        in_doubt.append(f"channels: {str(error).partition(chr(10))[0]}")
        return {}, []
