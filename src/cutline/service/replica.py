"""Checkpoints of one flow in an object store, laid out there as in the flow's own folder.

A checkpoint is copied file by file, the manifest last and only once: it is there with all it needs, or not at all.
What is content-addressed or numbered never changes, so what is there already is not copied again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from cutline import durable, records
from cutline.channels import entries as codec
from cutline.channels.entries import DataEntry
from cutline.errors import DamagedRecordError, FencedError, MissingObject, OutcomeUnknown, StoreError
from cutline.ids import Epoch, Generation, OperatorId, Position
from cutline.layout import Layout
from cutline.ports import GenerationRecord, Manifest, ObjectStore, OperatorRecord
from cutline.ports.objects import ObjectInfo
from cutline.protocol.retention import EpochNeeds
from cutline.service.janitor import needs_of
from cutline.service.manifests import lineage_of

#: Larger files are sent in parts as they are; smaller ones fit into memory, and are packed if that pays.
_PACKED_BYTES = 32 << 20
_SMALL_BYTES = 4 << 10
_PACKED_SUFFIX = ".zst"
#: Packing pays if it saves a fifth.
_PAYS = 0.8
#: What was sent so long ago is sent again: a collector with a short grace period may have taken it.
_YOUNG_SECONDS = 60.0
_MANIFEST, _RECORD, _GENERATION = "manifest", "operator", "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What copying a checkpoint took."""

    epoch: Epoch
    #: Of this copy alone; what was there before was not sent again.
    files: int
    size_bytes: int
    #: As they travelled.
    sent_bytes: int


