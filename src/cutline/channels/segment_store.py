"""Where the segments of a flow's channels are stored: in the channels' own folders, or in an object store.

Executors on several machines need a place that all of them can reach. A small file beside the channels records the
place, so a process that has the flow's folder finds the rows. The folder of a channel may hold copies of segments that
are in the store: those downloaded with a remote checkpoint, and those downloaded to be copied into one.

A flow's folder that is rebuilt on another host gets its own place in the store. The replaced host may not know it yet
and deletes what its own checkpoints no longer need; it must not find segments that its successor reads.
"""

from __future__ import annotations

import contextlib
import secrets
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from cutline.base import durable, records
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.segments import crc32_of
from cutline.errors import DamagedRecordError, MissingObject, StoreError
from cutline.model.entries import Segment
from cutline.objects import open_store
from cutline.ports.engine import SegmentPlace
from cutline.ports.objects import ObjectInfo, ObjectStore

log = get_logger(__name__)

#: In the folder of all channels. The gated source reads it too.
PLACE_FILE = "segments.json"
_KIND = "segments"


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """The places of the segments of all channels of a flow."""

    #: Every channel has a folder in it; its ``url`` is empty when the rows are in the flow's own folder.
    place: SegmentPlace
    #: Former places, which may still hold rows written before the change, the newest first.
    before: list[SegmentPlace] = []


_AT_HOME = Whereabouts(place=SegmentPlace(url=""))


def whereabouts(channels_dir: Path) -> Whereabouts:
    path = channels_dir / PLACE_FILE
    return records.load(_KIND, path, Whereabouts) if path.exists() else _AT_HOME


def choose_place(channels_dir: Path, base: str, options: Mapping[str, str]) -> Whereabouts:
    """Choose where rows are written from now on: below ``base``, a URL, or in the flow's own folder if it is empty.

    Rows in former places are still found, until ``remove_former_places``.
    """
    now = whereabouts(channels_dir)
    if base and now.place.url.rpartition("/")[0] == base:
        place = SegmentPlace(url=now.place.url, options=dict(options))
    else:
        place = SegmentPlace(
            url=f"{base}/{secrets.token_hex(4)}" if base else "", options=dict(options) if base else {}
        )
    if place == now.place:
        return now
    is_other = place.url != now.place.url
    chosen = Whereabouts(place=place, before=[now.place, *now.before] if is_other else now.before)
    durable.make_dir(channels_dir)
    durable.replace(channels_dir / PLACE_FILE, records.encode(_KIND, chosen))
    return chosen


def remove_former_places(channels_dir: Path) -> None:
    """Nothing in former places is needed any more: remove them from the record, and delete our objects there."""
    now = whereabouts(channels_dir)
    if not now.before:
        return
    durable.replace(channels_dir / PLACE_FILE, records.encode(_KIND, Whereabouts(place=now.place)))
    for former in now.before:
        if former.url:
            _delete_all(former)


def _delete_all(place: SegmentPlace) -> None:
    try:
        store = open_store(place.url, place.options)
        store.delete([info.path for info in store.walk()])
    except StoreError as error:
        log.warning("former_segments_left", place=place.url, reason=str(error))


