"""Finds what is relied upon before it is certain to survive a power cut. Looks at a recording only.

A record that names other files may be on the disk from the moment at which it has its name, until its removal is
synced. All this time what it names must be there: synced with all its content, under a name that is synced in all its
folders. The same holds for what was said to be done: published, acknowledged, saved.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cutline.base import records
from cutline.channels import entry_files as codec
from cutline.channels.in_flight import entry_paths
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.entries import DataEntry
from cutline.model.entries import Entry as LogEntry
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.protocol.history.lineage import lineage_of
from cutline.storage.detached import PutBack
from cutline.tiers.checkpoint_files import blobs_of, record_paths
from cutline.tiers.transfer import PACKED_SUFFIX, unpacked
from tests.support.power.recording import Entry, Note, Recording, Sync

NEVER = 1 << 62
#: (folder, when the name was made in it), from the root down.
Chain = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Presence:
    """A file or folder had this path from one moment until another."""

    path: str
    node: int
    is_folder: bool
    since: int
    chain: Chain
    until: int = NEVER
    #: The folders whose sync makes its removal durable.
    removed_in: tuple[int, ...] = ()


class History:
    """Every path of a recording, and when each was certain to survive."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.by_path: dict[str, list[Presence]] = defaultdict(list)
        self.by_node: dict[int, list[Presence]] = defaultdict(list)
        self._open: dict[str, Presence] = {}
        self._syncs: dict[int, list[tuple[int, int]]] = {}
        self.leave_out(lambda _: False)
        self._changed: dict[int, list[int]] = defaultdict(list)
        for change in recording.changes:
            self._changed[change.file].append(change.at)
        self._folders: dict[int, dict[str, Entry]] = {node: {} for node in recording.folders}
        self._places: dict[int, tuple[str, Chain]] = {0: ("", ())}
        self._below: dict[str, list[str]] = {}
        #: (what is looked at, how) for every file that one of the rules is about; filled by the first look.
        self.decoded: dict[tuple[int, str], Any] = {}
        self._replay()

    def leave_out(self, without: Callable[[Sync], bool]) -> None:
        """Look at it as if these syncs had not been."""
        self.without = without
        self._syncs = defaultdict(list)
        for sync in self.recording.syncs:
            if not without(sync):
                self._syncs[sync.node].append((sync.begun, sync.done))
        for syncs in self._syncs.values():
            syncs.sort()

    def _replay(self) -> None:
        for names in self.recording.names:
            touched = tuple({folder for folder, _, _ in names.changes})
            for folder, name, entry in names.changes:
                path, chain = self._places[folder]
                if (old := self._folders[folder].pop(name, None)) is not None:
                    self._close(f"{path}/{name}", old, names.at, touched)
                if entry is not None:
                    self._folders[folder][name] = entry
                    self._begin(f"{path}/{name}", entry, (*chain, (folder, names.at)), names.at)

    def _begin(self, path: str, entry: Entry, chain: Chain, at: int) -> None:
        presence = self._open[path] = Presence(path, entry.node, entry.is_folder, at, chain)
        self.by_path[path].append(presence)
        self.by_node[entry.node].append(presence)
        if entry.is_folder:
            self._places[entry.node] = (path, chain)
            for name, inner in self._folders[entry.node].items():
                # A name inside of a moved folder is as old as it was.
                made = self._made_in(entry.node, name, at)
                self._begin(f"{path}/{name}", inner, (*chain, (entry.node, made)), at)

    def _made_in(self, folder: int, name: str, before: int) -> int:
        found = [
            names.at
            for names in self.recording.names
            if names.at <= before and any(one[0] == folder and one[1] == name and one[2] for one in names.changes)
        ]
        return found[-1]

    def _close(self, path: str, entry: Entry, at: int, touched: tuple[int, ...]) -> None:
        presence = self._open.pop(path)
        presence.until, presence.removed_in = at, touched
        if entry.is_folder:
            for name, inner in self._folders[entry.node].items():
                self._close(f"{path}/{name}", inner, at, touched)

    def _synced_after(self, node: int, at: int) -> int:
        """When the first sync of the node that begins after this moment is done."""
        syncs = self._syncs.get(node, [])
        return min((done for begun, done in syncs[bisect_left(syncs, (at + 1, 0)) :]), default=NEVER)

    def content_certain(self, presence: Presence, at: int) -> bool:
        """Whether all that was written to the file before the moment is synced."""
        changed = self._changed.get(presence.node, [])
        before = bisect_left(changed, at)
        return not before or self._synced_after(presence.node, changed[before - 1]) <= at

    def name_certain(self, presence: Presence, at: int, *, below: int | None = None) -> bool:
        """Whether its name is synced, and those of its folders; ``below``: only in this folder and those in it."""
        chain = presence.chain
        if below is not None:
            inside = [index for index, (folder, _) in enumerate(chain) if folder == below]
            chain = chain[inside[0] :] if inside else ()
        return all(self._synced_after(folder, made) <= at for folder, made in chain)

    def removal_certain(self, presence: Presence) -> int:
        """From when on the file is certain not to come back."""
        if presence.until == NEVER:
            return NEVER
        return min(self._synced_after(folder, presence.until) for folder in presence.removed_in)

    def at(self, path: str, moment: int) -> Presence | None:
        return next((one for one in self.by_path.get(path, ()) if one.since <= moment < one.until), None)

    def content(self, presence: Presence) -> bytes:
        return bytes(self.recording.contents[presence.node])

    def below(self, path: str, moment: int) -> Iterator[Presence]:
        for name in self._paths_below(path):
            yield from (one for one in self.by_path[name] if one.since <= moment < one.until)

    def _paths_below(self, path: str) -> list[str]:
        if path not in self._below:
            self._below[path] = [name for name in self.by_path if name.startswith(f"{path}/")]
        return self._below[path]


