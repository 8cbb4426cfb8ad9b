"""Garbage of a flow's storage, found and removed: what interrupted work has left and no checkpoint needs.

Marked by what the records say, swept only if it is old enough, and kept whenever a record cannot be read. Manifests in
the flow's own folder are left alone: which checkpoints stay is decided by the flow when it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.channels.log import ChannelLog
from cutline.channels.segment_store import SegmentStore
from cutline.coordinator.manifests import lineage_of, of_present_history
from cutline.coordinator.retention import Janitor, needs_behind_log, needs_of
from cutline.errors import ConfigError, CutlineError, DamagedRecordError, FencedError
from cutline.model import entries as codec
from cutline.model.entries import DataEntry
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, MetadataStore, SnapshotStore
from cutline.ports.objects import ObjectInfo
from cutline.protocol.history.retention import EpochNeeds, truncation_points
from cutline.recovery.retired_operators import held_files, left_folders
from cutline.savepoints.store import is_finished
from cutline.tiers import early_upload as sent_ahead
from cutline.tiers.upload import Replica

#: Why each kind may go.
WHY = {
    "blob": "no complete checkpoint reaches it",
    "record": "no complete checkpoint names it",
    "temporary": "left by a write that was interrupted",
    "savepoint": "it was never finished",
    "request": "nobody waits for it any more",
    "entry": "no checkpoint and no consumer needs it",
    "segment": "no entry names it",
    "channel": "neither the flow nor a checkpoint has its operator",
    "pins": "the process that held these files is gone",
    "spark": "no operator runs on it",
    "manifest": "the remote tier keeps newer checkpoints",
    "published": "its checkpoint is gone",
    "ahead": "who sent this ahead has ended",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that nothing needs: a file, or a folder with all in it."""

    kind: str
    #: Below the flow's folder, or its place in the remote tier.
    path: str
    size_bytes: int
    why: str
    tier: str = "local"


class Collected(msgspec.Struct, kw_only=True):
    """What was found, and removed unless it was only looked for."""

    findings: list[Finding] = []
    #: What was left alone because it is not known whether it is needed, for people.
    in_doubt: list[str] = []


OnFound = Callable[[Finding], None]


def _ignore(_: Finding) -> None: ...


