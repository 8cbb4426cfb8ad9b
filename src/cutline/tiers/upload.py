"""Checkpoints of one flow in an object store, laid out there as in the flow's own folder.

A checkpoint is copied file by file, the manifest last and only once: it is there with all it needs, or not at all.
What is content-addressed or numbered never changes, so what is there already is not copied again.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cutline.base import durable, records
from cutline.base.crashpoints import crashpoint
from cutline.channels.segment_store import SegmentStore
from cutline.errors import DamagedRecordError, FencedError, MissingObject, OutcomeUnknown, StoreError
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, Manifest, ObjectStore
from cutline.ports.objects import ObjectInfo
from cutline.tiers import early_upload as sent_ahead
from cutline.tiers.checkpoint_files import content_paths, names_in, record_paths
from cutline.tiers.download import Fetching
from cutline.tiers.early_upload import SentAhead
from cutline.tiers.executor_transfer import PARALLELISM, Carrier, ThreadCarrier
from cutline.tiers.transfer import PACKED_SUFFIX, SEND, Carried, File

#: What was sent so long ago is sent again: a collector with a short grace period may have taken it.
_YOUNG_SECONDS = 60.0
_MANIFEST, _GENERATION, _PUBLISHED = "manifest", "generation", "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What copying a checkpoint took."""

    epoch: Epoch
    #: Of this copy alone; what was there before was not sent again.
    files: int
    size_bytes: int
    #: As they travelled.
    sent_bytes: int


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """How far sinks were when a checkpoint was sealed.

    Sinks themselves say nothing of epochs that had nothing for them, and whoever comes back on another host must know
    that none of these is missing; nor do they say that they were put back since.
    """

    #: Every sink has published up to here.
    everywhere: Epoch = NO_EPOCH
    #: The newest epoch with rows that each was told to publish.
    seen: dict[SinkId, Epoch] = {}