@dataclass(frozen=True, slots=True)
class Reliance:
    """At a moment, ``who`` relied on a file that a power cut could still take."""

    who: str
    on: str
    what: str
    at: int

    def __str__(self) -> str:
        return f"{self.who} relies on {self.on}: {self.what} (at {self.at})"


_ROOT = r"(?P<root>/(?:storage|remote)/(?:counting|changing)(?:/savepoints/\w+)?)"
#: The flow's own folder, not a copy.
_LOCAL = ("/storage/counting", "/storage/changing")
_MANIFEST = re.compile(rf"{_ROOT}/checkpoints/\d+/manifest\.json")
_EPOCH = re.compile(rf"{_ROOT}/checkpoints/(?P<epoch>\d+)/manifest\.json")
_RECORD = re.compile(rf"{_ROOT}/checkpoints/\d+/(?P<operator>\w+)\.g\d+\.json")
_ENTRY = re.compile(rf"{_ROOT}/channels/(?P<operator>\w+)/(?P<generation>g\d+)/(?P<seq>\d+)\.json")
_GENERATION = re.compile(rf"{_ROOT}/generations/\d+\.json")
_CARD = re.compile(r"(?P<root>/storage/counting/(?:savepoints/\w+|detached/\d+))/(?:savepoint|detached)\.json")
_VERSION = re.compile(r"/lake/_delta_log/\d{20}\.json")
_CONDENSED = re.compile(r"/lake/_delta_log/(?:\d{20}\.checkpoint\.parquet|_last_checkpoint)")
_LEDGER = re.compile(r"/files/_cutline/ledger\.json")
_PUBLISHED = re.compile(r"/files/cutline_epoch=(?P<epoch>\d+)/.*\.parquet")
_DATABASES = ("/storage/counting/coordinator.sqlite", "/base/base.sqlite")