class SegmentStore:
    """The segments of one channel."""

    def __init__(self, channel_dir: Path, now: Whereabouts) -> None:
        self._folder = codec.data_dir(channel_dir)
        self._place = _of_channel(now.place, channel_dir.name) if now.place.url else None
        self._store = _open(self._place) if self._place is not None else None
        self._before = [_open(_of_channel(one, channel_dir.name)) for one in now.before if one.url]

    @classmethod
    def of(cls, channel_dir: Path) -> SegmentStore:
        """The segments of the channel in this folder, at the recorded places."""
        return cls(channel_dir, whereabouts(channel_dir.parent))

    @property
    def _stores(self) -> list[ObjectStore]:
        """The object stores that may hold segments, the likeliest first."""
        return [*([self._store] if self._store is not None else []), *self._before]

    @property
    def place(self) -> SegmentPlace:
        """Where executors write segments."""
        return self._place or SegmentPlace(url=str(self._folder))

    def appended(self) -> None:
        """Executors have written durable segments; make their names durable too."""
        if self._store is None:
            durable.fsync_dir(self._folder)

    # ------------------------------------------------------------------ checking

    def check_reachable(self) -> None:
        """Raise StoreError if the object store does not answer now."""
        for store in self._stores:
            store.find("is-reachable")

    def problem(self, segment: Segment, *, deep: bool) -> str | None:
        """What is wrong with a segment; ``deep``: reads every byte. Raises StoreError if the store does not answer."""
        problem = self._problem_here(segment, deep=deep)
        for store in self._stores:
            if problem is None:
                break
            problem = _problem_in(store, segment, deep=deep)
        return problem

    def ensure(self, segment: Segment, *, deep: bool) -> None:
        """Ensure that executors find the segment; copy it if necessary. Raises DamagedRecordError if there is no intact
        copy, StoreError if a store does not answer.
        """
        problem = self._problem_here(segment, deep=deep)
        if self._store is not None:
            here, problem = problem, _problem_in(self._store, segment, deep=deep)
            if problem is not None and here is None:
                self._store.upload(segment.name, self._folder / segment.name)
                return
        if problem is None:
            return
        for former in self._before:
            if _problem_in(former, segment, deep=deep) is None:
                self._fetch(former, segment.name)
                if self._store is not None:
                    self._store.upload(segment.name, self._folder / segment.name)
                return
        raise DamagedRecordError(problem, segment=segment.name)

    def local_copy(self, name: str) -> Path:
        """The path of the segment in the channel's folder; downloads it if a store has it. Raises StoreError."""
        path = self._folder / name
        for store in self._stores if not path.exists() else ():
            with contextlib.suppress(MissingObject):
                self._fetch(store, name)
                break
        return path

    def _fetch(self, store: ObjectStore, name: str) -> None:
        durable.make_dir(self._folder)
        (self._folder / name).unlink(missing_ok=True)
        store.download(name, self._folder / name)

    def _problem_here(self, segment: Segment, *, deep: bool) -> str | None:
        path = self._folder / segment.name
        try:
            size = path.stat().st_size
            return _difference(segment, size, lambda: crc32_of(path), deep=deep)
        except FileNotFoundError:
            return "the segment is missing"
        except OSError as error:
            return f"the segment cannot be read: {error.strerror}"

    # ------------------------------------------------------------------ collecting

    def delete(self, names: Collection[str]) -> None:
        """Delete these segments. An unavailable store keeps them for now, and a later ``collect`` deletes them."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        if self._store is not None and names:
            try:
                self._store.delete(names)
            except StoreError as error:
                log.warning("segments_left", place=self._store.url, count=len(names), reason=str(error))

    def files_here(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []

    def stored(self) -> list[ObjectInfo]:
        """The segments in the object store, if there is one. Raises StoreError."""
        return list(self._store.walk()) if self._store is not None else []

    def delete_all(self) -> None:
        """Delete all segments of the channel. Idempotent. Raises StoreError."""
        if self._store is not None:
            self._store.delete([info.path for info in self._store.walk()])
        for path in self.files_here():
            path.unlink(missing_ok=True)

    def collect(self, named: Collection[str]) -> int:
        """Delete all segments but the named ones, while none is being written; returns how many."""
        others = {path.name for path in self.files_here() if path.name not in named}
        with contextlib.suppress(StoreError):
            others.update(info.path for info in self.stored() if info.path not in named)
        self.delete(others)
        return len(others)


def _of_channel(place: SegmentPlace, channel: str) -> SegmentPlace:
    return SegmentPlace(url=f"{place.url}/{channel}", options=place.options)


def _open(place: SegmentPlace) -> ObjectStore:
    return open_store(place.url, place.options)


def _problem_in(store: ObjectStore, segment: Segment, *, deep: bool) -> str | None:
    info = store.find(segment.name)
    if info is None:
        return "the segment is missing"
    return _difference(segment, info.size_bytes, lambda: zlib.crc32(store.read(segment.name)), deep=deep)


def _difference(segment: Segment, size_bytes: int, crc32: Callable[[], int], *, deep: bool) -> str | None:
    if size_bytes != segment.size_bytes:
        return f"the segment has {size_bytes} bytes instead of {segment.size_bytes}"
    if deep and crc32() != segment.crc32:
        return "the segment does not match its checksum"
    return None
