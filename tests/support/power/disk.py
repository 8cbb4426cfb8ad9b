"""The states of a disk that a power cut may leave, built from a recording.

A file system promises only what was synced: a file's content up to its last finished sync, a folder's names up to the
folder's. What it keeps of the rest differs, and so do the policies here.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.power.recording import Change, Entry, Names, Recording, Sync, apply

POLICIES = {
    "strict": "only what was synced",
    "meta": "every name, only synced content: files are there and empty",
    "ext4": "names in order up to some moment after the last sync of anything, any unsynced content",
    "folders": "in each folder names in order up to some moment, any unsynced content",
    "subset": "any unsynced names, any unsynced content",
    "all": "everything: the process died, the machine did not",
}


@dataclass
class State:
    """What is on the disk."""

    folders: dict[int, dict[str, Entry]]
    contents: dict[int, bytes]

    def digest(self) -> str:
        """Equal for equal states."""
        digest = hashlib.sha256()
        for path, entry in self.walk():
            digest.update(f"{path}\0{entry.is_folder}\0".encode())
            if not entry.is_folder:
                digest.update(hashlib.sha256(self.contents[entry.node]).digest())
        return digest.hexdigest()

    def walk(self, folder: int = 0, below: str = "") -> Iterable[tuple[str, Entry]]:
        for name, entry in sorted(self.folders[folder].items()):
            yield f"{below}/{name}", entry
            if entry.is_folder:
                yield from self.walk(entry.node, f"{below}/{name}")

    def build(self, target: Path) -> None:
        """Write it to a folder, which is emptied first."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        written: dict[int, str] = {}
        for path, entry in self.walk():
            place = f"{target}{path}"
            if entry.is_folder:
                os.mkdir(place)
            elif entry.node in written:
                os.link(written[entry.node], place)
            else:
                with open(place, "wb") as file:
                    file.write(self.contents[entry.node])
                written[entry.node] = place


@dataclass
class Disk:
    """The disk of a recorded story."""

    recording: Recording
    #: Syncs that do not count: as if the call were not in the source.
    without: Callable[[Sync], bool] = field(default=lambda _: False)

    def __post_init__(self) -> None:
        self._changes: Mapping[int, list[Change]] = defaultdict(list)
        for change in self.recording.changes:
            self._changes[change.file].append(change)
        self._syncs = sorted(
            (sync for sync in self.recording.syncs if not self.without(sync)), key=lambda one: one.done
        )

    def synced(self, at: int) -> dict[int, int]:
        """Per file and folder: what happened to it before this moment is durable at the moment ``at``."""
        found: dict[int, int] = {}
        for sync in self._syncs:
            if sync.done > at:
                break
            found[sync.node] = max(found.get(sync.node, -1), sync.begun)
        return found

    def after(self, at: int, policy: str, chance: random.Random, *, whole: str | None = None) -> State:
        """What a power cut at this moment may leave. ``whole``: nothing below a path with this part is lost."""
        synced = self.synced(at)
        kept = self._kept_names(at, synced, policy, chance, whole)
        folders: dict[int, dict[str, Entry]] = {node: {} for node in self.recording.folders}
        for names in kept:
            for folder, name, entry in names.changes:
                if entry is None:
                    folders[folder].pop(name, None)
                else:
                    folders[folder][name] = entry
        contents = {
            entry.node: self._content(
                entry.node,
                at,
                synced.get(entry.node, -1),
                "all" if self._is_whole(entry.node, whole) else policy,
                chance,
            )
            for entry in sorted({entry for names in folders.values() for entry in names.values()})
            if not entry.is_folder
        }
        return State(folders, contents)

    def _is_whole(self, node: int, whole: str | None) -> bool:
        return whole is not None and whole in self.recording.paths[node]

    def _kept_names(
        self, at: int, synced: Mapping[int, int], policy: str, chance: random.Random, whole: str | None
    ) -> Iterable[Names]:
        last = max(synced.values(), default=-1)
        until = chance.randint(max(last, 0), at) if policy == "ext4" else at
        ends: dict[int, int] = defaultdict(lambda: chance.randint(0, at))
        likely = chance.choice([0.1, 0.5, 0.9])
        for names in self.recording.names:
            if names.at > at:
                return
            is_durable = any(synced.get(folder, -1) > names.at for folder, _, _ in names.changes)
            if not is_durable and not any(self._is_whole_name(one, whole) for one in names.changes):
                keeps = {
                    "strict": False,
                    "ext4": names.at <= until,
                    "folders": policy == "folders" and names.at <= ends[names.changes[-1][0]],
                    "subset": policy == "subset" and chance.random() < likely,
                }
                if not keeps.get(policy, True):
                    continue
            yield names

    def _is_whole_name(self, change: tuple[int, str, Entry | None], whole: str | None) -> bool:
        folder, name, _ = change
        return whole is not None and whole in f"{self.recording.paths.get(folder, '')}/{name}"

    def _content(self, file: int, at: int, synced: int, policy: str, chance: random.Random) -> bytes:
        content = bytearray()
        unsynced = []
        for change in self._changes.get(file, ()):
            if change.at < synced:
                apply(content, change)
            elif change.at <= at:
                unsynced.append(change)
        if policy not in ("strict", "meta", "all") and "/spark/" in self.recording.paths[file]:
            # Spark's files have checksums, but only on Spark: here they are whole or empty.
            policy = chance.choice(["all", "meta"])
        for change in _kept_changes(unsynced, policy, chance):
            apply(content, change)
        return bytes(content)


def _kept_changes(unsynced: list[Change], policy: str, chance: random.Random) -> list[Change]:
    if policy == "all":
        return unsynced
    if policy in ("strict", "meta") or not unsynced:
        return []
    kind = chance.choice(["whole", "whole", "none", "none", "begun", "torn", "zeros", "some"])
    count = chance.randint(0, len(unsynced))
    match kind:
        case "whole":
            return unsynced
        case "none":
            return []
        case "begun":
            return unsynced[:count]
        case "some":
            return [change for change in unsynced if chance.random() < 0.5]
        case "zeros":
            return [
                change
                if change.data is None
                else Change(change.at, change.file, change.offset, bytes(len(change.data)))
                for change in unsynced
            ]
        case _:
            return [*unsynced[:count], *_half(unsynced[count : count + 1])]


def _half(changes: list[Change]) -> list[Change]:
    return [Change(one.at, one.file, one.offset, one.data[: len(one.data) // 2]) for one in changes if one.data]
