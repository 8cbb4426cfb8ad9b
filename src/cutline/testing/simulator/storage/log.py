"""One channel's log on a simulated disk: entries of all generations, and what of them a power cut may take."""

from __future__ import annotations

from random import Random

from cutline.model.entries import BarrierEntry, DataEntry
from cutline.model.ids import START, BatchId, Epoch, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.history.log_end import Found, never_written_from

#: Rows of one path, numbered without a gap: (path, first, count).
Rows = tuple[tuple[int, int, int], ...]

_VIEWS_KEPT = 8


class Data(DataEntry, frozen=True, kw_only=True, tag="data"):
    """A data entry and the rows it stands for."""

    content: Rows


Entry = Data | BarrierEntry


class View:
    """The entries that one lineage shows, ascending and gap-free."""

    __slots__ = ("entries", "lineage", "start")

    def __init__(self, lineage: Lineage, start: Position) -> None:
        self.lineage = lineage
        self.start = start
        self.entries: list[Entry] = []

    @property
    def end(self) -> Position:
        """The place where the next entry will stand."""
        return Position(self.entries[-1].seq + 1) if self.entries else self.lineage.spans[-1].start

    @property
    def last_batch(self) -> BatchId:
        return self.entries[-1].batch if self.entries else BatchId(-1)

    @property
    def positions(self) -> dict[OperatorId, Position]:
        return self.entries[-1].positions if self.entries else {}

    def between(self, first: Position, end: Position | None = None) -> list[Entry]:
        entries = self.entries
        if not entries:
            return entries
        base = entries[0].seq
        return entries[max(first - base, 0) : None if end is None else max(end - base, 0)]

    def find(self, seq: Position) -> Entry | None:
        index = seq - self.entries[0].seq if self.entries else -1
        return self.entries[index] if 0 <= index < len(self.entries) else None

    def find_batch(self, batch: BatchId) -> Data | None:
        for entry in reversed(self.entries):
            if entry.batch < batch:
                return None
            if entry.batch == batch and isinstance(entry, Data):
                return entry
        return None

    def find_barrier(self, epoch: Epoch) -> BarrierEntry | None:
        for entry in reversed(self.entries):
            if isinstance(entry, BarrierEntry) and entry.epoch == epoch:
                return entry
        return None

    def positions_after(self, batch: BatchId) -> dict[OperatorId, Position]:
        for entry in reversed(self.entries):
            if entry.batch <= batch:
                return entry.positions if entry.batch == batch else {}
        return {}


