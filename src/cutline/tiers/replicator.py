"""Brings complete checkpoints to the remote tier, on a thread of its own, at its own pace.

Hybrid: a checkpoint is complete when the local disk has it, and the newest one follows to the remote tier. Durable
there first: nobody takes a checkpoint for complete, and no sink publishes it, before the remote tier has it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from cutline.base.clock import now_ms
from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.errors import CutlineError, DamagedRecordError, FencedError, NotDone, OutcomeUnknown, StoreError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, Generation
from cutline.ports import GenerationRecord, Manifest, SnapshotStore
from cutline.ports.objects import ObjectInfo
from cutline.protocol.history.remote_schedule import Cadence
from cutline.tiers.upload import Copied, Published, Replica

log = get_logger(__name__)

_RETRY_SECONDS, _RETRY_LIMIT_SECONDS = 1.0, 30.0
#: Listing a bucket costs money: what nobody needs any more may wait so long.
_COLLECT_SECONDS = 30.0
_STOP_SECONDS, _LOOK_SECONDS = 30.0, 0.5
#: A copy may be under way, or the remote tier be away.
_TIDY_SECONDS = 300.0

#: Hears what stands in the remote tier now, or why nothing will.
Done = Callable[[Manifest | None, str], None]


@dataclass(frozen=True, slots=True)
class _First:
    """A checkpoint that must be in the remote tier before it counts."""

    manifest: Manifest
    done: Done


@dataclass(frozen=True, slots=True)
class _Tidy:
    """Somebody wants the remote tier tidied up: between two copies, never beside one."""

    grace_ms: int
    is_dry_run: bool
    answer: Future[list[ObjectInfo]]


class _Ahead:
    """Some operators' content is due, and the checkpoint as a whole is not."""


