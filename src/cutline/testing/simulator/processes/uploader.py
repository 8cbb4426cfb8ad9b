"""Copies checkpoints to the remote tier, one at a time, as the protocol's schedule says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId
from cutline.protocol.history.remote_claims import Seal
from cutline.protocol.history.remote_schedule import Cadence, EarlyUpload, Upload, UploadSchedule, epochs_to_upload
from cutline.testing.simulator.processes.remote_tier import RemoteTier, enter
from cutline.testing.simulator.storage import checks
from cutline.testing.simulator.storage.bucket import Bucket, Fenced, RemoteAway
from cutline.testing.simulator.storage.checkpoints import Checkpoint
from cutline.testing.simulator.world import Steps

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow

_COLLECT_MS = 300
_RETRY_MS = 30
#: The schedule counts in seconds, of which a simulated flow lives only a few.
_MS_PER_SECOND = 100

#: Hears what is in the remote tier now, or why nothing is.
Done = Callable[[Manifest | None, str], None]


@dataclass(frozen=True, slots=True)
class _First:
    """A checkpoint that must be in the remote tier before it counts."""

    manifest: Manifest
    done: Done
    #: False when the coordinator that waits for it is dead or was replaced.
    is_wanted: Callable[[], bool]


class Uploader:
    """Lives as long as its flow's process."""

    def __init__(self, flow: SimulatedFlow, bucket: Bucket, entered: GenerationRecord) -> None:
        self.is_alive = True
        self._flow = flow
        self._world = flow.world
        self._bucket = bucket
        self._token = flow.token
        self._entered: GenerationRecord | None = entered
        self._tier = RemoteTier(flow, bucket, entered.generation)
        settings = flow.settings
        scale = 1000 // _MS_PER_SECOND
        own_ms = {name: ms * scale for name, ms in settings.own_upload_intervals_ms.items()}
        self._schedule = UploadSchedule(Cadence(settings.upload_interval_ms * scale, own_ms))
        self._firsts: deque[_First] = deque()
        self._collected_ms = flow.world.now_ms

    def start(self) -> None:
        self._world.spawn(self._run(), self)

    def completed(self, epoch: Epoch) -> None:
        """A checkpoint is complete: it, or a later one, follows."""
        self._schedule.completed(epoch)

    def first(self, manifest: Manifest, done: Done, is_wanted: Callable[[], bool]) -> None:
        self._firsts.append(_First(manifest, done, is_wanted))

    def _now_s(self) -> float:
        return self._world.now_ms / _MS_PER_SECOND

    # ------------------------------------------------------------------ the loop

    def _run(self) -> Steps:
        try:
            while True:
                yield self._world.between(8, 25)
                try:
                    yield from self._turn()
                except RemoteAway:
                    self._world.counts["remote_failures"] += 1
                    yield _RETRY_MS
        except Fenced:
            self._world.tell("uploader", "is fenced")
            self.is_alive = False
            self._flow.fenced("another host runs this flow")

    def _turn(self) -> Steps:
        if self._firsts:
            yield from self._bring_first(self._firsts.popleft())
            return
        match self._schedule.due(self._now_s()):
            case Upload(newest=newest):
                yield from self._bring(newest)
            case EarlyUpload(newest=newest, operators=operators):
                yield from self._bring_early(newest, operators)
            case None:
                pass
        if self._world.now_ms - self._collected_ms >= _COLLECT_MS and self._schedule.uploaded != NO_EPOCH:
            self._collected_ms = self._world.now_ms
            yield from self._tier.collect(self._schedule.uploaded)

    def _enter(self) -> None:
        """Said before anything else is written there: an older process that still copies stops at it."""
        if self._entered is not None:
            self._tier.check_history()
            enter(self._bucket, self._entered, self._token)
            self._entered = None

    # ------------------------------------------------------------------ uploading

    def _kept(self) -> list[Epoch]:
        return [one.manifest.epoch for one in self._flow.disk.complete()]

    def _bring(self, newest: Epoch) -> Steps:
        schedule = self._schedule
        schedule.began(self._now_s())
        published = self._flow.published_everywhere()
        epochs = epochs_to_upload(self._kept(), done_up_to=schedule.done_up_to, newest=newest, published=published)
        try:
            self._enter()
            for epoch in epochs:
                yield from self._copy(epoch)
        except RemoteAway:
            schedule.failed(self._now_s())
            raise
        if not epochs:
            schedule.skipped(newest)

    def _copy(self, epoch: Epoch) -> Steps:
        collector = self._flow.collector()
        if collector is None or not collector.hold(epoch):
            return  # a later one has taken its place
        try:
            checkpoint = self._flow.disk.checkpoint(epoch)
            if checkpoint is None or not self._can_be_copied(checkpoint):
                self._schedule.skipped(epoch)
                return
            yield from self._tier.send(checkpoint.manifest, lambda: True)
            if self._tier.seal(checkpoint.manifest) is Seal.SEALED:
                self._schedule.sealed(epoch, self._now_s())
            else:
                self._schedule.skipped(epoch)
        finally:
            collector.end_hold(epoch)

    def _can_be_copied(self, checkpoint: Checkpoint) -> bool:
        """Not one of which only the records were downloaded, nor one that was given up and is being collected."""
        disk = self._flow.disk
        return checkpoint.manifest.epoch not in disk.only_records and checks.is_live(disk, checkpoint)

    def _bring_early(self, newest: Epoch, operators: frozenset[OperatorId]) -> Steps:
        cadence = self._schedule.cadence
        kept = [epoch for epoch in self._kept() if self._schedule.done_up_to < epoch <= newest]
        collector = self._flow.collector()
        if not kept or collector is None or not collector.hold(kept[-1]):
            cadence.sent(operators, newest, self._now_s())
            return
        try:
            checkpoint = self._flow.disk.checkpoint(kept[-1])
            if checkpoint is not None and self._can_be_copied(checkpoint):
                self._enter()
                yield from self._tier.send_early(checkpoint.manifest, operators)
            cadence.sent(operators, newest, self._now_s())
        except RemoteAway:
            cadence.failed(self._now_s())
            raise
        finally:
            collector.end_hold(kept[-1])

    def _bring_first(self, request: _First) -> Steps:
        manifest = request.manifest
        try:
            if request.is_wanted():
                self._enter()
                yield from self._tier.send(manifest, request.is_wanted)
        except RemoteAway:
            request.done(None, "the remote tier is away")
            return
        is_unknown = False
        while request.is_wanted():
            try:
                verdict = self._tier.seal(manifest)
            except RemoteAway:
                is_unknown = is_unknown or self._bucket.has_manifest(manifest.epoch)
                if not is_unknown:
                    request.done(None, "the remote tier is away")
                    return
                yield _RETRY_MS  # it may be there: nothing may say that it is not
                continue
            there = manifest if verdict is Seal.SEALED else self._bucket.manifest(manifest.epoch)
            self._schedule.completed(manifest.epoch)
            self._schedule.sealed(manifest.epoch, self._now_s())
            request.done(there, "")
            return