class LocalCollector:
    """The flow's own folder. Whoever uses it sees to it that nobody else collects or restores meanwhile."""

    def __init__(
        self,
        layout: Layout,
        snapshots: SnapshotStore,
        *,
        open_from: Epoch,
        grace_ms: int,
        is_dry_run: bool,
        running_since_ms: int | None = None,
        check_fence: Callable[[], None] = lambda: None,
        on_found: OnFound = _ignore,
    ) -> None:
        """``open_from``: epochs from here on may be under way.

        ``running_since_ms``: the flow runs; what is younger may be its own, and is not known from any record yet.
        """
        self._layout = layout
        self._snapshots = snapshots
        self._open_from = open_from
        self._is_dry_run = is_dry_run
        self._is_running = running_since_ms is not None
        self._check_fence = check_fence
        self._on_found = on_found
        self._limit_ms = now_ms() - grace_ms
        self._others_limit_ms = min(self._limit_ms, self._limit_ms if running_since_ms is None else running_since_ms)
        self._collected = Collected(findings=[], in_doubt=[])
        self._found: set[Path] = set()

    def collect(self, channels: Mapping[OperatorId, ChannelLog], live_needs: Iterable[EpochNeeds]) -> Collected:
        """``live_needs``: what operators need that are behind their own logs."""
        for step in (
            self._sweep_spark_dirs,
            self._sweep_savepoints,
            self._sweep_pins,
            self._sweep_requests,
            self._sweep_temporary,
            self._sweep_snapshots,
            lambda: self._sweep_channels(channels, list(live_needs)),
            self._sweep_left_channels,
        ):
            self._carefully(step)
        return self._collected

    def _carefully(self, step: Callable[[], None]) -> None:
        """What cannot be understood is kept, and said so; it keeps nothing else from being collected."""
        self._check_fence()
        try:
            step()
        except FencedError:
            raise
        except (CutlineError, OSError) as error:
            self._collected.in_doubt.append(str(error).partition("\n")[0])

    # ------------------------------------------------------------------ one thing

    def _may_go(self, kind: str, path: Path, *, is_others: bool = False) -> bool:
        """Note it if it is old enough; True if it is to be removed. ``is_others``: no record tells of it."""
        try:
            size_bytes, changed_ms = _measure(path)
        except FileNotFoundError:
            return False
        if changed_ms > (self._others_limit_ms if is_others else self._limit_ms):
            return False
        finding = Finding(kind=kind, path=self._name(path), size_bytes=size_bytes, why=WHY[kind])
        self._found.add(path)
        self._collected.findings.append(finding)
        self._on_found(finding)
        return not self._is_dry_run

    def _is_found(self, kind: str, path: Path) -> bool:
        """Whether it may go, be it that this is only looked for; who asks removes it."""
        self._may_go(kind, path)
        return path in self._found

    def _name(self, path: Path) -> str:
        return path.relative_to(self._layout.root).as_posix()

    def _drop_folder(self, kind: str, folder: Path) -> None:
        if self._may_go(kind, folder, is_others=True):
            shutil.rmtree(folder, ignore_errors=True)

    def _drop_file(self, kind: str, path: Path) -> None:
        if self._may_go(kind, path, is_others=True):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ what is of a dead process

    def _sweep_spark_dirs(self) -> None:
        newest = self._newest_generation()
        for operator, generation in newest.spark_dirs.items() if newest else ():
            live = self._layout.spark_checkpoint_dir(operator, generation)
            for folder in _entries_of(live.parent):
                if folder != live and folder.is_dir():
                    self._drop_folder("spark", folder)
        for folder in _entries_of(self._layout.spark_dirs) if newest else ():
            if newest is not None and folder.name not in newest.spark_dirs and folder.is_dir():
                self._drop_folder("spark", folder)

    def _newest_generation(self) -> GenerationRecord | None:
        generations = self._snapshots.generations() if self._layout.generations.is_dir() else []
        return generations[-1] if generations else None

    def _sweep_savepoints(self) -> None:
        for folder in _entries_of(self._layout.savepoints):
            if folder.is_dir() and not is_finished(folder):
                self._drop_folder("savepoint", folder)

    def _sweep_pins(self) -> None:
        for folder in _entries_of(self._layout.pins):
            self._drop_folder("pins", folder)

    def _sweep_requests(self) -> None:
        for path in _entries_of(self._layout.requests) if not self._is_running else ():
            self._drop_file("request", path)

    def _sweep_temporary(self) -> None:
        for folder, folders, names in os.walk(self._layout.root):
            here = Path(folder)
            for name in sorted(filter(durable.is_temporary, folders)):
                if here != self._layout.root and here / name not in self._found:
                    self._drop_folder("temporary", here / name)
            # Spark's own are Spark's; what goes as a whole is not looked into.
            folders[:] = [
                name for name in folders if here / name != self._layout.spark_dirs and here / name not in self._found
            ]
            for name in sorted(names):
                if durable.is_temporary(name) and here / name not in self._found:
                    self._drop_file("temporary", here / name)

    # ------------------------------------------------------------------ checkpoints

    def _sweep_snapshots(self) -> None:
        if self._layout.checkpoints.is_dir():
            self._snapshots.sweep(self._open_from, self._may_go, self._check_fence)

    # ------------------------------------------------------------------ channels

    def _sweep_channels(self, channels: Mapping[OperatorId, ChannelLog], live_needs: list[EpochNeeds]) -> None:
        newest = self._newest_generation()
        if newest is None:
            return
        manifests = [self._snapshots.load_manifest(epoch) for epoch in self._snapshots.epochs()]
        live = {one.epoch for one in of_present_history(manifests, self._snapshots.generations())}
        needs = [needs_of(one) if one.epoch in live else _without_owners(needs_of(one)) for one in manifests]
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
            self._sweep_invisible(channel, held)
            # Listed first: what is appended meanwhile names its segments.
            self._sweep_segments(channel, segments, held)
            self._sweep_stored(channel, stored, held)

    def _truncate(self, channel: ChannelLog, below: int) -> None:
        """From the oldest entry on, without a gap; one always stays."""
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

    def _sweep_left_channels(self) -> None:
        """Of operators that were dropped or renamed, once no checkpoint has them any more."""
        newest = self._newest_generation()
        for folder in left_folders(self._layout, self._snapshots, newest.spark_dirs) if newest else ():
            if self._may_go("channel", folder, is_others=True):
                SegmentStore.of(folder).clear()
                shutil.rmtree(folder, ignore_errors=True)

    def _sweep_invisible(self, channel: ChannelLog, held: set[Path]) -> None:
        """Of a history that was left. Those with output of sinks stay: by them the next start throws it away."""
        for entry in channel.invisible_entries():
            path = codec.entry_path(channel.folder, entry.generation, entry.seq)
            if path not in held and not (isinstance(entry, DataEntry) and entry.staged):
                self._drop_file("entry", path)

    def _sweep_segments(self, channel: ChannelLog, segments: list[Path], held: set[Path]) -> None:
        if not channel.is_whole:
            return
        named = {segment.name for entry in channel.data_entries() for segment in entry.segments}
        for path in segments:
            is_known = path.name in named or path in held or path in self._found
            if not is_known and not durable.is_temporary(path.name):
                self._drop_file("segment", path)

    def _sweep_stored(self, channel: ChannelLog, stored: list[ObjectInfo], held: set[Path]) -> None:
        """The same in the object store, if the rows lie in one."""
        named = {segment.name for entry in channel.data_entries() for segment in entry.segments}
        named.update(path.name for path in held if path.parent == codec.data_dir(channel.folder))
        doomed = []
        for info in stored if channel.is_whole else ():
            if info.path in named or info.modified_ms > self._others_limit_ms:
                continue
            doomed.append(info.path)
            path = f"channels/{channel.operator}/data/{info.path}"
            finding = Finding(
                kind="segment", path=path, size_bytes=info.size_bytes, why=WHY["segment"], tier="channel store"
            )
            self._collected.findings.append(finding)
            self._on_found(finding)
        if not self._is_dry_run:
            channel.segments.delete(doomed)


