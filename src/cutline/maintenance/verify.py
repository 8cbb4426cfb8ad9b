"""Whether stored checkpoints are whole, found out by reading alone, also while the flow runs.

A running flow lets go of epochs under our eyes. It always removes the manifest first, and a restart writes its
generation record first: so whatever seems wrong with an epoch counts only if, looked at again afterwards, its manifest
is still there and still of the present history.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cutline.base import durable, records
from cutline.channels.segment_store import SegmentStore
from cutline.coordinator.manifests import is_of_history, lineage_of
from cutline.errors import CutlineError, StoreError, UnknownEpochError
from cutline.model import entries as codec
from cutline.model.entries import BarrierEntry, DataEntry, Entry
from cutline.model.ids import Epoch, Generation, OperatorId, Position
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, Manifest, OperatorCut, OperatorRecord, Segment
from cutline.ports.inspection import CompletedEpoch, CoordinatorRecords, SnapshotInspector
from cutline.protocol.history.epochs import Incarnation, live_epochs
from cutline.protocol.history.lineage import Lineage

#: good; damaged; left: of a history that the flow went back behind; gone: let go of while it was being looked at.
Verdict = Literal["good", "damaged", "left", "gone"]

_COLLECTION_SECONDS = 0.2

_BACKUP = "bring the file back from a backup"
_OTHER_EPOCH = "this checkpoint cannot be trusted: restore to another one, and take a new one (trigger_checkpoint)"
_LIVE_LOG = "the flow can go on only if it runs; take a new checkpoint now, do not restart before"
_INPUT = "put the input file back before the flow is restored, or let the checkpoint go by taking newer ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong."""

    #: None: it concerns the flow as a whole.
    epoch: Epoch | None
    operator: OperatorId | None
    #: Below the flow's folder, if it lies there.
    path: str
    problem: str
    next_step: str = _OTHER_EPOCH


@dataclass(slots=True, kw_only=True)
class EpochReport:
    """What was found out about one checkpoint."""

    epoch: Epoch
    verdict: Verdict = "good"
    problems: list[Finding] = field(default_factory=list)
    #: What could not be checked, for people.
    notes: list[str] = field(default_factory=list)
    checked_files: int = 0
    checked_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generations:
    """The generation records that can be read, ascending, and those that cannot."""

    readable: list[GenerationRecord]
    #: By number: what is wrong with it.
    damaged: Mapping[Generation, str]

    @property
    def newest(self) -> GenerationRecord | None:
        """The one in force; None if there is none, or a newer one cannot be read."""
        newest = self.readable[-1] if self.readable else None
        return None if newest and any(number > newest.generation for number in self.damaged) else newest

    @property
    def numbers(self) -> set[Generation]:
        return {record.generation for record in self.readable} | set(self.damaged)

    def problem_of(self, generation: Generation) -> str | None:
        """A clone has the record of its savepoint's generation and none before it: older ones are not missed."""
        if generation in self.damaged:
            return self.damaged[generation]
        is_expected = generation >= min(self.numbers, default=generation)
        return "generation record is missing" if is_expected and generation not in self.numbers else None

    def incarnations(self) -> list[Incarnation]:
        return [
            Incarnation(generation=one.generation, restored_epoch=one.restored_epoch, is_fresh=one.path == "fresh")
            for one in self.readable
        ]


