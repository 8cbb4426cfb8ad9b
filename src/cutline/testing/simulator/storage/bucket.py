"""The remote tier's bucket: objects are created once and durable at once; sometimes it is away."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, Generation
from cutline.model.remote import SinkProgress
from cutline.protocol.history.known_checkpoints import of_present_history
from cutline.protocol.history.remote_claims import newest_generation
from cutline.protocol.history.remote_retention import ObjectKind, RemoteObject
from cutline.testing.simulator.storage.checkpoints import Name, Record, RecordKey, content_names
from cutline.testing.simulator.storage.log import Entry


class RemoteAway(Exception):  # noqa: N818 (nothing is wrong with the simulator)
    """The remote tier does not answer."""


class Fenced(Exception):  # noqa: N818 (as above)
    """Another process has taken the flow over."""


class Bucket:
    """One flow's place in an object store, shared by all hosts."""

    def __init__(self) -> None:
        self.is_away = False
        self._claims: dict[Generation, str] = {}
        self._generations: dict[Generation, GenerationRecord] = {}
        self._manifests: dict[Epoch, Manifest] = {}
        self._records: dict[RecordKey, Record] = {}
        self._recorded_ms: dict[RecordKey, int] = {}
        self._published: dict[Epoch, SinkProgress] = {}
        #: With the time of the last write.
        self._content: dict[Name, tuple[Entry | None, int]] = {}
        #: Per generation: content that is uploaded before its checkpoint, and must not be collected.
        self._early: dict[Generation, frozenset[Name]] = {}

    def snapshot(self) -> Bucket:
        """A copy of everything in it, as a backup makes it."""
        copy = Bucket()
        copy.become(self)
        return copy

    def become(self, other: Bucket) -> None:
        """Hold what the other one holds, and nothing else."""
        self._claims, self._generations = dict(other._claims), dict(other._generations)
        self._manifests, self._published = dict(other._manifests), dict(other._published)
        self._records, self._recorded_ms = dict(other._records), dict(other._recorded_ms)
        self._content, self._early = dict(other._content), dict(other._early)

    def _answer(self) -> None:
        if self.is_away:
            raise RemoteAway

    # ------------------------------------------------------------------ claims

    def newest_generation(self) -> Generation:
        self._answer()
        return newest_generation(self._generations, self._claims)

    def create_claim(self, generation: Generation, token: str) -> bool:
        self._answer()
        if generation in self._claims:
            return False
        self._claims[generation] = token
        return True

    def claimed_by(self, generation: Generation) -> str | None:
        self._answer()
        return self._claims.get(generation)

    def generations(self) -> list[GenerationRecord]:
        self._answer()
        return [self._generations[one] for one in sorted(self._generations)]

    def create_generation(self, record: GenerationRecord) -> bool:
        self._answer()
        return self._generations.setdefault(record.generation, record) == record

    # ------------------------------------------------------------------ checkpoints

    def epochs(self) -> list[Epoch]:
        self._answer()
        return sorted(self._manifests)

    def completed(self) -> list[tuple[Epoch, Generation]]:
        """With the generations that completed them, ascending."""
        return [(epoch, self._manifests[epoch].generation) for epoch in self.epochs()]

    def has_checkpoint_of(self, generations: Iterable[GenerationRecord]) -> bool:
        """Whether it has one of this history; known without asking it."""
        history = sorted(generations, key=lambda one: one.generation)
        return bool(of_present_history(self._manifests.values(), history))

    def has_manifest(self, epoch: Epoch) -> bool:
        """As above."""
        return epoch in self._manifests

    def manifest(self, epoch: Epoch) -> Manifest | None:
        self._answer()
        return self._manifests.get(epoch)

    def create_manifest(self, manifest: Manifest) -> bool:
        self._answer()
        return self._manifests.setdefault(manifest.epoch, manifest) is manifest

    def record(self, key: RecordKey) -> Record | None:
        self._answer()
        return self._records.get(key)

    def create_record(self, key: RecordKey, record: Record, now_ms: int) -> None:
        self._answer()
        if self._records.setdefault(key, record) is record:
            self._recorded_ms[key] = now_ms

    def note_published(self, epoch: Epoch, note: SinkProgress) -> None:
        self._answer()
        self._published[epoch] = note

    def published_before(self, epoch: Epoch) -> SinkProgress:
        self._answer()
        return self._published.get(epoch, SinkProgress())

    # ------------------------------------------------------------------ content

    def upload(self, name: Name, content: Entry | None, now_ms: int) -> None:
        self._answer()
        self._content[name] = (content, now_ms)

    def download(self, name: Name) -> Entry | None:
        """KeyError: it is not there."""
        self._answer()
        return self._content[name][0]

    def has(self, name: Name) -> bool:
        self._answer()
        return name in self._content

    def lacks(self, manifest: Manifest) -> list[Name]:
        """What a checkpoint needs and is not there; known without asking it."""
        return [name for name in content_names(manifest, self._records) if name not in self._content]

    def note_early(self, generation: Generation, names: frozenset[Name]) -> None:
        self._answer()
        self._early[generation] = names

    def early(self, generation: Generation) -> frozenset[Name]:
        self._answer()
        return self._early.get(generation, frozenset())

    # ------------------------------------------------------------------ collecting

    def delete_manifests(self, epochs: set[Epoch]) -> None:
        self._answer()
        for epoch in epochs:
            del self._manifests[epoch]
            self._published.pop(epoch, None)

    def objects(self) -> list[RemoteObject]:
        """What a listing shows of what is needed by name, or protects what is uploaded early."""
        self._answer()
        listed = [
            RemoteObject(path=repr(name), name=repr(name), kind=ObjectKind.NEEDED_BY_NAME, modified_ms=at)
            for name, (_, at) in self._content.items()
        ]
        for key in self._records:
            # As long as its checkpoint is there, a record is needed by name.
            if key[0] not in self._manifests:
                path = repr(key)
                listed.append(
                    RemoteObject(
                        path=path, name=path, kind=ObjectKind.NEEDED_BY_NAME, modified_ms=self._recorded_ms[key]
                    )
                )
        for generation in self._early:
            path = f"early-{generation}"
            listed.append(
                RemoteObject(path=path, name=path, kind=ObjectKind.EARLY_UPLOADS, modified_ms=0, generation=generation)
            )
        return listed

    def delete(self, paths: set[str]) -> None:
        self._answer()
        self._content = {name: value for name, value in self._content.items() if repr(name) not in paths}
        self._records = {key: record for key, record in self._records.items() if repr(key) not in paths}
        self._early = {one: names for one, names in self._early.items() if f"early-{one}" not in paths}

    def names_of(self, manifest: Manifest) -> set[Name]:
        """All content that a checkpoint needs; KeyError if one of its records is gone."""
        self._answer()
        return content_names(manifest, self._records)