def _measure(path: Path) -> tuple[int, int]:
    """Bytes, and when it was last changed: of a folder with all in it."""
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
    """It says what must stay, not that somebody could begin from there."""
    return EpochNeeds(operators=(), channels=needs.channels)


# ----------------------------------------------------------------------------------------- a flow that does not run


def collect_stopped(
    layout: Layout,
    snapshots: SnapshotStore,
    *,
    open_from: Epoch,
    grace_ms: int,
    is_dry_run: bool,
    on_found: OnFound = _ignore,
) -> Collected:
    """The folder of a flow that does not run; the caller holds its lock, unless it only looks."""
    collector = LocalCollector(
        layout, snapshots, open_from=open_from, grace_ms=grace_ms, is_dry_run=is_dry_run, on_found=on_found
    )
    in_doubt: list[str] = []
    channels, needs = _stored_channels(layout, snapshots, in_doubt)
    collected = collector.collect(channels, needs)
    collected.in_doubt += in_doubt
    return collected


def _stored_channels(
    layout: Layout, snapshots: SnapshotStore, in_doubt: list[str]
) -> tuple[dict[OperatorId, ChannelLog], list[EpochNeeds]]:
    """The logs as the next start would read them; none if one of them cannot be read, for others may need it."""
    channels: dict[OperatorId, ChannelLog] = {}
    try:
        generations = snapshots.generations() if layout.generations.is_dir() else []
        if not generations:
            return {}, []
        newest = generations[-1]
        for name, spans in newest.lineage.items():
            channels[name] = ChannelLog.open(name, layout.channel(name), lineage_of(spans), is_reader=True)
        if not newest.is_per_operator:
            return channels, []
        committed = {
            name: snapshots.last_committed(layout.spark_checkpoint_dir(name, generation))
            for name, generation in newest.spark_dirs.items()
        }
        behind = (needs_behind_log(channels[name], batch) for name, batch in committed.items())
        return channels, [one for one in behind if one is not None]
    except (CutlineError, OSError) as error:
        in_doubt.append(f"channels: {str(error).partition(chr(10))[0]}")
        return {}, []


