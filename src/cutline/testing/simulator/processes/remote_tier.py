"""One process's place in the remote tier: its claims, what it has uploaded, and what it collects there.

Which generations it must own, whether it was replaced, what a seal means and what may be collected is decided by the
protocol; here objects are read, created and deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.model.remote import SinkProgress
from cutline.protocol.history.histories import identities_of
from cutline.protocol.history.remote_claims import Seal, claims_needed, has_diverged, is_replaced, is_won, judge_seal
from cutline.protocol.history.remote_retention import kept_while_running, progress_of_kept, unreferenced
from cutline.testing.simulator.storage.bucket import Bucket, Fenced, RemoteAway
from cutline.testing.simulator.storage.checkpoints import EntryName, Name, content_names
from cutline.testing.simulator.storage.log import Entry
from cutline.testing.simulator.world import Steps, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow

#: An upload lasts much less than the grace period, as with the product's defaults.
_GRACE_MS, _YOUNG_MS = 200, 50
_MOST_PAUSES = 20


class RemoteTier:
    """What one process relies on in the bucket."""

    def __init__(self, flow: SimulatedFlow, bucket: Bucket, begun: Generation) -> None:
        self._flow = flow
        self._world = flow.world
        self._bucket = bucket
        self._token = flow.token
        #: Every generation since then is this process's own, or it was replaced.
        self._begun = begun
        #: What the newest checkpoint there needs; None: not looked at yet.
        self._trusted: set[Name] | None = None
        #: Sent of late, for a checkpoint that is not sealed: too young for any collector.
        self._sent_ms: dict[Name, int] = {}
        #: Sent before its checkpoint, perhaps long ago, and protected by the record of this generation.
        self._early: set[Name] = set()
        self._early_in = Generation(0)
        self._is_compared = False

    # ------------------------------------------------------------------ claims

    def check_claim(self) -> Generation:
        """The generation to write in. Raises Fenced unless it is this process's own, and the newest there is."""
        generation = self._flow.generation()
        for needed in claims_needed(self._begun, generation):
            if not claim(self._bucket, needed, self._token):
                raise Fenced
        self.check_fence(generation)
        self.check_history()
        return generation

    def check_history(self) -> None:
        """Once, before anything is written: the start may not have been able to ask."""
        if self._is_compared:
            return
        known = identities_of(self._flow.disk.generations.values()) | self._flow.disk.announced | self._flow.known_there
        if has_diverged(self._bucket.generations(), known, self._begun):
            raise Fenced
        self._is_compared = True

    def check_fence(self, generation: Generation) -> None:
        if is_replaced(generation, self._bucket.newest_generation()):
            raise Fenced

    # ------------------------------------------------------------------ uploading

    def send(self, manifest: Manifest, is_wanted: Callable[[], bool]) -> Steps:
        """All that the checkpoint needs but its manifest; ends early when it is not wanted any more."""
        self.check_claim()
        names = self._missing(content_names(manifest, self._flow.disk.records))
        # What was uploaded early is looked for nevertheless: the checkpoint is about to rest on it.
        self._early = {name for name in self._early if self._bucket.has(name)}
        yield from self._upload(manifest, [name for name in names if name not in self._early], is_wanted)
        if not is_wanted():
            return
        for generation, record in sorted(self._flow.disk.generations.items()):
            if generation <= manifest.generation and not self._bucket.create_generation(record):
                raise Fenced
        for key in [(manifest.epoch, name, cut.generation) for name, cut in manifest.operators.items()]:
            self._bucket.create_record(key, self._flow.disk.records[key], self._world.now_ms)
        self._world.counts["uploads"] += 1

    def send_early(self, manifest: Manifest, operators: Collection[OperatorId]) -> Steps:
        """What some operators have in a checkpoint that is not sealed yet; protected before it is sent."""
        generation = self.check_claim()
        if generation != self._early_in:
            self._early.clear()
            self._early_in = generation
        needed = content_names(manifest, self._flow.disk.records)
        own = {name for name in needed if (name.channel if isinstance(name, EntryName) else name[0]) in operators}
        wanted = [name for name in self._missing(own) if name not in self._early]
        if wanted:
            self._early &= needed
            self._bucket.note_early(generation, frozenset(self._early | set(wanted)))
            yield from self._upload(manifest, wanted, lambda: True, self._early)
            self._world.counts["early_uploads"] += 1

    def _missing(self, names: Collection[Name]) -> list[Name]:
        """What is neither needed by the newest checkpoint there nor was sent of late."""
        if self._trusted is None:
            self._trusted = self._needed_by_newest()
        young = self._world.now_ms - _YOUNG_MS
        trusted = self._trusted
        return sorted((one for one in names if one not in trusted and self._sent_ms.get(one, 0) <= young), key=repr)

    def _upload(
        self, manifest: Manifest, names: list[Name], is_wanted: Callable[[], bool], into: set[Name] | None = None
    ) -> Steps:
        pauses = min(0.3, _MOST_PAUSES / max(len(names), 1))
        for name in names:
            if self._world.rng.random() < pauses:
                yield 1
                if not is_wanted():
                    return
            self._bucket.upload(name, self._content(manifest, name), self._world.now_ms)
            self._sent_ms[name] = self._world.now_ms
            if into is not None:
                into.add(name)

    def _content(self, manifest: Manifest, name: Name) -> Entry | None:
        disk = self._flow.disk
        if not isinstance(name, EntryName):
            if name not in disk.blobs:
                raise Violation(f"epoch {manifest.epoch} is held, and its content is gone: {name}")
            return None
        entry = disk.logs[name.channel].entry(name.generation, name.seq)
        if entry is None:
            raise Violation(f"epoch {manifest.epoch} is held, and entry {name.seq} of {name.channel} is gone")
        return entry

    def _needed_by_newest(self) -> set[Name]:
        epochs = self._bucket.epochs()
        manifest = self._bucket.manifest(epochs[-1]) if epochs else None
        return self._bucket.names_of(manifest) if manifest is not None else set()

    def seal(self, manifest: Manifest) -> Seal:
        """Create the manifest when all it needs was sent: now the checkpoint is there."""
        generation = self.check_claim()
        if self._early and self._early_in != generation:
            self._early.clear()
            raise RemoteAway  # it stands in the record of an earlier generation and must be sent again
        note = SinkProgress(everywhere=self._flow.published_everywhere(), seen=dict(self._flow.disk.seen))
        self._bucket.note_published(manifest.epoch, note)
        is_created = self._bucket.create_manifest(manifest)
        if self._world.strikes("store_unknown"):
            raise RemoteAway
        # Once more: a host that claimed in between may have listed what was there before this one was.
        self.check_fence(generation)
        there = self._bucket.manifest(manifest.epoch)
        if there is None:
            raise Violation(f"epoch {manifest.epoch} was sealed in the remote tier and is gone")
        verdict = judge_seal(manifest, there, generation)
        if verdict is Seal.FENCED:
            raise Fenced
        check_sealed(self._bucket, there)
        self._trusted = self._bucket.names_of(there) if is_created else None
        if is_created:
            self._sent_ms.clear()
            self._early -= self._trusted or set()
        self._world.tell("uploader", "seals", epoch=manifest.epoch)
        self._world.counts["sealed"] += 1
        return verdict

    # ------------------------------------------------------------------ collecting

    def _on_ladder(self) -> set[Epoch]:
        """What the local tier keeps for longer stays here too."""
        has_ladder = bool(self._flow.settings.retention.ladder)
        return {one.manifest.epoch for one in self._flow.live()} if has_ladder else set()

    def collect(self, uploaded: Epoch) -> Steps:
        """Manifests first: killed half-way, a checkpoint is whole or not there."""
        newest = self._bucket.newest_generation()
        protected = self._bucket.early(newest)
        there = self._bucket.epochs()
        keep = kept_while_running(
            there,
            uploaded=uploaded,
            published=self._flow.published_everywhere(),
            pins=self._flow.disk.pins | self._on_ladder(),
            retain=self._flow.settings.remote_retain,
        )
        self.check_claim()
        dropped = {epoch for epoch in there if epoch not in keep}
        if dropped:
            # First: that they were published is what a new host must know of those that stay.
            note = SinkProgress(everywhere=self._flow.published_everywhere(), seen=dict(self._flow.disk.seen))
            for epoch in sorted(set(there) - dropped):
                merged = progress_of_kept(epoch, self._bucket.published_before(epoch), note)
                self._bucket.note_published(epoch, merged)
        self._bucket.delete_manifests(dropped)
        yield 1
        reached = _reached(self._bucket)
        if not reached:
            return
        needed = {repr(name) for name in reached | protected}
        doomed = unreferenced(
            self._bucket.objects(), needed=needed, newest=newest, now_ms=self._world.now_ms, grace_ms=_GRACE_MS
        )
        self.check_claim()
        paths = {one.path for one in doomed}
        self._sent_ms = {name: at for name, at in self._sent_ms.items() if repr(name) not in paths}
        self._early = {name for name in self._early if repr(name) not in paths}
        self._bucket.delete(paths)
        _check_all_sealed(self._bucket)


