"""What detached checkpoints had in flight: links to the entries and segments that a restore reads.

A checkpoint of which this is stored needs no logs, so that a sparse history costs little: the logs hold what the newest
checkpoints need. A restore puts the files back into the logs. Until its generation is entered, nothing depends on that,
and what was put back would be a stray part of the present logs: a record names it, and the next start removes it. The
same goes for what a download puts there, from the remote tier or a savepoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.base.paths import inside
from cutline.channels.in_flight import entry_paths, segments_of
from cutline.channels.segment_store import SegmentStore
from cutline.errors import DamagedRecordError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import MOST, Epoch, Generation
from cutline.model.layout import Layout

_CARD, _CARD_KIND = "detached.json", "detached"
_PUT_BACK_KIND = "put-back"
#: Of a download: no generation relies on what it leaves in the logs.
_NEVER = Generation(MOST)

T = TypeVar("T")


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: all that the checkpoint had in flight is here."""

    epoch: Epoch
    files: int


class PutBack(msgspec.Struct, frozen=True, kw_only=True):
    """What a start puts back into the logs. It stays there once the generation is entered."""

    epoch: Epoch
    generation: Generation
    #: Below the flow's folder.
    names: list[str]


class DetachedLogs:
    """The detached checkpoints of one flow."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def has(self, epoch: Epoch) -> bool:
        return (self._layout.detached_epoch(epoch) / _CARD).exists()

    def epochs(self) -> list[Epoch]:
        """All of which something is stored, whole or not."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self._layout.detached)
            return sorted(Epoch(int(name)) for name in names if name.isascii() and name.isdigit())
        return []

    def holder(self, epoch: Epoch) -> Layout:
        """Whose channels hold what the epoch had in flight: the flow's, or those stored with the epoch."""
        return Layout(self._layout.detached, f"{epoch:012d}") if self.has(epoch) else self._layout

    def why_not_whole(self, manifest: Manifest) -> str:
        """What is missing of the rows in flight, for a person; empty: nothing. Looks for files, reads only a card."""
        if not self.has(manifest.epoch):
            paths = entry_paths(manifest, self._layout)
            missing = next((path for path in paths if not path.exists()), None)
            return (
                ""
                if missing is None
                else f"entry {missing.stem.lstrip('0') or '0'} of {missing.parents[1].name} is gone"
            )
        try:
            card, held = self._held(manifest.epoch)
        except DamagedRecordError as error:
            return str(error)
        return "" if len(held) == card.files else f"{len(held)} of {card.files} files in flight are left"

    def _held(self, epoch: Epoch) -> tuple[Card, list[Path]]:
        folder = self._layout.detached_epoch(epoch)
        card = records.load(_CARD_KIND, folder / _CARD, Card, flow=self._layout.flow)
        return card, [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _CARD]

    # ------------------------------------------------------------------ detaching

    def store(self, manifest: Manifest) -> None:
        """Keep what a restore to this epoch reads from the logs. Raises DamagedRecordError if something is missing."""
        folder = self._layout.detached_epoch(manifest.epoch)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was not finished
        durable.make_dir(folder)
        count = 0
        for path in self._in_flight(manifest):
            target = folder / self._layout.name(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
            count += 1
        durable.sync_tree(folder)
        crashpoint("detached")
        card = Card(epoch=manifest.epoch, files=count)
        durable.replace(folder / _CARD, records.encode(_CARD_KIND, card))

    def _in_flight(self, manifest: Manifest) -> Iterator[Path]:
        for path in entry_paths(manifest, self._layout):
            if not path.exists():
                raise DamagedRecordError("an entry in flight is missing", path=path, epoch=manifest.epoch)
            segments = SegmentStore.of(path.parents[1])
            for segment in segments_of(path)[1]:
                yield segments.local_copy(segment.name)
            yield path

    def store_downloaded(self, manifest: Manifest, download: Callable[[], T]) -> T:
        """Run a download that puts what the checkpoint had in flight into the logs; leave it with the checkpoint only.

        In the logs it would stand apart from the present entries, and a start that is refused or killed would leave a
        log with a hole, which no later one can resume.
        """
        self.take_away()
        names = [self._layout.name(path) for path in entry_paths(manifest, self._layout) if not path.exists()]
        self._note(PutBack(epoch=manifest.epoch, generation=_NEVER, names=names))
        downloaded = download()
        crashpoint("downloaded-aside")
        self.remove(manifest.epoch)  # it may be what was damaged
        self.store(manifest)
        self.take_away()
        return downloaded

    def remove(self, epoch: Epoch) -> None:
        """The checkpoint is gone. Its card goes first: half of the files are no detached checkpoint."""
        folder = self._layout.detached_epoch(epoch)
        with contextlib.suppress(FileNotFoundError):
            (folder / _CARD).unlink()
            durable.fsync_dir(folder)
        shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------------ restoring

    def put_back(self, manifest: Manifest, generation: Generation) -> None:
        """Put what the checkpoint had in flight back into the logs, for a generation that is about to be entered."""
        self.take_away()  # what an attempt with another checkpoint has put back
        if not self.has(manifest.epoch):
            return
        folder = self._layout.detached_epoch(manifest.epoch)
        card, held = self._held(manifest.epoch)
        if len(held) != card.files:
            raise DamagedRecordError(
                f"{len(held)} of {card.files} files in flight are left", path=folder, epoch=manifest.epoch
            )
        missing = {path: inside(self._layout.root, path.relative_to(folder).as_posix()) for path in held}
        missing = {path: target for path, target in missing.items() if not target.exists()}
        names = [self._layout.name(target) for target in missing.values()]
        self._note(PutBack(epoch=manifest.epoch, generation=generation, names=names))
        entries, segments = _apart(missing)
        for some in (segments, entries):
            for path in some:
                durable.make_dir(missing[path].parent)
                _link(path, missing[path])
                crashpoint("put-back")
            for parent in {missing[path].parent for path in some}:
                durable.fsync_dir(parent)

    def settle(self, entered: Generation | None) -> None:
        """Remove what a start has put back, unless its generation was entered; ``entered``: the newest that was."""
        record = self._record()
        if record is not None and entered is not None and record.generation <= entered:
            self._layout.put_back.unlink(missing_ok=True)
        else:
            self.take_away()

    def take_away(self) -> None:
        record = self._record()
        if record is None:
            return
        for some in _apart(inside(self._layout.root, name) for name in record.names):
            for path in some:
                path.unlink(missing_ok=True)
            for parent in {path.parent for path in some if path.parent.is_dir()}:
                durable.fsync_dir(parent)
        self._layout.put_back.unlink(missing_ok=True)

    def _note(self, record: PutBack) -> None:
        durable.replace(self._layout.put_back, records.encode(_PUT_BACK_KIND, record))

    def _record(self) -> PutBack | None:
        path = self._layout.put_back
        return records.load(_PUT_BACK_KIND, path, PutBack, flow=self._layout.flow) if path.exists() else None


def _apart(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Entries, and the segments that they name: these are there first, and go last."""
    known = list(paths)
    return [one for one in known if one.suffix == ".json"], [one for one in known if one.suffix != ".json"]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise DamagedRecordError("a file in flight is missing", path=source) from error
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        durable.fsync_file(target)