class Verifier:
    """Looks at the checkpoints of one flow. ``deep``: every byte is read, not only sizes."""

    def __init__(
        self,
        layout: Layout,
        snapshots: SnapshotInspector,
        coordinator: Callable[[], CoordinatorRecords],
        *,
        deep: bool = False,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_read`` hears of every file that was checked, with its bytes."""
        self._layout = layout
        self._snapshots = snapshots
        self._coordinator = coordinator
        self._deep = deep
        self._on_read = on_read

    # ------------------------------------------------------------------ which epochs

    def every(self) -> Iterator[EpochReport]:
        """Every complete checkpoint, ascending, and those that should be there."""
        lost = {finding.epoch: finding for finding in self._lost_manifests()}
        for epoch in sorted({*self._snapshots.epochs(), *(epoch for epoch in lost if epoch is not None)}):
            report = self._lost(lost[epoch]) if epoch in lost else self._verify(epoch)
            if report.verdict != "gone":
                yield report

    def newest(self) -> Iterator[EpochReport]:
        """The newest checkpoint of the present history; in per-operator mode that of every operator."""
        lost = {finding.epoch: finding for finding in self._lost_manifests()}
        current = self._generations().newest
        wanted = set(current.spark_dirs) if current else None
        known = {*self._snapshots.epochs(), *(epoch for epoch in lost if epoch is not None)}
        for epoch in sorted(known, reverse=True):
            owners = self._owners(epoch)
            if wanted is not None and owners and wanted.isdisjoint(owners):
                continue
            report = self._lost(lost[epoch]) if epoch in lost else self._verify(epoch)
            if report.verdict in ("gone", "left"):
                continue
            yield report
            wanted = wanted - owners if wanted and owners else set()
            if not wanted:
                return

    def one(self, epoch: Epoch) -> EpochReport:
        """This checkpoint. Raises UnknownEpochError if there is none of this number."""
        lost = next((finding for finding in self._lost_manifests() if finding.epoch == epoch), None)
        if lost is not None:
            return self._lost(lost)
        known = self._snapshots.epochs()
        report = self._verify(epoch) if epoch in known else None
        if report is None or report.verdict == "gone":
            kept = ", ".join(map(str, known)) or "none"
            raise UnknownEpochError(
                f"there is no complete checkpoint {epoch}, or it was let go of", next_step=f"those kept: {kept}"
            )
        return report

    def _owners(self, epoch: Epoch) -> frozenset[OperatorId]:
        """Whose snapshots an epoch holds; by the names of the records if the manifest cannot be read."""
        try:
            return frozenset(self._snapshots.load_manifest(epoch).operators)
        except (CutlineError, OSError):
            return self._snapshots.recorded(epoch)

    def _lost(self, finding: Finding) -> EpochReport:
        return EpochReport(epoch=finding.epoch or Epoch(0), verdict="damaged", problems=[finding])

    def _lost_manifests(self) -> list[Finding]:
        """Complete checkpoints without a manifest that nobody can have let go of."""
        # Looked at twice: what seemed to be the newest may have been let go of since the database was read.
        first = self._without_manifest()
        if not first:
            return []
        # Long enough for a collection to go from an epoch's manifest on to its records.
        time.sleep(_COLLECTION_SECONDS)
        again = self._without_manifest()
        return [
            Finding(
                epoch=epoch,
                operator=None,
                path=self._name(self._layout.manifest(epoch)),
                problem="the coordinator's records call this checkpoint complete, but its manifest is missing",
                next_step=f"{_BACKUP}; without it the flow can go back only to an older checkpoint",
            )
            for epoch in sorted(first & again)
        ]

    def _without_manifest(self) -> set[Epoch]:
        known = self._coordinator()
        generations = self._generations()
        complete = [(one.epoch, one.generation) for one in known.completed]
        live = set(live_epochs(complete, generations.incarnations()))
        stored = {epoch: self._owners(epoch) for epoch in self._snapshots.epochs()}
        return {
            one.epoch
            for one in known.completed
            if one.epoch in live and one.epoch not in stored and self._cannot_be_let_go(one, stored, known, live)
        }

    def _cannot_be_let_go(
        self,
        one: CompletedEpoch,
        stored: Mapping[Epoch, frozenset[OperatorId]],
        known: CoordinatorRecords,
        live: set[Epoch],
    ) -> bool:
        """The newest checkpoint always stays, and of the others the oldest go first, unless they are pinned."""
        recorded = self._snapshots.recorded(one.epoch)
        owners = one.operators or recorded
        mine = [epoch for epoch, others in stored.items() if not others or not owners or owners & others]
        if not any(epoch > one.epoch for epoch in [*mine, *_of_same(known.completed, owners, live)]):
            return True
        is_older_kept = any(epoch < one.epoch and epoch not in known.pins for epoch in mine)
        return bool(recorded) and is_older_kept

    # ------------------------------------------------------------------ the flow as a whole

    def flow_problems(self) -> list[Finding]:
        """Damage that is of no single checkpoint."""
        coordinator = self._coordinator()  # first: a generation is counted after its record was created
        generations = self._generations()
        problems = [*self._identity_problems()]
        for number, problem in sorted(generations.damaged.items()):
            problems.append(self._of_flow(self._layout.generation(number), problem))
        if coordinator.problem is not None:
            problems.append(self._of_flow(self._layout.metadata, coordinator.problem))
        problems += self._missing_generations(generations, coordinator.recoveries)
        return problems

    def _of_flow(self, path: Path, problem: str) -> Finding:
        return Finding(epoch=None, operator=None, path=self._name(path), problem=problem, next_step=_BACKUP)

    def _identity_problems(self) -> Iterator[Finding]:
        path = self._layout.identity
        try:
            name = records.load("flow", path, dict[str, Any]).get("name")
        except (CutlineError, OSError) as error:
            yield self._of_flow(path, _text(error))
            return
        if name != self._layout.root.name:
            yield self._of_flow(path, f"the folder belongs to the flow {name!r}")

    def _missing_generations(self, generations: _Generations, recoveries: int) -> Iterator[Finding]:
        """Generation records are never deleted, and whatever wrote an entry that is read had one."""
        named = {span[0] for one in generations.readable for spans in one.lineage.values() for span in spans}
        now = self._generations()  # again: the flow may have been started meanwhile
        if recoveries > len(now.numbers):
            named |= self._writers()
        missing = [number for number in sorted(named - now.numbers) if now.problem_of(number)]
        for number in missing:
            yield self._of_flow(self._layout.generation(number), "generation record is missing")
        # Its number is unknown if it was the oldest, or left nothing else behind.
        if recoveries > len(now.numbers) and not missing:
            yield self._of_flow(
                self._layout.generations, f"{recoveries} generations have been, there are records of {len(now.numbers)}"
            )

    def _writers(self) -> set[Generation]:
        """All that have written an entry; also starts that were killed before their generation began."""
        folders = [folder for folder in self._layout.root.glob("channels/*/g*") if folder.name[1:].isdigit()]
        return {
            Generation(int(folder.name[1:]))
            for folder in folders
            if any(not durable.is_temporary(name) for name in _names_in(folder))
        }

    def _generations(self) -> _Generations:
        readable: list[GenerationRecord] = []
        damaged: dict[Generation, str] = {}
        for name in sorted(_names_in(self._layout.generations)):
            number = name.removesuffix(".json")
            if durable.is_temporary(name) or not number.isdigit():
                continue
            try:
                readable.append(records.load("generation", self._layout.generations / name, GenerationRecord))
            except (CutlineError, OSError) as error:
                damaged[Generation(int(number))] = _text(error)
        return _Generations(readable=readable, damaged=damaged)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root)) if path.is_relative_to(self._layout.root) else str(path)

    # ------------------------------------------------------------------ one epoch

    def _verify(self, epoch: Epoch) -> EpochReport:
        report = EpochReport(epoch=epoch)
        look = _Look(report, self._on_read, self._name)
        path = self._layout.manifest(epoch)
        try:
            manifest = self._snapshots.load_manifest(epoch)
            look.count(path)
            generations = self._generations()  # after the manifest: its generation has a record by now
            if not _is_live(manifest, generations):
                report.verdict = "left"
                return report
            self._check_parts(look, manifest, generations)
        except (CutlineError, OSError) as error:
            # Also a manifest that makes no sense: it must not keep us from looking at the others.
            look.problem(path, _text(error))
        if report.problems:
            report.verdict = self._look_again(epoch)
            if report.verdict != "damaged":
                report.problems.clear()
        return report

    def _check_parts(self, look: _Look, manifest: Manifest, generations: _Generations) -> None:
        self._check_manifest(look, manifest, generations)
        for operator in sorted(manifest.operators):
            self._check_operator(look, manifest, operator, generations)
        self._check_channels(look, manifest, generations)

    def _look_again(self, epoch: Epoch) -> Verdict:
        """Whether an epoch with which something seems to be wrong is still one."""
        if epoch not in self._snapshots.epochs():
            return "gone"
        try:
            is_live = _is_live(self._snapshots.load_manifest(epoch), self._generations())
        except (CutlineError, OSError):
            # It may have been replaced by a tombstone, or removed, between these two lines.
            return "damaged" if epoch in self._snapshots.epochs() else "gone"
        return "damaged" if is_live else "left"

    def _check_manifest(self, look: _Look, manifest: Manifest, generations: _Generations) -> None:
        path = self._layout.manifest(manifest.epoch)
        if manifest.flow != self._layout.root.name or manifest.epoch != look.report.epoch:
            look.problem(path, f"it is the manifest of epoch {manifest.epoch} of flow {manifest.flow}")
        if manifest.operators.keys() != manifest.channels.keys():
            look.problem(path, "its operators and its channels do not fit one another")
        if manifest.previous_epoch >= manifest.epoch:
            look.problem(path, f"it names epoch {manifest.previous_epoch} as the one before it")
        named = {manifest.generation, *(cut.generation for cut in manifest.operators.values())}
        named |= {generation for cut in manifest.channels.values() for generation, _ in cut.lineage}
        for generation in sorted(named):
            problem = generations.problem_of(generation)
            if problem:
                look.problem(self._layout.generation(generation), problem, next_step=_BACKUP)
        for name, cut in manifest.operators.items():
            if cut.after_batch > cut.batch:
                text = f"its output begins after batch {cut.after_batch}, its cut is after batch {cut.batch}"
                look.problem(path, text, name)
        self._check_order(look, manifest)

    def _check_order(self, look: _Look, manifest: Manifest) -> None:
        """Nothing lies before the epoch that came before it, if that one is still there."""
        try:
            before = self._snapshots.load_manifest(manifest.previous_epoch)
        except (CutlineError, OSError):
            return  # let go of, or damaged: then it is reported with its own number
        current = self._generations().newest
        begun = current.begun if current is not None else {}
        for name in sorted(manifest.operators.keys() & before.operators.keys()):
            new, old = manifest.operators[name], before.operators[name]
            if before.generation < begun.get(name, 0) <= manifest.generation:
                continue  # another log of the same name
            if new.batch < old.batch or new.barrier <= old.barrier:
                text = f"its cut lies before that of epoch {before.epoch}, which was taken earlier"
                look.problem(self._layout.manifest(manifest.epoch), text, name)

    # ------------------------------------------------------------------ operators

    def _check_operator(self, look: _Look, manifest: Manifest, operator: OperatorId, generations: _Generations) -> None:
        cut = manifest.operators[operator]
        path = self._layout.record(manifest.epoch, operator, cut.generation)
        try:
            record = self._snapshots.load_record(manifest, operator)
        except (CutlineError, OSError) as error:
            look.problem(path, _text(error), operator)
            return
        look.count(path)
        contradiction = _contradiction(manifest, operator, cut, record)
        if contradiction:
            look.problem(path, contradiction, operator)
        if not self._check_files(look, record, path):
            return
        for problem in self._snapshots.incomplete(record):
            look.problem(path, f"{problem.path}: {problem.problem}", operator)
        current = generations.newest
        if current is not None and current.inputs.get(operator) == []:
            live = self._layout.spark_checkpoint_dir(operator, current.spark_dirs[operator])
            sources = self._snapshots.sources(record, live)
            for problem in sources.problems:
                look.problem(Path(problem.path), problem.problem, operator, next_step=_INPUT)
            look.report.notes += [f"{operator}: {note}" for note in sources.notes]

    def _check_files(self, look: _Look, record: OperatorRecord, path: Path) -> bool:
        """Whether every stored file of the record is there."""
        are_whole = True
        for file in record.files():
            try:
                damage = self._snapshots.file_damage(file, deep=self._deep)
            except OSError as error:
                damage = f"{file.path}: it cannot be read: {error.strerror}"
            if damage:
                where = path if file.content is not None else self._layout.blob(file.sha256)
                look.problem(where, damage, record.operator)
                are_whole = False
            look.add(file.size_bytes)
        return are_whole

    # ------------------------------------------------------------------ channels

    def _check_channels(self, look: _Look, manifest: Manifest, generations: _Generations) -> None:
        for name, cut in sorted(manifest.channels.items()):
            lineage = lineage_of(cut.lineage)
            for consumer, flight in cut.in_flight.items():
                if flight.first > cut.barrier:
                    text = f"{consumer} had read {name} up to {flight.first}, past the barrier at {cut.barrier}"
                    look.problem(self._layout.manifest(manifest.epoch), text, consumer)
            first = min((flight.first for flight in cut.in_flight.values()), default=cut.barrier)
            found = self._check_entries(look, name, lineage, first, cut.barrier)
            self._check_barrier(look, manifest, name, lineage, found.get(cut.barrier))
            if len(found) == cut.barrier - first + 1:
                self._check_amounts(look, manifest, name, found)
        current = generations.newest
        if current is not None and current.is_per_operator:
            self._check_catching_up(look, manifest, current)

    def _check_entries(
        self,
        look: _Look,
        channel: OperatorId,
        lineage: Lineage,
        first: Position,
        last: Position,
        *,
        next_step: str = _OTHER_EPOCH,
    ) -> dict[Position, Entry]:
        """Entries in [first, last] must be there, follow one another, and have their segments; returns the good."""
        folder = self._layout.channel(channel)
        found: dict[Position, Entry] = {}
        before: Entry | None = None
        for seq in map(Position, range(first, last + 1)):
            generation = lineage.owner(seq)
            path = codec.entry_path(folder, generation, seq)
            try:
                entry = codec.load(path)
            except (CutlineError, OSError) as error:
                look.problem(path, _text(error), channel, next_step=next_step)
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
                text = f"it is of batch {entry.batch}, the one before it of batch {before.batch}"
                look.problem(path, text, channel, next_step=next_step)
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                self._check_segment(look, channel, segment)
            found[seq] = before = entry
        return found

    def _check_segment(self, look: _Look, channel: OperatorId, segment: Segment) -> None:
        folder = self._layout.channel(channel)
        try:
            problem = SegmentStore.of(folder).problem(segment, deep=self._deep)
        except StoreError as error:
            problem = f"nobody can say whether the segment is there: {error}"
        if problem is not None:
            look.problem(codec.data_dir(folder) / segment.name, problem, channel)
        look.add(segment.size_bytes)

    def _check_barrier(
        self, look: _Look, manifest: Manifest, name: OperatorId, lineage: Lineage, entry: Entry | None
    ) -> None:
        cut = manifest.operators.get(name)
        if entry is None or cut is None:
            return  # reported already
        path = codec.entry_path(self._layout.channel(name), lineage.owner(entry.seq), entry.seq)
        if not isinstance(entry, BarrierEntry) or entry.epoch != manifest.epoch:
            look.problem(path, f"it is not the barrier of epoch {manifest.epoch}", name)
        elif entry.batch != cut.batch or entry.positions != cut.positions:
            look.problem(path, "barrier and manifest disagree about where the cut is", name)

    def _check_amounts(
        self, look: _Look, manifest: Manifest, name: OperatorId, found: Mapping[Position, Entry]
    ) -> None:
        for consumer, flight in manifest.channels[name].in_flight.items():
            inside = [entry for seq, entry in found.items() if flight.first <= seq < flight.end]
            data = [entry for entry in inside if isinstance(entry, DataEntry) and entry.rows]
            amount = (len(data), sum(entry.rows for entry in data), sum(entry.size_bytes for entry in data))
            if amount != (flight.entries, flight.rows, flight.size_bytes):
                text = f"what is in flight from {name} to {consumer} is not as much as it was"
                look.problem(self._layout.manifest(manifest.epoch), text, consumer)

    def _check_catching_up(self, look: _Look, manifest: Manifest, current: GenerationRecord) -> None:
        """Per-operator mode: from the snapshot the operator repeats its own log, and reads its inputs again."""
        for name, cut in sorted(manifest.operators.items()):
            needed = {name: cut.barrier + 1, **cut.positions}
            for channel, first in needed.items():
                lineage = lineage_of(current.lineage[channel])
                last = self._last_entry(channel, lineage)
                self._check_entries(look, channel, lineage, Position(first), last, next_step=_LIVE_LOG)

    def _last_entry(self, channel: OperatorId, lineage: Lineage) -> Position:
        last = lineage.spans[-1].start - 1
        for generation, begin, end in lineage.ranges():
            names = _names_in(codec.generation_dir(self._layout.channel(channel), generation))
            numbers = [int(name.removesuffix(".json")) for name in names if not durable.is_temporary(name)]
            last = max([last, *(seq for seq in numbers if seq >= begin and (end is None or seq < end))])
        return Position(last)


class _Look:
    """Collects what is found out about one epoch."""

    def __init__(self, report: EpochReport, on_read: Callable[[int], None], name: Callable[[Path], str]) -> None:
        self.report = report
        self._on_read = on_read
        self._name = name

    def problem(
        self, path: Path, text: str, operator: OperatorId | None = None, *, next_step: str = _OTHER_EPOCH
    ) -> None:
        finding = Finding(
            epoch=self.report.epoch, operator=operator, path=self._name(path), problem=text, next_step=next_step
        )
        if finding not in self.report.problems:
            self.report.problems.append(finding)

    def count(self, path: Path) -> None:
        """A record that was read."""
        try:
            self.add(path.stat().st_size)
        except OSError:
            self.add(0)

    def add(self, size_bytes: int) -> None:
        self.report.checked_files += 1
        self.report.checked_bytes += size_bytes
        self._on_read(size_bytes)


def _is_live(manifest: Manifest, generations: _Generations) -> bool:
    """Whether the flow has not gone back behind the epoch. Not known, because a record is lost: taken for yes."""
    current = generations.newest
    if current is None or (current.generation < manifest.generation and manifest.carried_from is None):
        return True
    if not live_epochs([(manifest.epoch, manifest.generation)], generations.incarnations()):
        return False
    if manifest.carried_from is not None and manifest.generation not in generations.numbers:
        return False  # the start that made it was killed before it counted
    return is_of_history(manifest, {name: lineage_of(spans) for name, spans in current.lineage.items()}, current.begun)


def _of_same(completed: Iterable[CompletedEpoch], owners: frozenset[OperatorId], live: set[Epoch]) -> Iterator[Epoch]:
    """The epochs that hold snapshots of any of these operators; where the records do not say whose, they may."""
    for one in completed:
        if one.epoch in live and (not one.operators or not owners or one.operators & owners):
            yield one.epoch


def _contradiction(manifest: Manifest, operator: OperatorId, cut: OperatorCut, record: OperatorRecord) -> str | None:
    """How a record says something else than the manifest that names it."""
    said = (record.flow, record.operator, record.epoch, record.generation, record.batch, record.barrier)
    if said != (manifest.flow, operator, manifest.epoch, cut.generation, cut.batch, cut.barrier):
        return "record and manifest disagree about what it is the record of"
    if record.positions != cut.positions:
        return "record and manifest disagree about how far the inputs were read"
    channel = manifest.channels.get(operator)
    if channel is None or channel.barrier != cut.barrier:
        return "the manifest has two opinions of where its barrier is"
    return None


def _text(error: CutlineError | OSError) -> str:
    """Without the path, which the finding names anyway."""
    return error.what if isinstance(error, CutlineError) else f"it cannot be read: {error.strerror}"


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