def collect_beside(flow: SimulatedFlow, bucket: Bucket) -> Steps:
    """Another process of the same generation collects what no checkpoint needs, and knows nothing of uploads.

    Such a process is ``cutline gc`` on a machine that shares the flow's folder and does not see its lock.
    """
    newest = bucket.newest_generation()
    protected = bucket.early(newest)
    yield flow.world.between(0, 3)
    reached = _reached(bucket)
    yield flow.world.between(0, 3)
    if not reached:
        return
    needed = {repr(name) for name in reached | protected}
    doomed = unreferenced(bucket.objects(), needed=needed, newest=newest, now_ms=flow.world.now_ms, grace_ms=_GRACE_MS)
    if not is_replaced(newest, bucket.newest_generation()):
        bucket.delete({one.path for one in doomed})
        flow.world.counts["collected_beside"] += 1
        _check_all_sealed(bucket)


def _reached(bucket: Bucket) -> set[Name]:
    """What the checkpoints there need."""
    manifests = [bucket.manifest(epoch) for epoch in bucket.epochs()]
    return {name for one in manifests if one is not None for name in bucket.names_of(one)}


def _check_all_sealed(bucket: Bucket) -> None:
    for epoch in bucket.epochs():
        manifest = bucket.manifest(epoch)
        if manifest is not None:
            check_sealed(bucket, manifest)


def check_sealed(bucket: Bucket, manifest: Manifest) -> None:
    missing = bucket.lacks(manifest)
    if missing:
        raise Violation(f"epoch {manifest.epoch} is in the remote tier without {missing[0]}")


def claim(bucket: Bucket, generation: Generation, token: str) -> bool:
    """Take a generation for a process; False if another has it."""
    is_created = bucket.create_claim(generation, token)
    found = None if is_created else bucket.claimed_by(generation)
    return is_won(token.encode(), is_created=is_created, found=None if found is None else found.encode())


def enter(bucket: Bucket, record: GenerationRecord, token: str) -> None:
    """Make known what a generation begins from: an epoch that it gives up is of no use from now on."""
    if not claim(bucket, record.generation, token) or not bucket.create_generation(record):
        raise Fenced
    if is_replaced(record.generation, bucket.newest_generation()):
        raise Fenced