class Replica:
    """One flow's place in an object store."""

    def __init__(self, store: ObjectStore, layout: Layout, *, parallelism: int = 8, has_rivals: bool = True) -> None:
        """``has_rivals``: other hosts may write there too, each in generations that it has claimed."""
        self._store = store
        self._has_rivals = has_rivals
        #: Tells our claims from those of others.
        self._token = str(uuid.uuid4()).encode()
        self._claimed: set[Generation] = set()
        self._layout = layout
        self._parallelism = parallelism
        #: What the newest checkpoint there needs, which no collector takes; None: not looked at yet. Whatever else lies
        #: there may be gone at any time, so it is sent again.
        self._trusted: frozenset[str] | None = None
        #: Sent of late, for a checkpoint that is not sealed: too young for any collector.
        self._sent: dict[str, float] = {}
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

    def check_claim(self, generation: Generation) -> None:
        """Raise FencedError unless the generation is this process's own, and the newest there is."""
        if not self.claim(generation):
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

    def send(self, manifest: Manifest) -> Copied:
        """Send all that the checkpoint needs but its manifest. Raises StoreError; sending again does no harm."""
        if self._trusted is None:
            self._trusted = self._needed_by_newest()
        young = time.monotonic() - _YOUNG_SECONDS
        self._sent = {name: sent_s for name, sent_s in self._sent.items() if sent_s > young}
        wanted = [path for path in self._content_of(manifest) if not self._is_there(path)]
        with ThreadPoolExecutor(self._parallelism) as pool:
            sent = list(pool.map(self._send, wanted))
        for path in [self._layout.identity, *self._generations(manifest.generation)]:
            name = self._name(path)
            if name not in self._created:
                data = path.read_bytes()
                is_other = not self._store.create(name, data) and self._store.read(name) != data
                if is_other and path != self._layout.identity:
                    raise self._fenced(Generation(int(path.stem)))
                self._created.add(name)
        for path in self._records_of(manifest):
            self._store.create(self._name(path), path.read_bytes())
        return Copied(
            epoch=manifest.epoch,
            files=len(wanted),
            size_bytes=sum(size for size, _ in sent),
            sent_bytes=sum(travelled for _, travelled in sent),
        )

    def seal(self, manifest: Manifest, generation: Generation) -> Manifest:
        """Create the manifest, when all it needs was sent: now the checkpoint is there. ``generation``: in whose name.

        Returns the one that is there: an earlier life of the flow may have sealed it and not have lived to know.
        Raises StoreError; with OutcomeUnknown it may be there, and must be sealed again until that is known.
        """
        self.check_claim(generation)
        path = self._name(self._layout.manifest(manifest.epoch))
        is_created = self._store.create(path, records.encode(_MANIFEST, manifest))
        # Once more: a host that claimed in between may have listed what was there before this one was.
        try:
            self.check_fence(generation)
        except StoreError as error:
            raise OutcomeUnknown(f"it is sealed, but who else is there is not known: {error}") from error
        if is_created:
            self._trusted = frozenset(self._name(one) for one in self._content_of(manifest))
            self._sent.clear()
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

    def _is_there(self, path: Path) -> bool:
        name = self._name(path)
        return name in self._sent or name in (self._trusted or ())

    def _needed_by_newest(self) -> frozenset[str]:
        for epoch in reversed(self.epochs()):
            with contextlib.suppress(DamagedRecordError, MissingObject):
                return frozenset(self._names_of(self.load_manifest(epoch)))
        return frozenset()

    def _send(self, path: Path) -> tuple[int, int]:
        try:
            return self._send_file(path)
        except OSError as error:
            raise DamagedRecordError(
                f"a file of the checkpoint cannot be read: {error}", path=self._name(path)
            ) from error

    def _send_file(self, path: Path) -> tuple[int, int]:
        name, size = self._name(path), path.stat().st_size
        sent = size
        is_blob = self._layout.blobs in path.parents
        if size <= _PACKED_BYTES:
            content = path.read_bytes()
            if is_blob and hashlib.sha256(content).hexdigest() != path.name:
                raise DamagedRecordError("a blob does not match its hash", path=name)
            packed = _packed(content)
            if packed is not None:
                name, content = name + _PACKED_SUFFIX, packed
            self._store.replace(name, content)
            sent = len(content)
        elif is_blob and _sha256(path) != path.name:
            raise DamagedRecordError("a blob does not match its hash", path=name)
        else:
            self._store.upload(name, path)
        self._sent[name.removesuffix(_PACKED_SUFFIX)] = time.monotonic()
        return size, sent

    def _generations(self, newest: Generation) -> list[Path]:
        paths = [path for path in self._layout.generations.iterdir() if not durable.is_temporary(path.name)]
        return sorted(path for path in paths if int(path.stem) <= newest)

    def _records_of(self, manifest: Manifest) -> list[Path]:
        return [self._layout.record(manifest.epoch, name, cut.generation) for name, cut in manifest.operators.items()]

    def _content_of(self, manifest: Manifest) -> list[Path]:
        """Blobs, and the part of every log that a restore reads: what is in flight, with its rows, and the barrier."""
        paths: dict[Path, None] = {}
        for path in self._records_of(manifest):
            for file in records.load(_RECORD, path, OperatorRecord).files():
                if file.content is None:
                    paths[self._layout.blob(file.sha256)] = None
        for entry_path, segments in self._log_files(manifest):
            paths.update(dict.fromkeys([*segments, entry_path]))
        return list(paths)

    def _log_files(self, manifest: Manifest) -> Iterator[tuple[Path, list[Path]]]:
        for entry_path in entry_paths(manifest, self._layout):
            entry = codec.load(entry_path)
            folder = codec.data_dir(entry_path.parents[1])
            yield entry_path, [folder / one.name for one in entry.segments] if isinstance(entry, DataEntry) else []

    # ------------------------------------------------------------------ fetching

    def fetch_records(self) -> list[Epoch]:
        """Bring what is small into the flow's folder: who it is, its generations, every checkpoint's records.

        Manifests last: killed on the way, no checkpoint is there without its records. Returns the epochs.
        """
        # Generations are listed last: each is there before any checkpoint of it.
        names = [info.path for folder in ("checkpoints", "generations") for info in self._store.walk(folder)]
        manifests = [name for name in names if name.endswith("/manifest.json")]
        # Records of checkpoints that were let go of may lie there for a while yet: they are not worth a request each.
        whole = {name.rpartition("/")[0] for name in manifests} | {"generations"}
        small = [name for name in names if name.rpartition("/")[0] in whole and not name.endswith("/manifest.json")]
        with ThreadPoolExecutor(self._parallelism) as pool:
            for some in (["flow.json", *small], manifests):
                list(pool.map(self._fetch_small, some))
        epochs = (Epoch(int(name.split("/")[1])) for name in manifests)
        return sorted(epoch for epoch in epochs if self._layout.manifest(epoch).exists())

    def _fetch_small(self, name: str) -> None:
        target = self._layout.root / name
        if target.exists() and records.is_whole(target.read_bytes()):
            return
        durable.make_dir(target.parent)
        with contextlib.suppress(MissingObject):  # collected meanwhile
            durable.replace(target, self._store.read(name))

    def fetch_content(self, manifest: Manifest, on_progress: Callable[[int, int], None] = lambda *_: None) -> int:
        """Bring all that a restore to this epoch reads; what is there and whole is left alone. Returns bytes fetched.

        Blobs are checked against their names. Raises DamagedRecordError or StoreError.
        """
        wanted = {
            file.sha256: file.size_bytes
            for path in self._records_of(manifest)
            for file in records.load(_RECORD, path, OperatorRecord).files()
            if file.content is None
        }
        blobs = [self._layout.blob(digest) for digest in wanted if not self._is_whole(digest, wanted[digest])]
        done = 0
        with ThreadPoolExecutor(self._parallelism) as pool:
            for number, size in enumerate(pool.map(self._fetch_blob, blobs), start=1):
                done += size
                on_progress(number, len(blobs))
            entries = list(entry_paths(manifest, self._layout))
            done += sum(pool.map(self._fetch, entries))
            segments = [segment for _, found in self._log_files(manifest) for segment in found]
            done += sum(pool.map(self._fetch, segments))
        return done

    def _is_whole(self, digest: str, size_bytes: int) -> bool:
        path = self._layout.blob(digest)
        return path.exists() and path.stat().st_size == size_bytes and _sha256(path) == digest

    def _fetch_blob(self, path: Path) -> int:
        path.unlink(missing_ok=True)
        size = self._fetch(path)
        if _sha256(path) != path.name:
            path.unlink()
            raise DamagedRecordError("a blob in the remote tier does not match its hash", path=self._name(path))
        return size

    def _fetch(self, path: Path) -> int:
        """A file that may have been packed; replaces what is there."""
        durable.make_dir(path.parent)
        name = self._name(path)
        try:
            packed = self._store.read(name + _PACKED_SUFFIX)
        except MissingObject:
            try:
                self._store.download(name, path)
            except MissingObject as error:
                raise DamagedRecordError("a file is missing in the remote tier", path=name) from error
        else:
            durable.replace(path, _unpacked(packed, name))
        return path.stat().st_size

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
        there = {epoch: info for info in self._store.walk("checkpoints") if (epoch := _epoch_of(info.path)) is not None}
        gone = [info for epoch, info in sorted(there.items()) if epoch not in keep]
        check_fence()
        if not is_dry_run:
            self._store.delete(info.path for info in gone)
        kept = [epoch for epoch in there if epoch in keep] if is_dry_run else self.epochs()
        reached = self._reached(kept)
        if not reached:
            return gone
        doomed = [
            info
            for info in self._store.walk()
            if now_ms - info.modified_ms >= grace_ms and self._is_unneeded(info.path, reached)
        ]
        leftovers = self._store.leftovers(grace_ms)
        check_fence()
        if not is_dry_run:
            for info in doomed:  # first: a removal that fails half-way may have removed any of them
                self._sent.pop(info.path.removesuffix(_PACKED_SUFFIX), None)
            self._store.delete(info.path for info in doomed)
            self._store.drop_leftovers(grace_ms)
        return [*gone, *doomed, *leftovers]

    def _reached(self, epochs: Collection[Epoch]) -> set[str]:
        """All that these checkpoints need; those that another collector lets go of meanwhile are left out."""
        reached: set[str] = set()
        for epoch in epochs:
            try:
                reached.update(self._names_of(self.load_manifest(epoch)))
            except MissingObject:
                if self._store.find(self._name(self._layout.manifest(epoch))) is not None:
                    raise
        return reached

    def _names_of(self, manifest: Manifest) -> Iterator[str]:
        for path in self._records_of(manifest):
            name = self._name(path)
            yield name
            record = records.decode(_RECORD, self._store.read(name), OperatorRecord, path=name)
            for file in record.files():
                if file.content is None:
                    yield self._name(self._layout.blob(file.sha256))
        for path in entry_paths(manifest, self._layout):
            name = self._name(path)
            yield name
            entry = self._read_entry(name)
            folder = self._name(codec.data_dir(path.parents[1]))
            for segment in entry.segments if isinstance(entry, DataEntry) else ():
                yield f"{folder}/{segment.name}"

    def _read_entry(self, name: str) -> codec.Entry:
        try:
            data = _unpacked(self._store.read(name + _PACKED_SUFFIX), name)
        except MissingObject:
            data = self._store.read(name)
        return codec.decode(data, name)

    def _is_unneeded(self, path: str, reached: set[str]) -> bool:
        kind, name = path.partition("/")[0], path.removesuffix(_PACKED_SUFFIX)
        if kind == "checkpoints":
            return not path.endswith("/manifest.json") and name not in reached
        return kind in ("blobs", "channels") and name not in reached


