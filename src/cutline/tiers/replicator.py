"""Uploads complete checkpoints to the remote tier on its own thread, at its own pace.

Hybrid: a checkpoint is complete when the local disk has it, and the newest one is uploaded afterwards. Durable in the
remote tier first: a checkpoint is not complete, and no sink publishes it, before the remote tier has it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Protocol

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.outages import Outages, outage_of
from cutline.errors import (
    CutlineError,
    DamagedRecordError,
    FencedError,
    MissingObject,
    NotDone,
    OutcomeUnknown,
    StoreError,
)
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, Generation
from cutline.model.remote import SinkProgress
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.objects import ObjectInfo
from cutline.protocol.history.remote_claims import Seal, judge_seal
from cutline.protocol.history.remote_retention import kept_while_running
from cutline.protocol.history.remote_schedule import Cadence, EarlyUpload, Upload, UploadSchedule, epochs_to_upload
from cutline.tiers.remote_tier import RemoteTier
from cutline.tiers.upload import Uploaded

log = get_logger(__name__)

#: Between two attempts to find out whether a manifest is stored.
_SEAL_RETRY_SECONDS = 1.0
#: Listing a bucket costs money: unneeded objects may wait this long.
_COLLECT_SECONDS = 30.0
#: A request to a store that does not answer cannot be cancelled; the next start fences what it may still write.
_STOP_SECONDS, _LOOK_SECONDS = 10.0, 0.5
#: An upload may be in progress, or the remote tier unavailable.
_ANSWER_SECONDS = 300.0
#: Its name among the parts of a flow that wait for a resource.
_PART = "remote tier"

#: Called with the manifest that is now in the remote tier, or with None and the reason.
Done = Callable[[Manifest | None, str], None]


@dataclass(frozen=True, slots=True)
class _First:
    """A checkpoint that must be in the remote tier before it counts as complete."""

    manifest: Manifest
    done: Done


@dataclass(frozen=True, slots=True)
class _Collect:
    """A request to collect the remote tier now: between two uploads, never during one."""

    grace_ms: int
    is_dry_run: bool
    answer: Future[list[ObjectInfo]]


class FlowFacts(Protocol):
    """What the replicator needs to know about the running flow."""

    def generation(self) -> Generation: ...

    def published(self) -> SinkProgress:
        """The sinks' progress."""
        ...

    def pins(self) -> Iterable[Epoch]:
        """Checkpoints to keep however old they are: pinned ones, and those that this host keeps beyond a number."""
        ...

    def on_ladder(self, load_all: Callable[[], Iterable[Manifest]]) -> set[Epoch]:
        """Of the remote tier's checkpoints, those to keep for their age; ``load_all`` loads them."""
        ...

    def check_fence(self) -> None:
        """Raise FencedError if another process has taken over this host's storage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoints:
    """The checkpoints of this host."""

    store: CheckpointStore
    #: Protect an epoch from collection; False if it is gone.
    hold: Callable[[Epoch], bool]
    end_hold: Callable[[Epoch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePolicy:
    """When the remote tier is written, and what it keeps."""

    cadence: Cadence
    retain: int
    grace_ms: int


class Replicator:
    """One upload at a time, newest first; in between, the remote tier is collected."""

    def __init__(
        self,
        *,
        flow: FlowName,
        tier: RemoteTier,
        local: LocalCheckpoints,
        facts: FlowFacts,
        entered: GenerationRecord | None,
        policy: RemotePolicy,
        on_fatal: Callable[[BaseException], None],
        outages: Outages | None = None,
    ) -> None:
        """``entered``: the generation to announce in the remote tier before the first upload."""
        self._flow = flow
        self._tier = tier
        self._local = local
        self._facts = facts
        self._entered = entered
        self._policy = policy
        self._on_fatal = on_fatal
        self._outages = outages or Outages(flow)
        self._requests: queue.SimpleQueue[_First | _Collect | Epoch | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.schedule = UploadSchedule(policy.cadence)
        self._collected_s = time.monotonic()
        #: What the remote tier keeps for its age; None: it was not listed yet.
        self.on_ladder: frozenset[Epoch] | None = None
        #: The manifests in the remote tier, as far as they were read.
        self._there: dict[Epoch, Manifest] = {}
        self._problem = ""
        self._totals = {"epochs": 0, "files": 0, "size_bytes": 0, "sent_bytes": 0, "ahead_bytes": 0, "failures": 0}
        self._begun_s = time.monotonic()
        self._last_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="cutline-replicator", daemon=True)

    # ------------------------------------------------------------------ called by other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancels an upload in progress: the next start uploads it again."""
        self._stopping.set()
        self._requests.put(None)
        deadline = time.monotonic() + _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._tier.give_up()  # repeated: a transfer may just be starting a job that was not cancelled
            self._thread.join(timeout=_LOOK_SECONDS)

    def completed(self, epoch: Epoch) -> None:
        """A checkpoint is complete: upload it, or a later one."""
        self._requests.put(epoch)

    def first(self, manifest: Manifest, done: Done) -> None:
        """Upload a checkpoint that is not complete yet; ``done`` is called on the replicator's thread."""
        self._requests.put(_First(manifest, done))

    def wait_copied(self, epoch: Epoch, seconds: float) -> bool:
        """Whether the epoch, or a later one, is in the remote tier; waits up to ``seconds`` for it."""
        deadline = time.monotonic() + seconds
        while self.schedule.uploaded < epoch:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            time.sleep(0.02)
        return True

    @property
    def url(self) -> str:
        return self._tier.url

    def collect_now(self, *, grace_ms: int, is_dry_run: bool) -> list[ObjectInfo]:
        """Collect the remote tier now, not when it is due; returns the removed objects. Raises StoreError."""
        request = _Collect(grace_ms, is_dry_run, Future())
        self._requests.put(request)
        try:
            return request.answer.result(_ANSWER_SECONDS)
        except FutureTimeoutError as error:
            request.answer.cancel()
            raise NotDone("the remote tier was not collected in time", store=self.url) from error

    def view(self) -> dict[str, Any]:
        """State of the replication, for ``status``."""
        return {
            "url": self._tier.url,
            "epoch": self.schedule.uploaded,
            "behind": max(self.schedule.newest - self.schedule.uploaded, 0),
            "last_ms": round(self._last_ms, 1),
            "problem": self._problem,
            **self._totals,
        }

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except FencedError as error:
            self._on_fatal(error)
        except Exception as error:  # the outermost loop: otherwise the end of uploads would go unnoticed
            if self._stopping.is_set():  # a store did not answer until the flow was gone, with all that it had open
                log.info("replication_ended_late", flow=self._flow, error=str(error))
                return
            log.error("replication_failed", flow=self._flow, exc_info=True)
            self._on_fatal(error)

    def _turn(self) -> None:
        """Handle requests first, then what is due on the schedule."""
        try:
            request = self._requests.get(timeout=self.schedule.wait_s(time.monotonic()))
        except queue.Empty:
            self._work(self.schedule.due(time.monotonic()))
        else:
            if isinstance(request, _First):
                self._upload_first(request)
            elif isinstance(request, _Collect):
                self._answer(request)
            else:
                self.schedule.completed(request or NO_EPOCH)
                return
        self._collect_if_due()

    def _work(self, due: Upload | EarlyUpload | None) -> None:
        match due:
            case Upload():
                self._upload(due.newest)
            case EarlyUpload():
                self._upload_early(due)
            case None:  # woken a moment too early
                pass

    def _enter(self) -> None:
        """Announce the generation before any other write: an older process that still uploads then stops."""
        if self._entered is not None:
            self._tier.fence.enter(self._entered)
            self._entered = None

    # ------------------------------------------------------------------ uploading

    def _upload(self, newest: Epoch) -> None:
        """One attempt; after a failure, the next attempt uploads the checkpoint that is newest then."""
        try:
            self._enter()
            self._upload_up_to(newest)
        except StoreError as error:
            if not self._stopping.is_set():  # otherwise ``stop`` cancelled it
                self._failed(error)
                self.schedule.failed(time.monotonic())
                self._outages.postponed(_PART, now_ms() + round((self.schedule.wait_s(time.monotonic()) or 0) * 1000))

    def _upload_up_to(self, newest: Epoch) -> None:
        self._begun_s = time.monotonic()
        self.schedule.began(self._begun_s)
        done_up_to, published = self.schedule.done_up_to, self._facts.published().everywhere
        kept = self._local.store.epochs()
        epochs = epochs_to_upload(kept, done_up_to=done_up_to, newest=newest, published=published)
        for epoch in epochs:
            if self._stopping.is_set() or not self._local.hold(epoch):
                continue  # a later one has replaced it, and its completion is in the queue
            try:
                self._upload_one(epoch)
            finally:
                self._local.end_hold(epoch)
        if not epochs:
            self.schedule.skipped(newest)

    def _upload_one(self, epoch: Epoch) -> None:
        try:
            manifest = self._local.store.load_manifest(epoch)
            uploaded = self._tier.uploader.send(manifest, self._facts.generation())
            crashpoint("remote-sent")
            there = self._tier.uploader.seal(manifest, self._facts.generation(), self._facts.published())
        except DamagedRecordError as error:
            # It can be neither uploaded nor restored; the next one may be whole.
            self._skip(epoch, str(error))
            return
        if judge_seal(manifest, there, self._facts.generation()) is Seal.SEALED:
            self._sealed(uploaded)
        else:
            self._skip(epoch, "the remote tier has another checkpoint of this number")

    def _upload_early(self, due: EarlyUpload) -> None:
        """After a failure, the upload is retried, possibly with a newer checkpoint."""
        done_up_to = self.schedule.done_up_to
        epoch = max((one for one in self._local.store.epochs() if done_up_to < one <= due.newest), default=NO_EPOCH)
        cadence = self.schedule.cadence
        if not self._local.hold(epoch):
            # A later one has replaced it, and its completion is in the queue.
            cadence.sent(due.operators, due.newest, time.monotonic())
            return
        try:
            self._enter()
            manifest = self._local.store.load_manifest(epoch)
            uploaded = self._tier.uploader.send_early(manifest, due.operators, self._facts.generation())
        except StoreError as error:
            cadence.failed(time.monotonic())
            if not self._stopping.is_set():
                self._failed(error)
        except DamagedRecordError as error:
            # The upload of the whole checkpoint will fail in the same way, and skip it permanently.
            cadence.sent(due.operators, due.newest, time.monotonic())
            self._failed(error)
        else:
            cadence.sent(due.operators, due.newest, time.monotonic())
            self._problem = ""
            self._outages.over(_PART)
            self._count(uploaded)
            self._totals["ahead_bytes"] += uploaded.sent_bytes
        finally:
            self._local.end_hold(epoch)

    def _upload_first(self, request: _First) -> None:
        self._begun_s = time.monotonic()
        try:
            self._enter()
            uploaded = self._tier.uploader.send(request.manifest, self._facts.generation())
        except FencedError:
            raise
        except CutlineError as error:
            self._failed(error)
            request.done(None, f"the remote tier does not have it: {error}")
            return
        crashpoint("remote-sent")
        try:
            there = self._seal_first(request.manifest)
        except StoreError as error:
            request.done(None, f"the remote tier does not have it: {error}")
            return
        if there is not None:
            crashpoint("remote-sealed")
            self._sealed(uploaded)
            self.schedule.completed(request.manifest.epoch)
            request.done(there, "")

    def _seal_first(self, manifest: Manifest) -> Manifest | None:
        """The stored manifest; None if the flow stops before the outcome is known. Raises StoreError: it is not stored.

        Once it may be stored, the flow must not be told that it is not: sealing is retried until the outcome is known.
        """
        is_unknown = False
        while not self._stopping.is_set():
            try:
                return self._tier.uploader.seal(manifest, self._facts.generation(), self._facts.published())
            except StoreError as error:
                self._failed(error)
                is_unknown = is_unknown or isinstance(error, OutcomeUnknown)
                if not is_unknown:
                    raise
                self._stopping.wait(_SEAL_RETRY_SECONDS)
        return None

    # ------------------------------------------------------------------ outcomes

    def _sealed(self, uploaded: Uploaded) -> None:
        self.schedule.sealed(uploaded.epoch, time.monotonic())
        self._last_ms = (time.monotonic() - self._begun_s) * 1000
        self._problem = ""
        self._outages.over(_PART)
        self._totals["epochs"] += 1
        self._count(uploaded)
        log.info(
            "checkpoint_copied",
            flow=self._flow,
            epoch=uploaded.epoch,
            files=uploaded.files,
            bytes=uploaded.sent_bytes,
        )

    def _skip(self, epoch: Epoch, why: str) -> None:
        self._problem = f"epoch {epoch} was not copied: {why}"
        self._totals["failures"] += 1
        self.schedule.skipped(epoch)
        log.error("checkpoint_not_copied", flow=self._flow, epoch=epoch, reason=why)

    def _failed(self, error: CutlineError) -> None:
        self._problem = str(error)
        self._totals["failures"] += 1
        if (outage := outage_of(error)) is not None:
            self._outages.failed(_PART, outage, is_timed=False)
        log.warning("remote_tier_failed", flow=self._flow, reason=str(error))

    def _count(self, uploaded: Uploaded) -> None:
        for name in ("files", "size_bytes", "sent_bytes"):
            self._totals[name] += getattr(uploaded, name)

    # ------------------------------------------------------------------ collecting

    def _collect_if_due(self) -> None:
        if time.monotonic() - self._collected_s < _COLLECT_SECONDS or self.schedule.uploaded == NO_EPOCH:
            return
        self._collected_s = time.monotonic()
        try:
            self.collect()
        except FencedError:
            raise
        except CutlineError as error:  # keeping too much loses nothing, even if a record there is damaged
            self._failed(error)

    def _answer(self, request: _Collect) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        try:
            request.answer.set_result(self._collect(request.grace_ms, is_dry_run=request.is_dry_run))
        except FencedError as error:
            request.answer.set_exception(error)
            raise
        except CutlineError as error:
            request.answer.set_exception(error)

    def collect(self) -> int:
        """Remove the objects that the remote tier need not keep; returns how many."""
        return len(self._collect(self._policy.grace_ms, is_dry_run=False))

    def _collect(self, grace_ms: int, *, is_dry_run: bool) -> list[ObjectInfo]:
        there = self._tier.checkpoints.epochs()
        progress = self._facts.published()
        self.on_ladder = frozenset(self._facts.on_ladder(lambda: self._manifests(there)))
        keep = kept_while_running(
            there,
            uploaded=self.schedule.uploaded,
            published=progress.everywhere,
            pins={*self._facts.pins(), *self.on_ladder},
            retain=self._policy.retain,
        )

        def check() -> None:
            self._facts.check_fence()
            self._tier.fence.check_claim(self._facts.generation())

        return self._tier.collector.collect(
            keep, progress=progress, now_ms=now_ms(), grace_ms=grace_ms, check_fence=check, is_dry_run=is_dry_run
        )

    def _manifests(self, there: Iterable[Epoch]) -> Iterable[Manifest]:
        """Each is read once: there may be hundreds, and none ever changes."""
        known = self._there
        self._there = {}
        for epoch in there:
            with contextlib.suppress(MissingObject):  # collected by another process
                self._there[epoch] = known.get(epoch) or self._tier.checkpoints.load_manifest(epoch)
        return self._there.values()
