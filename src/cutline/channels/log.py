"""One channel's log on disk: gap-free, each entry created once, one writer, any number of readers.

The writer holds the visible entries in memory; the files are the truth and are read when the log is opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from cutline.base import durable
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels import entry_files as codec
from cutline.channels.segment_store import SegmentStore
from cutline.errors import DamagedRecordError, FencedError, InvariantViolation
from cutline.model.cut import InFlight
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import NO_BATCH, START, BatchId, Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.history.log_end import Found, never_written_from

log = get_logger(__name__)


class Amount(NamedTuple):
    """The amount of data in a range of a log: entries that have rows, their rows, their bytes."""

    entries: int
    rows: int
    size_bytes: int

    def plus(self, entry: Entry) -> Amount:
        if not isinstance(entry, DataEntry) or not entry.rows:
            return self
        return Amount(self.entries + 1, self.rows + entry.rows, self.size_bytes + entry.size_bytes)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.entries - other.entries, self.rows - other.rows, self.size_bytes - other.size_bytes)


class ChannelLog:
    """The log of the channel that ``operator`` writes."""

    def __init__(self, operator: OperatorId, folder: Path, lineage: Lineage) -> None:
        self.operator = operator
        self.folder = folder
        self.lineage = lineage
        #: Visible entries, ascending and gap-free; the first is above START once the log was truncated.
        self._entries: list[Entry] = []
        #: Amounts before each visible entry, and after the last: one more than entries. A range costs one subtraction.
        self._sums: list[Amount] = [Amount(0, 0, 0)]
        #: Entries below were not read when the log was opened, and may still be needed.
        self._opened_from = START
        self.segments = SegmentStore.of(folder)
        #: Files and contents of entries that a power cut could lose, oldest first.
        self._unsynced: list[tuple[Path, bytes]] = []
        #: One thread syncs at a time: after an error, another thread's sync of the same file would succeed wrongly.
        self._syncing = threading.Lock()
        #: A sync of unsynced entries has failed: the disk may have dropped what was written, so it is written again.
        self._is_doubtful = False
        #: The file and content of an append that failed: it may exist nevertheless.
        self._tried: tuple[Path, bytes] | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Entry], None]] = []
        #: One deletion at a time: another one that deletes later entries meanwhile would leave a hole.
        self._deletion = threading.Lock()
        #: Entries that are not visible any more and whose files are not deleted yet, ascending.
        self._evicted: deque[Entry] = deque()
        #: Segments of deleted entries that are not deleted yet.
        self._unnamed: list[str] = []

    # ------------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, operator: OperatorId, folder: Path, lineage: Lineage, first: Position = START, *, is_reader: bool = False
    ) -> ChannelLog:
        """Read the visible entries from ``first`` on. Raises DamagedRecordError for a hole or a bad entry.

        ``is_reader``: nothing will be appended, and a missing folder is not created.
        """
        opened = cls(operator, folder, lineage)
        opened._opened_from = first
        if not is_reader:
            durable.make_dir(codec.data_dir(folder))
            for generation, _, _ in lineage.ranges():
                durable.make_dir(codec.generation_dir(folder, generation))
        opened._load(first)
        last = opened._entries[-1].seq + 1 if opened._entries else START
        if last < lineage.spans[-1].start:
            # The next entry would take the position of an older generation's entry, and no reader would see it.
            raise DamagedRecordError(f"log ends at {last} instead of {lineage.spans[-1].start}", channel=operator)
        if not is_reader:
            opened._unsynced = opened._left_unsynced()
        return opened

    def _load(self, first: Position) -> None:
        """Read the visible entries from ``first`` on, without those that a power cut has torn at the end."""
        found: list[tuple[Position, Entry | DamagedRecordError]] = []
        for generation, begin, end in self.lineage.ranges():
            for seq in self._sequence_numbers(codec.generation_dir(self.folder, generation)):
                if max(first, begin) <= seq and (end is None or seq < end):
                    found.append((seq, self._loaded(generation, seq)))
        kinds = [(seq, _kind(entry)) for seq, entry in found]
        never_written = never_written_from(kinds, self.lineage.spans[-1].start)
        for seq, entry in found:
            if never_written is not None and seq >= never_written:
                log.warning("torn_barriers_ignored", channel=self.operator, first=never_written, last=found[-1][0])
                return
            if isinstance(entry, DamagedRecordError):
                raise entry
            self._accept(entry)

    def _loaded(self, generation: Generation, seq: Position) -> Entry | DamagedRecordError:
        """The entry in a file; an error if it may be a torn barrier. Raises DamagedRecordError for any other damage."""
        path = codec.entry_path(self.folder, generation, seq)
        try:
            entry = codec.load(path)
        except DamagedRecordError as error:
            if codec.may_be_torn_barrier(path):
                return error
            raise
        if (entry.generation, entry.seq) != (generation, seq):
            raise DamagedRecordError(
                f"the file of entry {seq} holds another entry", channel=self.operator, generation=generation
            )
        return entry

    def _left_unsynced(self) -> list[tuple[Path, bytes]]:
        """What a process that died may have left visible but not durable: the newest batch, and the barriers after it.

        Older entries are synced: each data entry is written after all those before it are.
        """
        left: list[tuple[Path, bytes]] = []
        for entry in reversed(self._entries):
            path = self._path_of(entry)
            left.append((path, path.read_bytes()))
            if isinstance(entry, DataEntry):
                break
        return left[::-1]

    @staticmethod
    def _sequence_numbers(folder: Path) -> list[Position]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(
                Position(int(name.removesuffix(".json")))
                for name in os.listdir(folder)
                if not durable.is_temporary(name)
            )
        return []

    def _accept(self, entry: Entry) -> None:
        problem = self._gap_before(entry)
        if problem:
            raise DamagedRecordError(problem, channel=self.operator)
        self._entries.append(entry)
        self._sums.append(self._sums[-1].plus(entry))

    def _gap_before(self, entry: Entry) -> str | None:
        """Why an entry cannot follow the newest one; None when it can. Batches are gap-free like the entries."""
        if not self._entries:
            return None
        newest = self._entries[-1]
        if entry.seq != newest.seq + 1:
            return f"log has a hole between {newest.seq} and {entry.seq}"
        if entry.batch != newest.batch + isinstance(entry, DataEntry):
            return f"entry {entry.seq} is of batch {entry.batch}, the one before it of batch {newest.batch}"
        return None

    # ------------------------------------------------------------------ reading

    @property
    def end(self) -> Position:
        """The position of the next entry."""
        with self._lock:
            return Position(self._entries[-1].seq + 1) if self._entries else self._start_of_empty_log()

    @property
    def start(self) -> Position:
        """The position of the first entry that is kept."""
        with self._lock:
            return self._entries[0].seq if self._entries else self._start_of_empty_log()

    def _start_of_empty_log(self) -> Position:
        return self.lineage.spans[-1].start

    def entries(self, first: Position = START, end: Position | None = None) -> list[Entry]:
        """Entries in [first, end)."""
        with self._lock:
            return self._entries[self._index(first) : None if end is None else self._index(end)]

    def amount(self, first: Position, end: Position) -> Amount:
        """The amount in [first, end), in constant time."""
        with self._lock:
            begin = self._index(first)
            return self._sums[max(self._index(end), begin)].minus(self._sums[begin])

    def in_flight(self, first: Position, end: Position) -> InFlight:
        """What a consumer at ``first`` has yet to read before a barrier at ``end``."""
        entries, rows, size_bytes = self.amount(first, end)
        return InFlight(first=first, end=end, entries=entries, rows=rows, size_bytes=size_bytes)

    def in_flight_at(self, epoch: Epoch, first: Position) -> InFlight | None:
        """What a consumer at ``first`` has yet to read before the epoch's barrier; None while there is no barrier."""
        barrier = self.find_barrier(epoch)
        return None if barrier is None else self.in_flight(first, barrier.seq)

    def _index(self, position: Position) -> int:
        """The index in memory of the entry at a position; the log is gap-free."""
        base = self._entries[0].seq if self._entries else START
        return min(max(position - base, 0), len(self._entries))

    def data_entries(self, first: Position = START, end: Position | None = None) -> list[DataEntry]:
        return [entry for entry in self.entries(first, end) if isinstance(entry, DataEntry)]

    def find_batch(self, batch: BatchId) -> DataEntry | None:
        """The entry of a batch, if it was appended (and not truncated)."""
        with self._lock:
            for entry in reversed(self._entries):
                if isinstance(entry, DataEntry):
                    if entry.batch == batch:
                        return entry
                    if entry.batch < batch:
                        return None
        return None

    def rows_between(self, after: BatchId, last: BatchId) -> int | None:
        """The rows of the batches after ``after``, up to ``last``; None: not all of them are in the log."""
        rows, expected = 0, last
        with self._lock:
            for entry in reversed(self._entries):
                if expected <= after:
                    break
                if not isinstance(entry, DataEntry) or entry.batch > last:
                    continue
                if entry.batch != expected:
                    return None
                rows, expected = rows + entry.rows, BatchId(expected - 1)
        return rows if expected <= after else None

    @property
    def last_batch(self) -> BatchId:
        """The batch of the newest entry of either kind; a barrier names the batch it follows."""
        with self._lock:
            return self._entries[-1].batch if self._entries else NO_BATCH

    @property
    def last_positions(self) -> dict[OperatorId, Position]:
        """How far the operator had read its inputs when it wrote its newest entry."""
        with self._lock:
            return dict(self._entries[-1].positions) if self._entries else {}

    def positions_after(self, batch: BatchId) -> dict[OperatorId, Position]:
        """How far the operator had read its inputs after a batch; empty if unknown, or if nothing was read."""
        with self._lock:
            for entry in reversed(self._entries):
                if entry.batch <= batch:
                    return dict(entry.positions) if entry.batch == batch else {}
        return {}

    def barriers(self) -> list[BarrierEntry]:
        return [entry for entry in self.entries() if isinstance(entry, BarrierEntry)]

    def find_barrier(self, epoch: Epoch) -> BarrierEntry | None:
        """Searches from the newest entry: the caller has just cut."""
        with self._lock:
            barriers = (entry for entry in reversed(self._entries) if isinstance(entry, BarrierEntry))
            return next((barrier for barrier in barriers if barrier.epoch == epoch), None)

    def on_append(self, listener: Callable[[Entry], None]) -> list[Entry]:
        """Call ``listener`` for every later entry, in order; returns the present entries, with none in between."""
        with self._lock:
            self._listeners.append(listener)
            return list(self._entries)

    def remove_listener(self, listener: Callable[[Entry], None]) -> None:
        """Undo ``on_append``."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener]

    # ------------------------------------------------------------------ writing

    def append(self, entry: Entry) -> None:
        """Create the entry, then tell the listeners. The caller is the channel's only writer.

        A data entry is durable on return. A barrier is durable only after ``sync_barriers``: the barriers behind it do
        not wait for the disk, because a cut counts only once its operator has acknowledged it.
        """
        if entry.seq != self.end or entry.generation != self.lineage.generation:
            raise InvariantViolation(
                f"entry {entry.seq} of generation {entry.generation} does not follow {self.end} "
                f"of generation {self.lineage.generation}",
                channel=self.operator,
            )
        with self._lock:
            gap = self._gap_before(entry)
        if gap:
            raise InvariantViolation(gap, channel=self.operator)
        path, content = codec.entry_path(self.folder, entry.generation, entry.seq), codec.encode(entry)
        if isinstance(entry, DataEntry):
            self.sync_barriers()
        if not self._create(path, content, sync=isinstance(entry, DataEntry)):
            raise FencedError(
                "another process has written to this channel in this generation",
                next_step="stop this process: another one runs the flow",
                channel=self.operator,
                generation=entry.generation,
            )
        if isinstance(entry, BarrierEntry):
            self._unsynced.append((path, content))
        self.accept_followed(entry)

    def _create(self, path: Path, content: bytes, *, sync: bool) -> bool:
        """Whether the entry's file is this writer's, now or by an earlier attempt that failed after creating it."""
        tried = self._tried
        if tried is not None and tried != (path, content) and _holds(*tried):
            raise InvariantViolation("another entry of this writer is on disk, unfinished", channel=self.operator)
        self._tried = (path, content)
        if not durable.create(path, content, sync=sync):
            if tried != (path, content) or not _holds(path, content):
                return False
            if sync:
                durable.replace(path, content)  # whose first sync has failed
        self._tried = None
        return True

    def accept_followed(self, entry: Entry) -> None:
        """Add an entry that is on disk, written here or by another process, then tell the listeners."""
        with self._lock:
            self._accept(entry)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(entry)

    def sync_barriers(self) -> None:
        """Make every barrier written so far survive a power cut: called before a cut is acknowledged.

        Also called before a data entry is written: an entry is durable only if all earlier entries are.
        """
        with self._syncing:
            left = list(self._unsynced)  # the writer may add to it meanwhile
            for path, content in left:
                if self._is_doubtful:
                    self._write_again(path, content)
                else:
                    self._sync(path)
            self._is_doubtful = False
            del self._unsynced[: len(left)]

    def _sync(self, path: Path) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):  # truncated
                durable.fsync_file(path)
                durable.fsync_dir(path.parent)
        except OSError:
            self._is_doubtful = True
            raise

    def _write_again(self, path: Path, content: bytes) -> None:
        with self._deletion:  # a truncated entry stays deleted
            if path.exists():
                durable.replace(path, content)

    def fork(self, generation: Generation) -> None:
        """Continue in another generation, at the end: later entries of the generation before are not visible."""
        self.sync_barriers()
        lineage = self.lineage.fork(generation, self.end)
        durable.make_dir(codec.generation_dir(self.folder, generation))
        with self._lock:
            self.lineage = lineage

    def follow_fork(self, lineage: Lineage) -> None:
        """Does nothing: the writer in this process has forked the log itself."""

    def truncate(self, below: Position) -> Sequence[DataEntry]:
        """Delete entries below a position and their segments; returns the deleted data entries.

        Ascending, entry before its segments: a kill half-way leaves a gap-free log and unreferenced segments, which the
        next ``collect`` deletes. A later call first deletes what an earlier one could not.
        """
        with self._deletion:
            self._evicted.extend(self.evict_below(below))
            gone = self._delete_evicted()
            self.segments.delete(self._unnamed)
            self._unnamed = []
        return gone

    def _delete_evicted(self) -> list[DataEntry]:
        """Delete the files of evicted entries. A power cut brings none of them back without its follower."""
        gone: list[DataEntry] = []
        while self._evicted:
            folder = self._path_of(self._evicted[0]).parent
            while self._evicted and self._path_of(self._evicted[0]).parent == folder:
                self._path_of(self._evicted[0]).unlink(missing_ok=True)
                crashpoint("mid-truncate", self.operator)
                entry = self._evicted.popleft()
                if isinstance(entry, DataEntry):
                    gone.append(entry)
                    self._unnamed += [segment.name for segment in entry.segments]
            durable.fsync_dir(folder)
        return gone

    def _path_of(self, entry: Entry) -> Path:
        return codec.entry_path(self.folder, self.lineage.owner(entry.seq), entry.seq)

    def evict_below(self, below: Position) -> list[Entry]:
        """Remove entries below a position from memory and return them. Their files stay."""
        with self._lock:
            # One entry always stays, so that the log's end and last batch are known.
            limit = min(below, self._entries[-1].seq) if self._entries else START
            count = self._index(limit) if self._entries else 0
            gone, self._entries, self._sums = self._entries[:count], self._entries[count:], self._sums[count:]
            return gone

    # ------------------------------------------------------------------ collecting

    @property
    def is_whole(self) -> bool:
        """Whether every visible entry was read, so that segments which none of them names are not needed."""
        return self._opened_from == START

    def invisible_entries(self) -> list[Entry]:
        """Entries outside the lineage: written by zombies, or abandoned by a restore. Unreadable ones are left out."""
        found: list[Entry] = []
        for folder in sorted(self.folder.glob("g*")):
            for seq in self._sequence_numbers(folder):
                if not self.lineage.shows(Generation(int(folder.name[1:])), seq):
                    with contextlib.suppress(DamagedRecordError):
                        found.append(codec.load(folder / codec.entry_name(seq)))
        return found

    def collect(self, held: Collection[Path] = ()) -> int:
        """Delete what no visible entry names. Only while the channel's writer is at rest. Returns the files deleted.

        ``held``: files that are needed nevertheless.
        """
        visible = {(f"g{self.lineage.owner(entry.seq):06d}", codec.entry_name(entry.seq)) for entry in self.entries()}
        referenced = {segment.name for entry in self.data_entries() for segment in entry.segments}
        doomed = [path for path in self.folder.glob("g*/*") if (path.parent.name, path.name) not in visible]
        if not self.is_whole:
            below = codec.entry_name(self._opened_from)
            doomed = [path for path in doomed if path.name >= below]
        # Ascending: entries that a truncation could not delete are among them.
        doomed = sorted((path for path in doomed if path not in held), key=lambda path: path.name)
        for path in doomed:
            path.unlink(missing_ok=True)
        referenced.update(path.name for path in held if path.parent == codec.data_dir(self.folder))
        return len(doomed) + (self.segments.collect(referenced) if self.is_whole else 0)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False


def _kind(found: Entry | DamagedRecordError) -> Found:
    if isinstance(found, DamagedRecordError):
        return Found.TORN
    return Found.BATCH if isinstance(found, DataEntry) else Found.BARRIER
