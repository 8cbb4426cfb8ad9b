"""Follows a channel's log that this process or another one writes.

The files are the truth. ``TailedLog`` polls for the next entry through the lineage; a hint only makes it look sooner.
An entry counts once it can be read whole and every entry before it has been read: files under temporary names, torn
files and entries of a generation outside the lineage are ignored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.log import ChannelLog
from cutline.errors import DamagedRecordError, InvariantViolation
from cutline.model.cut import InFlight
from cutline.model.entries import Entry
from cutline.model.ids import START, Epoch, OperatorId, Position
from cutline.protocol.history.lineage import Lineage

log = get_logger(__name__)

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.5

Listener = Callable[[Entry], None]


class FollowedLog(Protocol):
    """What a consumer needs from an input's log. A ``ChannelLog`` of this process is the fastest implementation."""

    @property
    def lineage(self) -> Lineage: ...

    def on_append(self, listener: Listener) -> list[Entry]:
        """Call ``listener`` for every later entry, in order; returns the present entries, with none in between."""
        ...

    def remove_listener(self, listener: Listener) -> None:
        """Undo ``on_append``."""
        ...

    def in_flight_at(self, epoch: Epoch, first: Position) -> InFlight | None:
        """What a consumer at ``first`` has yet to read before the epoch's barrier; None while there is no barrier."""
        ...

    def follow_fork(self, lineage: Lineage) -> None:
        """The writer has continued in another generation, after the entries read here."""
        ...


class TailedLog:
    """The log of a channel that another process writes; this one never writes to it."""

    def __init__(self, operator: OperatorId, folder: Path, lineage: Lineage, first: Position = START) -> None:
        """``first``: entries below are not needed here, and may be deleted."""
        self.operator = operator
        self._folder = folder
        #: The entries read so far; its files are never changed.
        self._read = ChannelLog(operator, folder, lineage)
        self._next = first
        self._is_positioned = False
        self._lock = threading.Lock()
        self._hinted = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ for consumers

    @property
    def lineage(self) -> Lineage:
        return self._read.lineage

    def on_append(self, listener: Listener) -> list[Entry]:
        return self._read.on_append(listener)

    def remove_listener(self, listener: Listener) -> None:
        self._read.remove_listener(listener)

    def in_flight_at(self, epoch: Epoch, first: Position) -> InFlight | None:
        return self._read.in_flight_at(epoch, first)

    def entries(self) -> list[Entry]:
        """The entries read so far."""
        return self._read.entries()

    def evict_below(self, below: Position) -> None:
        """Remove entries below a position from memory: they were read and are not needed here any more."""
        self._read.evict_below(below)

    # ------------------------------------------------------------------ following

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Poll on a separate thread; ``on_fatal`` is called if the log cannot be followed."""
        self._thread = threading.Thread(
            target=self._follow, args=(on_fatal,), name=f"cutline-tail-{self.operator}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped = True
        self._hinted.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def hint(self) -> None:
        """There may be a new entry: look now."""
        self._hinted.set()

    def follow_fork(self, lineage: Lineage) -> None:
        """The writer has continued in another generation.

        The fork must come after the entries read here: a reader that has read entries which the new generation writes
        anew must be restored.
        """
        with self._lock:
            if lineage.generation <= self._read.lineage.generation:
                return  # repeated, or late
            forked = self._read.lineage.parts_from(lineage)  # perhaps before the last fork: others may have been missed
            if forked is not None and forked < self._next:
                raise InvariantViolation(
                    f"this reader has read up to {self._next}, but generation {lineage.owner(forked)} writes from "
                    f"{forked} on",
                    channel=self.operator,
                )
            self._read.lineage = lineage
        self.hint()

    def _follow(self, on_fatal: Callable[[BaseException], None]) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._is_stopped:
            try:
                found = self.poll()
                if not found and pause >= _LONGEST_PAUSE_SECONDS:
                    self.check_for_hole()
            except BaseException as error:  # the outermost loop: an unreadable log must not look idle
                log.error("input_log_not_followed", channel=self.operator, exc_info=True)
                on_fatal(error)
                return
            pause = _FIRST_PAUSE_SECONDS if found else min(pause * 2, _LONGEST_PAUSE_SECONDS)
            if self._hinted.wait(pause):
                self._hinted.clear()
                pause = _FIRST_PAUSE_SECONDS

    def poll(self) -> int:
        """Read new entries and tell the listeners; returns the number of entries read."""
        found = 0
        with self._lock:
            if not self._is_positioned:
                self._next, self._is_positioned = self._first_there(), True
            while (entry := self._load(self._next)) is not None:
                self._read.accept_followed(entry)
                self._next = Position(self._next + 1)
                found += 1
        return found

    def check_for_hole(self) -> None:
        """Raises DamagedRecordError if the next entry is damaged or deleted: later entries exist, but it is missing."""
        with self._lock:
            beyond = [seq for seq in self._visible() if seq > self._next]
            if beyond and self._load(self._next) is None:
                raise DamagedRecordError(
                    f"entry {self._next} cannot be read, but entry {min(beyond)} exists", channel=self.operator
                )

    def _first_there(self) -> Position:
        """The first position to read: the log may have been truncated below what is needed here."""
        there = [seq for seq in self._visible() if seq >= self._next]
        return min(there, default=self._next)

    def _visible(self) -> list[Position]:
        """Positions at which the lineage shows an entry of the right generation."""
        found: list[Position] = []
        for generation, begin, end in self._read.lineage.ranges():
            try:
                names = os.listdir(codec.generation_dir(self._folder, generation))
            except FileNotFoundError:
                continue
            numbers = (int(name.removesuffix(".json")) for name in names if not durable.is_temporary(name))
            found += [Position(seq) for seq in numbers if begin <= seq and (end is None or seq < end)]
        return found

    def _load(self, seq: Position) -> Entry | None:
        """The entry at a position; None while there is none, or only a torn one."""
        lineage = self._read.lineage
        if seq < lineage.spans[0].start:
            return None
        generation = lineage.owner(seq)
        try:
            entry = codec.load(codec.entry_path(self._folder, generation, seq))
        except FileNotFoundError:
            return None
        except DamagedRecordError:
            return None  # torn by a power cut, or not visible whole yet; ``check_for_hole`` detects damage
        if (entry.generation, entry.seq) != (generation, seq):
            raise DamagedRecordError(
                f"the file of entry {seq} holds another entry", channel=self.operator, generation=generation
            )
        return entry