class Replicator:
    """One copy at a time, newest first; in between, the remote tier is tidied up."""

    def __init__(
        self,
        *,
        flow: FlowName,
        replica: Replica,
        snapshots: SnapshotStore,
        generation: Callable[[], Generation],
        entered: GenerationRecord | None,
        hold: Callable[[Epoch], bool],
        let_go: Callable[[Epoch], None],
        check_fence: Callable[[], None],
        pins: Callable[[], Iterable[Epoch]],
        published: Callable[[], Published],
        cadence: Cadence,
        retain: int,
        grace_ms: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``hold``: keep an epoch from collection; False if it is gone. ``entered``: said there at the start.

        ``published``: how far sinks are.
        """
        self._flow = flow
        self._replica = replica
        self._snapshots = snapshots
        self._generation = generation
        self._entered = entered
        self._hold = hold
        self._let_go = let_go
        self._check_fence = check_fence
        self._pins = pins
        self._published = published
        self._cadence = cadence
        self._retain = retain
        self._grace_ms = grace_ms
        self._on_fatal = on_fatal
        self._requests: queue.SimpleQueue[_First | _Tidy | Epoch | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._newest = NO_EPOCH
        self._copied = NO_EPOCH
        #: Copied, or given up: nothing up to here is tried again.
        self._done_up_to = NO_EPOCH
        self._pause_s = 0.0
        self._last_s = float("-inf")
        self._collected_s = time.monotonic()
        self._problem = ""
        self._totals = {"epochs": 0, "files": 0, "size_bytes": 0, "sent_bytes": 0, "ahead_bytes": 0, "failures": 0}
        self._last_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="cutline-replicator", daemon=True)

    # ------------------------------------------------------------------ what others call

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """What is being copied is given up: it is copied again by the next start."""
        self._stopping.set()
        self._requests.put(None)
        deadline = time.monotonic() + _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._replica.give_up()  # again and again: it may be just about to begin a job that nobody has cancelled
            self._thread.join(timeout=_LOOK_SECONDS)

    def completed(self, epoch: Epoch) -> None:
        """A checkpoint is complete: it, or a later one, follows."""
        self._requests.put(epoch)

    def first(self, manifest: Manifest, done: Done) -> None:
        """Bring a checkpoint there that is not complete yet; ``done`` hears of it, on the thread of the replicator."""
        self._requests.put(_First(manifest, done))

    def wait_copied(self, epoch: Epoch, seconds: float) -> bool:
        """Whether the epoch, or a later one, is in the remote tier; waits so long for it."""
        deadline = time.monotonic() + seconds
        while self._copied < epoch:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            time.sleep(0.02)
        return True

    @property
    def url(self) -> str:
        return self._replica.url

    def tidy(self, *, grace_ms: int, is_dry_run: bool) -> list[ObjectInfo]:
        """Let go of what the remote tier need not keep, at once; returns it. Raises StoreError."""
        request = _Tidy(grace_ms, is_dry_run, Future())
        self._requests.put(request)
        try:
            return request.answer.result(_TIDY_SECONDS)
        except FutureTimeoutError as error:
            request.answer.cancel()
            raise NotDone("the remote tier was not collected in time", store=self.url) from error

    def view(self) -> dict[str, Any]:
        """For people."""
        return {
            "url": self._replica.url,
            "epoch": self._copied,
            "behind": max(self._newest - self._copied, 0),
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
        except Exception as error:  # the outermost loop: without it nobody would know that copies have ended
            log.error("replication_failed", flow=self._flow, exc_info=True)
            self._on_fatal(error)

    def _turn(self) -> None:
        request = self._next()
        if request is None:
            return
        if isinstance(request, _First):
            self._bring_first(request)
        elif isinstance(request, _Tidy):
            self._tidy(request)
        elif isinstance(request, _Ahead):
            self._send_ahead()
        elif request > self._done_up_to:
            self._attempt(request)
        self._collect()

    def _attempt(self, newest: Epoch) -> None:
        """Once; what fails is tried again later, with whatever is the newest then."""
        try:
            self._enter()
            self._bring(newest)
        except StoreError as error:
            if self._stopping.is_set():
                return  # it was given up
            self._failed(error)
            self._pause_s = min(max(self._pause_s * 2, _RETRY_SECONDS), _RETRY_LIMIT_SECONDS)
            self._last_s = time.monotonic()

    def _next(self) -> _First | _Tidy | _Ahead | Epoch | None:
        """What to do now: whoever waits comes first, then the newest epoch when its time has come, or part of it."""
        seal_s = self._last_s + (self._pause_s or self._cadence.seal_s)
        due_s = min(seal_s, self._cadence.ahead_s(self._newest))
        wait = None if self._newest <= self._done_up_to else max(due_s - time.monotonic(), 0)
        try:
            request = self._requests.get(timeout=wait)
        except queue.Empty:
            return self._newest if seal_s <= time.monotonic() else _Ahead()
        if request is None or isinstance(request, _First | _Tidy):
            return request
        self._newest = max(self._newest, request)
        return None

    def _enter(self) -> None:
        """Said before anything else is written there: an older process that still copies stops at it."""
        if self._entered is not None:
            self._replica.enter(self._entered)
            self._entered = None

    def _bring(self, newest: Epoch) -> None:
        """The newest one; before it those that sinks have yet to publish, because it does not hold what they staged."""
        self._last_s = time.monotonic()
        published = self._published().everywhere
        kept = [epoch for epoch in self._snapshots.epochs() if self._done_up_to < epoch <= newest]
        for epoch in [one for one in kept if one > published or one == kept[-1]]:
            if self._stopping.is_set() or not self._hold(epoch):
                continue  # a later one has taken its place, and its completion is in the queue
            try:
                self._copy(epoch)
            finally:
                self._let_go(epoch)
        if not kept:
            self._done_up_to = max(self._done_up_to, newest)

    def _send_ahead(self) -> None:
        """Of the newest epoch, what those have that are due. What fails is tried again, then perhaps of a newer one."""
        operators = self._cadence.due(self._newest, time.monotonic())
        if not operators:
            return  # woken a moment too early
        kept = [epoch for epoch in self._snapshots.epochs() if self._done_up_to < epoch <= self._newest]
        epoch = max(kept, default=NO_EPOCH)
        if not self._hold(epoch):
            # A later one has taken its place, and its completion is in the queue.
            self._cadence.sent(operators, self._newest, time.monotonic())
            return
        try:
            self._enter()
            manifest = self._snapshots.load_manifest(epoch)
            copied = self._replica.send_ahead(manifest, operators, self._generation())
        except StoreError as error:
            self._cadence.failed(time.monotonic())
            if not self._stopping.is_set():
                self._failed(error)
        except DamagedRecordError as error:
            # Whoever seals it will find out too, and skip it for good.
            self._cadence.sent(operators, self._newest, time.monotonic())
            self._failed(error)
        else:
            self._cadence.sent(operators, self._newest, time.monotonic())
            self._problem = ""
            self._count(copied)
            self._totals["ahead_bytes"] += copied.sent_bytes
        finally:
            self._let_go(epoch)

    def _copy(self, epoch: Epoch) -> None:
        try:
            manifest = self._snapshots.load_manifest(epoch)
            copied = self._replica.send(manifest, self._generation())
            crashpoint("remote-sent")
            there = self._replica.seal(manifest, self._generation(), self._published())
        except DamagedRecordError as error:
            # It cannot be copied, and could not be restored; the next one may be better.
            self._skip(epoch, str(error))
        else:
            if there == manifest:
                self._done(copied)
            else:
                self._skip(epoch, "the remote tier has another checkpoint of this number")

    def _skip(self, epoch: Epoch, why: str) -> None:
        self._problem = f"epoch {epoch} was not copied: {why}"
        self._totals["failures"] += 1
        self._done_up_to = max(self._done_up_to, epoch)
        log.error("checkpoint_not_copied", flow=self._flow, epoch=epoch, reason=why)

    def _bring_first(self, request: _First) -> None:
        manifest = request.manifest
        try:
            self._enter()
            copied = self._replica.send(manifest, self._generation())
        except FencedError:
            raise
        except CutlineError as error:
            self._failed(error)
            request.done(None, f"the remote tier does not have it: {error}")
            return
        crashpoint("remote-sent")
        is_unknown = False
        while not self._stopping.is_set():
            try:
                there = self._replica.seal(manifest, self._generation(), self._published())
            except StoreError as error:
                self._failed(error)
                is_unknown = is_unknown or isinstance(error, OutcomeUnknown)
                if not is_unknown:
                    request.done(None, f"the remote tier does not have it: {error}")
                    return
                self._stopping.wait(_RETRY_SECONDS)  # it may be there: nobody may say that it is not
                continue
            crashpoint("remote-sealed")
            self._done(copied)
            self._newest = max(self._newest, manifest.epoch)
            request.done(there, "")
            return

    def _done(self, copied: Copied) -> None:
        self._copied = max(self._copied, copied.epoch)
        self._done_up_to = max(self._done_up_to, copied.epoch)
        self._pause_s = 0.0
        self._last_ms = (time.monotonic() - self._last_s) * 1000
        self._problem = ""
        self._cadence.sealed(copied.epoch, time.monotonic())
        self._totals["epochs"] += 1
        self._count(copied)
        log.info("checkpoint_copied", flow=self._flow, epoch=copied.epoch, files=copied.files, bytes=copied.sent_bytes)

    def _count(self, copied: Copied) -> None:
        for name in ("files", "size_bytes", "sent_bytes"):
            self._totals[name] += getattr(copied, name)

    def _failed(self, error: CutlineError) -> None:
        self._problem = str(error)
        self._totals["failures"] += 1
        log.warning("remote_tier_failed", flow=self._flow, reason=str(error))

    def _collect(self) -> None:
        if time.monotonic() - self._collected_s < _COLLECT_SECONDS or self._copied == NO_EPOCH:
            return
        self._collected_s = time.monotonic()
        try:
            self.collect()
        except FencedError:
            raise
        except CutlineError as error:  # nothing is lost by keeping too much, be it because a record there is damaged
            self._failed(error)

    def _tidy(self, request: _Tidy) -> None:
        if not request.answer.set_running_or_notify_cancel():
            return
        try:
            request.answer.set_result(self._let_go_of(request.grace_ms, is_dry_run=request.is_dry_run))
        except FencedError as error:
            request.answer.set_exception(error)
            raise
        except CutlineError as error:
            request.answer.set_exception(error)

    def collect(self) -> int:
        """Let go of what the remote tier need not keep; returns how many objects went."""
        return len(self._let_go_of(self._grace_ms, is_dry_run=False))

    def _let_go_of(self, grace_ms: int, *, is_dry_run: bool) -> list[ObjectInfo]:
        there = self._replica.epochs()
        # Before the first copy of this life nothing is known of what a later one will take the place of.
        of_ours = [epoch for epoch in there if epoch <= self._copied][-self._retain :] if self._copied else there
        published = self._published().everywhere
        # What a sink has yet to publish stands in the records of these, and of no others.
        keep = {*of_ours, *self._pins(), *(epoch for epoch in there if published <= epoch)}

        def check() -> None:
            self._check_fence()
            self._replica.check_claim(self._generation())

        return self._replica.collect(keep, now_ms=now_ms(), grace_ms=grace_ms, check_fence=check, is_dry_run=is_dry_run)