def collect_remote(
    replica: Replica,
    *,
    keep: Iterable[Epoch],
    generation: Generation,
    grace_ms: int,
    is_dry_run: bool,
    on_found: OnFound = _ignore,
) -> Collected:
    """The remote tier of a flow that does not run; the caller holds its lock. Raises FencedError: another host runs."""
    try:
        gone = replica.collect(
            set(keep),
            now_ms=now_ms(),
            grace_ms=grace_ms,
            check_fence=lambda: replica.check_fence(generation),
            is_dry_run=is_dry_run,
        )
    except DamagedRecordError as error:
        return Collected(findings=[], in_doubt=[f"the remote tier: {error}"])
    findings = [remote_finding(info) for info in gone]
    for finding in findings:
        on_found(finding)
    return Collected(findings=findings, in_doubt=[])


def kept_remotely(replica: Replica, local: Iterable[Epoch], pins: Iterable[Epoch], retain: int) -> set[Epoch]:
    """As many of the newest as the flow is told to keep, or keeps here; those it keeps here; those that are pinned."""
    here = set(local)
    return {*replica.epochs()[-max(retain, len(here), 1) :], *here, *pins}


def remote_finding(info: ObjectInfo) -> Finding:
    return Finding(
        kind=_kind_of(info.path),
        path=info.path,
        size_bytes=info.size_bytes,
        why=WHY[_kind_of(info.path)],
        tier="remote",
    )


def _kind_of(path: str) -> str:
    parts = path.split("/")
    if durable.is_temporary(parts[-1]):
        return "temporary"
    if parts[0] == sent_ahead.FOLDER:
        return "ahead"
    if parts[0] == "published":
        return "published"
    if parts[0] == "checkpoints":
        return "manifest" if parts[-1] == "manifest.json" else "record"
    if parts[0] == "channels":
        return "segment" if parts[-2] == "data" else "entry"
    return "blob"


# ----------------------------------------------------------------------------------------- a flow that runs


class RemoteTier(Protocol):
    """What is asked of the thread that copies checkpoints."""

    @property
    def url(self) -> str: ...

    def tidy(self, *, grace_ms: int, is_dry_run: bool) -> list[ObjectInfo]: ...


class LiveCollection:
    """What a shell asks of a running flow: its own janitor does it under its lock, its replicator on its thread."""

    def __init__(
        self,
        layout: Layout,
        janitor: Janitor,
        replicator: RemoteTier | None,
        metadata: MetadataStore,
        started_ms: int,
    ) -> None:
        self._layout = layout
        self._janitor = janitor
        self._replicator = replicator
        self._metadata = metadata
        self._started_ms = started_ms

    def collect(self, grace_ms: int, dry_run: bool = False, remote: str | None = None) -> dict[str, Any]:
        """``remote``: the address of the tier to collect too, which must be the flow's own."""
        if remote is not None and (self._replicator is None or self._replicator.url != remote):
            raise ConfigError(
                "the running flow has another remote tier, or none",
                next_step="give its own with --remote, or stop the flow first",
                flow=self._layout.root.name,
            )

        def collect(
            snapshots: SnapshotStore,
            channels: Mapping[OperatorId, ChannelLog],
            live_needs: Iterable[EpochNeeds],
            check_fence: Callable[[], None],
        ) -> Collected:
            last = self._metadata.last_epoch()  # first: what begins afterwards is above it
            open_from = min((one.epoch for one in self._metadata.pending()), default=Epoch(last + 1))
            return LocalCollector(
                self._layout,
                snapshots,
                open_from=open_from,
                grace_ms=grace_ms,
                is_dry_run=dry_run,
                running_since_ms=self._started_ms,
                check_fence=check_fence,
            ).collect(channels, live_needs)

        collected = self._janitor.while_at_rest(collect)
        if remote is not None and self._replicator is not None:
            gone = self._replicator.tidy(grace_ms=grace_ms, is_dry_run=dry_run)
            collected.findings += [remote_finding(info) for info in gone]
        built: dict[str, Any] = msgspec.to_builtins(collected)
        return built


def found(collected: Collected) -> Iterator[tuple[str, str, int, int]]:
    """(tier, kind, how many, bytes), for people."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for one in collected.findings:
        count, size_bytes = sums.get((one.tier, one.kind), (0, 0))
        sums[one.tier, one.kind] = (count + 1, size_bytes + one.size_bytes)
    for (tier, kind), (count, size_bytes) in sorted(sums.items()):
        yield tier, kind, count, size_bytes