def _epoch_of(path: str) -> Epoch | None:
    """Of a manifest's path; None of any other."""
    _, number, *rest = path.split("/")
    return Epoch(int(number)) if rest == ["manifest.json"] else None


def entry_paths(manifest: Manifest, layout: Layout) -> Iterator[Path]:
    """The entries of every log that a restore reads."""
    needs: EpochNeeds = needs_of(manifest)
    for name, cut in manifest.channels.items():
        lineage = lineage_of(cut.lineage)
        for seq in range(needs.channels[OperatorId(name)], cut.barrier + 1):
            position = Position(seq)
            yield codec.entry_path(layout.channel(name), lineage.owner(position), position)


def _packed(content: bytes) -> bytes | None:
    """None when packing does not pay."""
    if len(content) < _SMALL_BYTES:
        return None
    packed = pa.compress(content, codec="zstd", asbytes=True)
    header = len(content).to_bytes(8, "little")
    return header + packed if len(packed) + len(header) <= _PAYS * len(content) else None


def _unpacked(packed: bytes, name: str) -> bytes:
    try:
        size = int.from_bytes(packed[:8], "little")
        content: bytes = pa.decompress(packed[8:], decompressed_size=size, codec="zstd", asbytes=True)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise DamagedRecordError("a packed file in the remote tier cannot be read", path=name) from error
    return content


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