class Log:
    """Entries are created once. A data entry is synced when it is created, a barrier later."""

    def __init__(self) -> None:
        self._entries: dict[Generation, dict[Position, Entry]] = {}
        self._views: dict[object, View] = {}
        #: Visible, and not certain to survive a power cut.
        self._unsynced: dict[tuple[Generation, Position], Entry] = {}
        #: Half there since a power cut.
        self._torn: set[tuple[Generation, Position]] = set()
        #: Deleted, and not certain to be gone after a power cut; ascending.
        self._deleted: list[tuple[Generation, Entry]] = []
        #: Where the log begins after truncation.
        self.start = START

    # ------------------------------------------------------------------ reading

    def view(self, lineage: Lineage) -> View:
        found = self._views.get(lineage.spans)
        if found is None:
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            found = self._views[lineage.spans] = View(lineage, self.start)
            seq = self.start
            while (entry := self._at(lineage, seq)) is not None:
                found.entries.append(entry)
                seq = Position(seq + 1)
        return found

    def _at(self, lineage: Lineage, seq: Position) -> Entry | None:
        if seq < lineage.spans[0].start:
            return None
        generation = lineage.owner(seq)
        return None if (generation, seq) in self._torn else self._entries.get(generation, {}).get(seq)

    def entry(self, generation: Generation, seq: Position) -> Entry | None:
        return self._entries.get(generation, {}).get(seq)

    def damage(self, lineage: Lineage, first: Position = START) -> str | None:
        """What keeps a process from opening the log from ``first`` on; None if nothing does."""
        found: list[tuple[Position, Found]] = []
        for generation, low, high in lineage.ranges():
            begin = max(first, self.start, low)
            own = sorted(
                seq for seq in self._entries.get(generation, {}) if begin <= seq and (high is None or seq < high)
            )
            found += [(seq, self._kind(generation, seq)) for seq in own]
        never_written = never_written_from(found, lineage.spans[-1].start)
        standing = [(seq, kind) for seq, kind in found if never_written is None or seq < never_written]
        end = max(first, self.start)
        for seq, kind in standing:
            if seq != end or kind is Found.TORN:
                return f"the log has a hole or a torn entry at {end}"
            end = Position(seq + 1)
        if end < lineage.spans[-1].start:
            return f"the log ends at {end} instead of {lineage.spans[-1].start}"
        return None

    def _kind(self, generation: Generation, seq: Position) -> Found:
        if (generation, seq) in self._torn:
            return Found.TORN
        return Found.BATCH if isinstance(self._entries[generation][seq], Data) else Found.BARRIER

    def invisible(self, lineage: Lineage) -> list[Entry]:
        """Entries the lineage does not reach: of zombies, or given up by a restore."""
        return [
            entry
            for generation, own in sorted(self._entries.items())
            for seq, entry in sorted(own.items())
            if not lineage.shows(generation, seq)
        ]

    def snapshot(self) -> Log:
        """A copy in which everything is synced."""
        copy = Log()
        copy._entries = {generation: dict(own) for generation, own in self._entries.items()}
        copy._torn = set(self._torn)
        copy.start = self.start
        return copy

    # ------------------------------------------------------------------ writing

    def create(self, entry: Entry, *, is_synced: bool) -> bool:
        """False: this place is taken."""
        own = self._entries.setdefault(entry.generation, {})
        if entry.seq in own:
            return False
        own[entry.seq] = entry
        if not is_synced:
            self._unsynced[entry.generation, entry.seq] = entry
        elif self._deleted:
            self._deleted.clear()  # the folder is synced with the entry
        for view in self._views.values():
            if entry.seq == view.end and view.lineage.owner(entry.seq) == entry.generation:
                view.entries.append(entry)
        return True

    def sync(self, entry: Entry) -> None:
        self._unsynced.pop((entry.generation, entry.seq), None)

    def sync_end(self, lineage: Lineage) -> None:
        """The newest batch and the barriers after it: a process that died may not have synced them."""
        for entry in reversed(self.view(lineage).entries):
            self.sync(entry)
            if isinstance(entry, Data):
                return

    def put(self, entry: Entry) -> None:
        """As a download does: synced, whatever was there."""
        self.start = min(self.start, entry.seq) if any(self._entries.values()) else entry.seq
        self._entries.setdefault(entry.generation, {})[entry.seq] = entry
        self._torn.discard((entry.generation, entry.seq))
        self._unsynced.pop((entry.generation, entry.seq), None)
        self._views.clear()

    # ------------------------------------------------------------------ collecting

    def delete(self, lineage: Lineage, seq: Position) -> None:
        generation = lineage.owner(seq)
        entry = self._entries[generation].pop(seq)
        self._unsynced.pop((generation, seq), None)
        self._deleted.append((generation, entry))
        self.start = max(self.start, Position(seq + 1))
        for view in self._views.values():
            if view.entries and view.entries[0].seq <= seq:
                view.entries = view.entries[seq + 1 - view.entries[0].seq :]

    def collect_invisible(self, lineage: Lineage) -> None:
        """Delete what no reader of this lineage sees."""
        for generation, own in self._entries.items():
            for seq in [seq for seq in own if not lineage.shows(generation, seq)]:
                del own[seq]
                self._unsynced.pop((generation, seq), None)
                self._torn.discard((generation, seq))
        self._deleted.clear()
        self._views.clear()

    # ------------------------------------------------------------------ a power cut

    def lose_power(self, rng: Random) -> int:
        """Each unsynced entry is there, half there or gone; some of what was deleted last is there again."""
        lost = 0
        for key, entry in self._unsynced.items():
            chance = rng.random()
            if chance < 0.5:
                continue
            lost += 1
            # A data entry's content is synced before it has its name: it is there or not.
            if chance < 0.6 and isinstance(entry, BarrierEntry):
                self._torn.add(key)
            else:
                del self._entries[entry.generation][entry.seq]
        self._unsynced.clear()
        if self._deleted:
            back = self._deleted[rng.randint(0, len(self._deleted)) :]
            for generation, entry in back:
                self._entries[generation][entry.seq] = entry
                self.start = min(self.start, entry.seq)
            self._deleted.clear()
        self._views.clear()
        return lost