class Replica:
    """One flow's place in an object store."""

    def __init__(
        self,
        store: ObjectStore,
        layout: Layout,
        *,
        has_rivals: bool = True,
        carrier: Carrier | None = None,
    ) -> None:
        """``has_rivals``: other hosts may write there too, each in generations that it has claimed.

        ``carrier``: who carries the content; None: threads of this process.
        """
        self._store = store
        self._has_rivals = has_rivals
        #: Tells our claims from those of others.
        self._token = str(uuid.uuid4()).encode()
        self._claimed: set[Generation] = set()
        self._begun: Generation | None = None
        self._layout = layout
        self._carrier = carrier or ThreadCarrier(store, layout.root, PARALLELISM)
        self._fetching = Fetching(store, layout, self._carrier)
        #: What the newest checkpoint there needs, which no collector takes; None: not looked at yet. Whatever else lies
        #: there may be gone at any time, so it is sent again.
        self._trusted: frozenset[str] | None = None
        #: Sent of late, for a checkpoint that is not sealed: too young for any collector.
        self._sent: dict[str, float] = {}
        #: Sent before its checkpoint, perhaps long ago, and held there.
        self._ahead = SentAhead(store)
        #: Small ones that are never collected.
        self._created: set[str] = set()

    @property
    def url(self) -> str:
        return self._store.url

    # ------------------------------------------------------------------ what is there

    def epochs(self) -> list[Epoch]:
        """Epochs whose manifest is there, ascending."""
        names = (info.path.split("/") for info in self._store.walk("checkpoints"))
        return sorted(Epoch(int(name[1])) for name in names if name[-1] == "manifest.json")

    def load_manifest(self, epoch: Epoch) -> Manifest:
        path = self._name(self._layout.manifest(epoch))
        return records.decode(_MANIFEST, self._store.read(path), Manifest, path=path)

    def load_generations(self) -> list[GenerationRecord]:
        """All that are there, ascending."""
        names = sorted(info.path for info in self._store.walk("generations"))
        return [records.decode(_GENERATION, self._store.read(name), GenerationRecord, path=name) for name in names]

    def newest_generation(self) -> Generation:
        """The newest one that has ever begun, or was claimed, here; 0 if none."""
        infos = [*self._store.walk("generations"), *self._store.walk("claims")]
        numbers = (int(info.path.rpartition("/")[2].removesuffix(".json")) for info in infos)
        return Generation(max(numbers, default=0))

    def published_before(self, epoch: Epoch) -> Published:
        """How far sinks were when this checkpoint was sealed, if anybody has said."""
        path = _published_name(epoch)
        try:
            return records.decode(_PUBLISHED, self._store.read(path), Published, path=path)
        except MissingObject:
            return Published()

    # ------------------------------------------------------------------ copying

    def claim(self, generation: Generation) -> bool:
        """Take a generation for this process; False if another has it. Whoever writes in an older one stops at it.

        To be done before the checkpoints there are listed: one that an older process still seals is then either in the
        list, or that process sees the claim and publishes nothing of it.
        """
        if generation in self._claimed or not self._has_rivals:
            return True
        path = f"claims/{generation:06d}.json"
        if not self._store.create(path, self._token) and self._store.read(path) != self._token:
            return False
        self._claimed.add(generation)
        return True

    def enter(self, record: GenerationRecord) -> None:
        """Make known what a generation begins from: an epoch that it went back behind is of no use from now on."""
        if not self.claim(record.generation):
            raise self._fenced(record.generation)
        path = self._name(self._layout.generation(record.generation))
        data = records.encode(_GENERATION, record)
        if not self._store.create(path, data) and self._store.read(path) != data:
            raise self._fenced(record.generation)
        self.check_fence(record.generation)

    def begin(self, generation: Generation) -> None:
        """This process has run the flow since then: every generation that has followed is its own, or it was replaced.

        One that a region began while the store was away may have been taken by another host meanwhile.
        """
        self._begun = generation

    def check_claim(self, generation: Generation) -> None:
        """Raise FencedError unless the generation is this process's own, and the newest there is."""
        for number in range(min(self._begun or generation, generation), generation + 1):
            if not self.claim(Generation(number)):
                raise self._fenced(generation)
        self.check_fence(generation)

    def check_fence(self, generation: Generation) -> None:
        """Raise FencedError if there is a newer one."""
        if self._has_rivals and self.newest_generation() > generation:
            raise self._fenced(generation)

    def _fenced(self, generation: Generation) -> FencedError:
        return FencedError(
            "another host runs this flow: a newer generation has begun in the remote tier",
            next_step="stop this process",
            generation=generation,
        )

    def send(self, manifest: Manifest, generation: Generation) -> Copied:
        """Send all that the checkpoint needs but its manifest. ``generation``: in whose name.

        Raises StoreError; sending again does no harm.
        """
        # First: entries and segments are named by generations, and another host may have one of the same number.
        self.check_claim(generation)
        missing = self._missing(content_paths(manifest, self._layout))
        # What was sent ahead is held there, and looked for nevertheless: the checkpoint is about to rest on it.
        doubtful = {path: carried for path in missing if (carried := self._ahead.find(self._name(path))) is not None}
        lost = self._not_arrived(doubtful.values())
        self._ahead.drop(lost)
        sent: list[Carried] = []
        self._send_content((path for path in missing if path not in doubtful or self._name(path) in lost), sent)
        for path in [self._layout.identity, *self._generations(manifest.generation)]:
            name = self._name(path)
            if name not in self._created:
                data = path.read_bytes()
                is_other = not self._store.create(name, data) and self._store.read(name) != data
                if is_other and path != self._layout.identity:
                    raise self._fenced(Generation(int(path.stem)))
                self._created.add(name)
        for path in record_paths(manifest, self._layout).values():
            self._store.create(self._name(path), path.read_bytes())
        return _copied(manifest.epoch, sent)

    def send_ahead(self, manifest: Manifest, operators: Collection[OperatorId], generation: Generation) -> Copied:
        """Send what some operators have in a checkpoint that is not sealed yet. ``generation``: in whose name.

        It stays there until a checkpoint that needs it is sealed, or none that is sent ahead later needs it any more.
        Raises StoreError, DamagedRecordError or FencedError.
        """
        self._ahead.enter(generation)
        needed = set(map(self._name, content_paths(manifest, self._layout)))
        wanted = [
            path
            for path in self._missing(content_paths(manifest, self._layout, operators))
            if self._ahead.find(self._name(path)) is None
        ]
        sent: list[Carried] = []
        if wanted:
            self.check_claim(generation)
            self._ahead.announce(map(self._name, wanted), needed)
            crashpoint("remote-announced")
            try:
                self._send_content(wanted, sent)
            finally:
                self._ahead.add(sent)
        return _copied(manifest.epoch, sent)

    def seal(self, manifest: Manifest, generation: Generation, published: Published | None = None) -> Manifest:
        """Create the manifest, when all it needs was sent: now the checkpoint is there. ``generation``: in whose name.

        Returns the one that is there: an earlier life of the flow may have sealed it and not have lived to know.
        Raises StoreError; with OutcomeUnknown it may be there, and must be sealed again until that is known.
        """
        self.check_claim(generation)
        self._ahead.check(generation)
        if published is not None:
            self._store.replace(_published_name(manifest.epoch), records.encode(_PUBLISHED, published))
        path = self._name(self._layout.manifest(manifest.epoch))
        is_created = self._store.create(path, records.encode(_MANIFEST, manifest))
        # Once more: a host that claimed in between may have listed what was there before this one was.
        try:
            self.check_fence(generation)
        except StoreError as error:
            raise OutcomeUnknown(f"it is sealed, but who else is there is not known: {error}") from error
        if is_created:
            self._trusted = frozenset(map(self._name, content_paths(manifest, self._layout)))
            self._sent.clear()
            self._ahead.drop(self._trusted)
            return manifest
        self._trusted = None  # it is another's, or of an attempt whose end was not known: look again
        there = self.load_manifest(manifest.epoch)
        if there.flow != manifest.flow or there.generation > generation:
            raise FencedError(
                "another checkpoint of this number is in the remote tier",
                next_step="stop this process: another one runs the flow, or give it a remote place of its own",
                epoch=manifest.epoch,
                flow=manifest.flow,
            )
        return there

    def _name(self, path: Path) -> str:
        return path.relative_to(self._layout.root).as_posix()

    def _missing(self, paths: Iterable[Path]) -> list[Path]:
        """What is neither needed by the newest checkpoint there nor was sent of late, each once."""
        if self._trusted is None:
            self._trusted = self._needed_by_newest()
        young = time.monotonic() - _YOUNG_SECONDS
        self._sent = {name: sent_s for name, sent_s in self._sent.items() if sent_s > young}
        return [path for path in dict.fromkeys(paths) if not self._is_there(path)]

    def _is_there(self, path: Path) -> bool:
        name = self._name(path)
        return name in self._sent or name in (self._trusted or ())

    def _not_arrived(self, carried: Collection[Carried]) -> set[str]:
        with ThreadPoolExecutor(PARALLELISM) as pool:
            found = pool.map(lambda one: SEND.has_arrived(self._store, self._layout.root, one), carried)
            return {one.file.name for one, is_there in zip(carried, found, strict=True) if not is_there}

    def _needed_by_newest(self) -> frozenset[str]:
        for epoch in reversed(self.epochs()):
            with contextlib.suppress(DamagedRecordError, MissingObject):
                return frozenset(names_in(self._store, self.load_manifest(epoch), self._layout))
        return frozenset()

    def _send_content(self, paths: Iterable[Path], sent: list[Carried]) -> None:
        """``sent`` gets what has arrived, also if the rest fails."""

        def note(carried: Carried, begun_s: float) -> None:
            sent.append(carried)
            self._sent[carried.file.name] = begun_s

        with ThreadPoolExecutor(PARALLELISM) as pool:
            files = list(pool.map(self._file, paths))
        self._carrier.carry(SEND, files, note)

    def _file(self, path: Path) -> File:
        name = self._name(path)
        try:
            self._bring_near(path)
            return File(name, path.stat().st_size)
        except OSError as error:
            raise DamagedRecordError(f"a file of the checkpoint cannot be read: {error}", path=name) from error

    def give_up(self) -> None:
        """Make what is being sent or fetched end soon, with NotDone. To be repeated until it has ended."""
        self._carrier.give_up()

    def _bring_near(self, path: Path) -> None:
        """A segment may lie in the object store of the channels; the copy here goes when its entry does."""
        if path.parents[2] == self._layout.channels and not path.exists():
            SegmentStore.of(path.parents[1]).bring_near(path.name)

    def _generations(self, newest: Generation) -> list[Path]:
        paths = [path for path in self._layout.generations.iterdir() if not durable.is_temporary(path.name)]
        return sorted(path for path in paths if int(path.stem) <= newest)

    # ------------------------------------------------------------------ fetching

    def fetch_records(self) -> list[Epoch]:
        """See ``Fetching``."""
        return self._fetching.fetch_records()

    def fetch_content(self, manifest: Manifest) -> int:
        """See ``Fetching``."""
        return self._fetching.fetch_content(manifest)

    # ------------------------------------------------------------------ letting go

    def collect(
        self,
        keep: Collection[Epoch],
        *,
        now_ms: int,
        grace_ms: int,
        check_fence: Callable[[], None],
        is_dry_run: bool = False,
    ) -> list[ObjectInfo]:
        """Let go of every other checkpoint, and of what none needs and nobody has written of late; returns what went.

        Manifests first: killed half-way, a checkpoint is whole or not there. What is younger than ``grace_ms`` may
        belong to a checkpoint that is being copied, by whomever. A dry run returns what would go.
        """
        # Before the checkpoints are listed: what leaves that record meanwhile is then found in one of them.
        newest = self.newest_generation()
        held = sent_ahead.held(self._store, newest)
        there = {epoch: info for info in self._store.walk("checkpoints") if (epoch := _epoch_of(info.path)) is not None}
        gone = [info for epoch, info in sorted(there.items()) if epoch not in keep]
        check_fence()
        if not is_dry_run:
            self._store.delete(info.path for info in gone)
        kept = [epoch for epoch in there if epoch in keep] if is_dry_run else self.epochs()
        reached = self._reached(kept)
        if not reached:
            return gone
        reached |= held
        doomed = [
            info
            for info in self._store.walk()
            if now_ms - info.modified_ms >= grace_ms and _is_unneeded(info.path, reached, newest)
        ]
        leftovers = self._store.leftovers(grace_ms)
        check_fence()
        if not is_dry_run:
            for info in doomed:  # first: a removal that fails half-way may have removed any of them
                self._sent.pop(info.path.removesuffix(PACKED_SUFFIX), None)
                self._ahead.drop([info.path.removesuffix(PACKED_SUFFIX)])
            self._store.delete(info.path for info in doomed)
            self._store.drop_leftovers(grace_ms)
        return [*gone, *doomed, *leftovers]

    def _reached(self, epochs: Collection[Epoch]) -> set[str]:
        """All that these checkpoints need; those that another collector lets go of meanwhile are left out."""
        reached: set[str] = set()
        for epoch in epochs:
            reached.add(_published_name(epoch))
            try:
                reached.update(names_in(self._store, self.load_manifest(epoch), self._layout))
            except MissingObject:
                if self._store.find(self._name(self._layout.manifest(epoch))) is not None:
                    raise
        return reached


def _is_unneeded(path: str, reached: Collection[str], newest: Generation) -> bool:
    kind, name = path.partition("/")[0], path.removesuffix(PACKED_SUFFIX)
    if kind == "checkpoints":
        return not path.endswith("/manifest.json") and name not in reached
    return (kind in ("blobs", "channels", "published") and name not in reached) or sent_ahead.is_stale(path, newest)


def _copied(epoch: Epoch, sent: Collection[Carried]) -> Copied:
    return Copied(
        epoch=epoch,
        files=len(sent),
        size_bytes=sum(one.file.size_bytes for one in sent),
        sent_bytes=sum(one.stored_bytes for one in sent),
    )


def _published_name(epoch: Epoch) -> str:
    return f"published/{epoch:012d}.json"


def _epoch_of(path: str) -> Epoch | None:
    """Of a manifest's path; None of any other."""
    _, number, *rest = path.split("/")
    return Epoch(int(number)) if rest == ["manifest.json"] else None