@dataclass
class Spy:
    """Looks for reliances in one recording."""

    history: History
    found: list[Reliance] = field(default_factory=list)

    @classmethod
    def look(cls, history: History, without: Callable[[Sync], bool] = lambda _: False) -> list[Reliance]:
        """``without``: syncs that do not count, as if they were not in the source."""
        history.leave_out(without)
        spy = cls(history)
        for path, presences in list(spy.history.by_path.items()):
            for presence in presences:
                if not presence.is_folder:
                    spy._look_at(path, presence)
        spy._look_at_notes()
        spy._look_at_databases()
        return spy.found

    # ------------------------------------------------------------------ what is required

    def _require(self, who: Presence | str, path: str, at: int, *, stays: bool = False) -> None:
        """A file is certain to survive at the moment; ``stays``: and is not deleted as long as ``who`` may be there."""
        name = who if isinstance(who, str) else who.path
        target = self.history.at(path, at)
        if target is None:
            self.found.append(Reliance(name, path, "it is not there", at))
        elif not self.history.content_certain(target, at):
            self.found.append(Reliance(name, path, "its content is not synced", at))
        elif not self.history.name_certain(target, at):
            self.found.append(Reliance(name, path, "its name is not synced", at))
        elif stays and isinstance(who, Presence) and self._is_deleted_before(target, who):
            self.found.append(Reliance(name, path, "it is deleted first", target.until))

    def _is_deleted_before(self, target: Presence, who: Presence) -> bool:
        """Not if both go in one step, or the file is only replaced."""
        is_gone = target.until != who.until and self.history.at(target.path, target.until) is None
        return (
            is_gone
            and target.until < self.history.removal_certain(who)
            and not (self._is_given_up(who, target.until) or self._is_detached(target, who))
        )

    def _is_given_up(self, who: Presence, at: int) -> bool:
        """Whether a generation has gone back to before this checkpoint or entry."""
        manifest, entry = _EPOCH.fullmatch(who.path), _ENTRY.fullmatch(who.path)
        for one in self.history.below("/storage/counting/generations", at):
            record: GenerationRecord | None = self._body(one, "generation", GenerationRecord)
            if record is None or record.restored_epoch is None:
                continue
            if manifest is not None and record.restored_epoch < int(manifest["epoch"]):
                return True
            spans = record.lineage.get(OperatorId(entry["operator"]), []) if entry is not None else []
            if entry is not None and spans:
                generation, seq = Generation(int(entry["generation"][1:])), Position(int(entry["seq"]))
                if generation < record.generation and not lineage_of(spans).shows(generation, seq):
                    return True
        return False

    def _is_detached(self, target: Presence, who: Presence) -> bool:
        """Whether a checkpoint needs no logs any more: all it had in flight is stored with it."""
        epoch = _EPOCH.fullmatch(who.path)
        if epoch is None or not target.path.startswith(f"{epoch['root']}/channels/"):
            return False
        aside = f"{epoch['root']}/detached/{epoch['epoch']}"
        if self.history.at(f"{aside}/detached.json", target.until) is None:
            return False
        self._require(who, f"{aside}/detached.json", target.until, stays=True)
        self._require(who, f"{aside}{target.path.removeprefix(epoch['root'])}", target.until, stays=True)
        return True

    def _look_at(self, path: str, presence: Presence) -> None:
        looks: list[tuple[re.Pattern[str], Callable[[Presence, re.Match[str]], None]]] = [
            (_MANIFEST, self._manifest),
            (_RECORD, self._record),
            (_ENTRY, self._entry),
            (_GENERATION, self._generation),
            (_CARD, self._card),
            (_VERSION, self._version),
            (_PUBLISHED, self._published),
        ]
        for pattern, look in looks:
            if match := pattern.fullmatch(path):
                look(presence, match)
        if "/lost-" not in path and not path.startswith(("/base/", "/storage/counting/coordinator")):
            self._itself(presence)

    def _itself(self, presence: Presence) -> None:
        """A file with a checksum or a fixed form has all its content when it gets its name."""
        is_record = any(one.fullmatch(presence.path) for one in (_MANIFEST, _RECORD, _GENERATION, _CARD))
        if is_record and not self.history.content_certain(presence, presence.since):
            self.found.append(Reliance(presence.path, presence.path, "it is named before it is synced", presence.since))

    # ------------------------------------------------------------------ records

    def _body(self, presence: Presence, kind: str, type_: Any) -> Any:
        key = (presence.node, kind)
        if key not in self.history.decoded:
            data = self.history.content(presence)
            self.history.decoded[key] = None if records.kind_of(data) != kind else records.decode(kind, data, type_)
        return self.history.decoded[key]

    def _layout(self, root: str) -> Layout:
        return Layout(Path(root).parent, Path(root).name)

    def _manifest(self, presence: Presence, match: re.Match[str]) -> None:
        manifest: Manifest | None = self._body(presence, "manifest", Manifest)
        if manifest is None:
            return  # a tombstone
        if not self._is_downloaded(presence, match):
            # The end of a savepoint is the end of its card.
            stays = "/savepoints/" not in match["root"]
            self._checkpoint(presence, manifest, self._layout(match["root"]), stays=stays)

    def _is_downloaded(self, presence: Presence, match: re.Match[str]) -> bool:
        """Records from the remote tier come before their content, which is checked before they are restored.

        They are renamed into place; records that are made here get a second name.
        """
        is_renamed = any(one.until == presence.since for one in self.history.by_node[presence.node])
        return match["root"] in _LOCAL and is_renamed

    def _checkpoint(self, presence: Presence, manifest: Manifest, layout: Layout, *, stays: bool) -> None:
        at = presence.since
        for path in record_paths(manifest, layout).values():
            self._require(presence, str(path), at, stays=stays)
            if (found := self.history.at(str(path), at)) is not None:
                for blob in blobs_of(self._body(found, "operator", OperatorRecord)):
                    self._require(presence, str(layout.blob(blob.sha256)), at, stays=stays)
        for path in entry_paths(manifest, layout):
            self._entry_needed(presence, path, at, stays=stays)

    def _entry_needed(self, presence: Presence, path: Path, at: int, *, stays: bool) -> None:
        packed = f"{path}{PACKED_SUFFIX}"
        name = packed if self.history.at(packed, at) is not None else str(path)
        self._require(presence, name, at, stays=stays)
        found = self.history.at(name, at)
        if found is None:
            return
        data = self.history.content(found)
        entry = codec.decode(unpacked(data, name) if name == packed else data, name)
        for segment in entry.segments if isinstance(entry, DataEntry) else ():
            self._require(presence, str(codec.data_dir(path.parents[1]) / segment.name), at, stays=stays)

    def _record(self, presence: Presence, match: re.Match[str]) -> None:
        record: OperatorRecord | None = self._body(presence, "operator", OperatorRecord)
        if record is None or self._is_downloaded(presence, match):
            return
        layout = self._layout(match["root"])
        for blob in blobs_of(record):
            self._require(presence, str(layout.blob(blob.sha256)), presence.since)
        if match["root"] in _LOCAL:
            self._require(presence, self._barrier_of(record, layout, presence.since), presence.since)

    def _barrier_of(self, record: OperatorRecord, layout: Layout, at: int) -> str:
        """An earlier process may have written the barrier for which this one acknowledges the cut."""
        generations = range(record.generation, 0, -1)
        paths = [
            str(codec.entry_path(layout.channel(record.operator), Generation(one), record.barrier))
            for one in generations
        ]
        return next((path for path in paths if self.history.at(path, at) is not None), paths[0])

    def _entry(self, presence: Presence, match: re.Match[str]) -> None:
        if match["root"] not in _LOCAL or self._is_downloaded(presence, match):
            return
        entry: LogEntry = self._body(presence, "entry", LogEntry)
        layout, at = self._layout(match["root"]), presence.since
        if not isinstance(entry, DataEntry):
            return
        if not self.history.content_certain(presence, at):
            self.found.append(Reliance(presence.path, presence.path, "a batch is named before it is synced", at))
        for segment in entry.segments:
            name = codec.data_dir(Path(presence.path).parents[1]) / segment.name
            self._require(presence, str(name), at, stays=True)
        before = codec.entry_path(Path(presence.path).parents[1], entry.generation, Position(entry.seq - 1))
        if self._is_put_back(presence, layout):
            self._require(presence, str(layout.put_back), at)
        elif self.history.at(str(before), at) is not None:
            self._require(presence, str(before), at)
        generation = str(layout.generation(entry.generation))
        if self.history.at(generation, at) is not None:
            self._require(presence, generation, at)
        for sink, batch in entry.staged.items():
            for piece in batch.pieces if sink in ("files", "lake", "base") else ():
                self._require(presence, self._staged_path(sink, piece["path"]), at)

    def _is_put_back(self, presence: Presence, layout: Layout) -> bool:
        """By a restore. Only its generation relies on it: until then the next start removes what the record names."""
        record = self.history.at(str(layout.put_back), presence.since)
        names = self._body(record, "put-back", PutBack).names if record is not None else ()
        return layout.name(Path(presence.path)) in names

    def _staged_path(self, sink: str, path: str) -> str:
        if sink == "base":  # the one sink whose files are beside its target
            return f"/base/base.sqlite.cutline_staged/counting/base/{path}"
        return f"/{sink}/{path}"

    def _generation(self, presence: Presence, match: re.Match[str]) -> None:
        record: GenerationRecord | None = self._body(presence, "generation", GenerationRecord)
        if record is None or match["root"] not in _LOCAL or self._is_downloaded(presence, match):
            return
        layout, at = self._layout(match["root"]), presence.since
        for name, spans in record.lineage.items():
            lineage = lineage_of(spans)
            start = lineage.spans[-1].start
            if start > lineage.spans[0].start and record.generation == lineage.generation:
                last = Position(start - 1)
                path = str(codec.entry_path(layout.channel(name), lineage.owner(last), last))
                self._require(presence, path, at)
        if record.restored_epoch is not None:
            manifest = self.history.at(str(layout.manifest(record.restored_epoch)), at)
            if manifest is not None:
                self._require(presence, manifest.path, at)
                self._checkpoint(presence, self._body(manifest, "manifest", Manifest), layout, stays=False)
        for name, generation in record.spark_dirs.items():
            if generation == record.generation:
                folder = str(layout.spark_checkpoint_dir(name, Generation(generation)))
                self._require(presence, folder, at)
                for one in self.history.below(folder, at):
                    self._require(presence, one.path, at)

    def _card(self, presence: Presence, match: re.Match[str]) -> None:
        for one in self.history.below(match["root"], presence.since):
            if one.path != presence.path and "/.tmp-" not in one.path:
                self._require(presence, one.path, presence.since, stays=True)

    # ------------------------------------------------------------------ sinks

    def _version(self, presence: Presence, _: re.Match[str]) -> None:
        for line in self.history.content(presence).splitlines():
            if add := msgspec.json.decode(line).get("add"):
                self._require(presence, f"/lake/{add['path']}", presence.since)

    def _published(self, presence: Presence, match: re.Match[str]) -> None:
        folder = self.history.at(f"/files/cutline_epoch={match['epoch']}", presence.since)
        below = folder.node if folder is not None else None
        if not self.history.content_certain(presence, presence.since):
            self.found.append(Reliance("readers", presence.path, "its content is not synced", presence.since))
        if not self.history.name_certain(presence, presence.since, below=below):
            self.found.append(Reliance("readers", presence.path, "its name is not synced", presence.since))
        manifest = f"/storage/counting/checkpoints/{int(match['epoch']):012d}/manifest.json"
        if int(match["epoch"]) < 1 << 31:  # with immediate publishing it is not an epoch
            self._require(presence, manifest, presence.since)

    # ------------------------------------------------------------------ what was said

    def _look_at_notes(self) -> None:
        for note in self.history.recording.notes:
            if note.text.startswith("published "):
                self._said_published(note.at)
            elif note.text.startswith("recovered"):
                self._said_recovered(note.at)
            elif note.text.startswith("cloned"):
                self._said_cloned(note)
            elif note.text.startswith("saved"):
                self._require("a person", "/storage/counting/savepoints/kept/savepoint.json", note.at)

    def _said_published(self, at: int) -> None:
        who = "the coordinator"
        for path in list(self.history.by_path):
            relied = (_PUBLISHED, _VERSION, _CONDENSED, _LEDGER)
            is_relied = any(pattern.fullmatch(path) for pattern in relied)
            is_database = path in _DATABASES or path.removesuffix("-wal") in _DATABASES
            if (is_relied or is_database) and self.history.at(path, at) is not None:
                self._require(who, path, at)
        manifests = [one.path for one in self.history.below("/storage/counting/checkpoints", at)]
        newest = max((path for path in manifests if _MANIFEST.fullmatch(path)), default=None)
        if newest is not None:
            self._require(who, newest, at)

    def _said_recovered(self, at: int) -> None:
        """What a rewind has removed does not come back."""
        for path, presences in self.history.by_path.items():
            for one in presences if _PUBLISHED.fullmatch(path) else ():
                if one.until < at and self.history.at(path, at) is None and self.history.removal_certain(one) > at:
                    self.found.append(Reliance("the coordinator", path, "its removal is not synced", at))

    def _said_cloned(self, note: Note) -> None:
        root = f"/storage/{note.text.split()[1]}"
        for one in [self.history.at(root, note.at), *self.history.below(root, note.at)]:
            if one is not None:
                self._require("a person", one.path, note.at)

    def _look_at_databases(self) -> None:
        """A thread that has written to a database's log syncs it before it does anything else on the disk."""
        recording = self.history.recording
        logs = {one.node for path in _DATABASES for one in self.history.by_path.get(f"{path}-wal", ())}
        files = logs | {one.node for path in _DATABASES for one in self.history.by_path.get(path, ())}
        steps: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
        for change in recording.changes:
            steps[change.thread].append((change.at, "write" if change.file in logs else "other", change.file))
        for sync in recording.syncs:
            if not self.history.without(sync):
                steps[sync.thread].append((sync.begun, "sync", sync.node))
        for own in steps.values():
            unsynced: dict[int, int] = {}
            for at, kind, node in sorted(own):
                if kind == "write":
                    unsynced.setdefault(node, at)
                elif kind == "sync":
                    unsynced.pop(node, None)
                if node not in files and unsynced:
                    path = recording.paths[next(iter(unsynced))]
                    self.found.append(Reliance("a thread", path, "its transaction is not synced", at))
                    unsynced.clear()
