"""Collects released checkpoints and their content, in the background.

Operators delete the entries of the channels that they write: after a collection, the coordinator learns which entries
the remaining checkpoints need.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from cutline.base.logs import get_logger
from cutline.coordinator.ports import OnCollected
from cutline.errors import CutlineError, DamagedRecordError
from cutline.model.ids import Epoch
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.protocol.checkpoint.releases import joint_release
from cutline.protocol.history.retention import EpochNeeds, needs_of
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.storage.detached import DetachedLogs

log = get_logger(__name__)

#: How long a stop waits for releases before it drops them.
_STOP_SECONDS = 1.0

Result = TypeVar("Result")
#: Receives the checkpoints and the check that no other process runs the flow.
Collect = Callable[[CheckpointStore, Callable[[], None]], Result]


class _StoppedError(Exception):
    """The flow stops: the rest of this pass is left to the next start."""


class Janitor:
    """Collects on one thread. Requests that wait are performed in one pass: each pass reads every retained manifest."""

    def __init__(
        self,
        *,
        checkpoints: CheckpointStore,
        detached: DetachedLogs,
        check_fence: Callable[[], None] = lambda: None,
        collect_left_logs: Callable[[], object] = tuple,
        requested: Callable[[], Collection[Epoch]] = tuple,
    ) -> None:
        """``check_fence`` raises when another process runs the flow; it is called before anything is deleted.
        ``collect_left_logs`` deletes the logs of operators that neither the flow nor a checkpoint has any more.
        ``requested``: epochs that the next start is to restore: they stay even if they are released.
        """
        self._requested = requested
        self._check_fence = check_fence
        self._is_stopping = threading.Event()
        #: A whole pass has been performed since the start.
        self._has_passed = False
        #: Held while something is deleted, and while a region is restored.
        self.at_rest = threading.Lock()
        self._collect_left_logs = collect_left_logs
        self._checkpoints = checkpoints
        self._detached = detached
        #: What the manifests read so far need of the logs; there may be hundreds, and none ever changes.
        self._needs: dict[Epoch, EpochNeeds] = {}
        #: Epochs of which the logs have not all that they had in flight: no entry that is kept makes them whole again.
        self._beyond_logs: set[Epoch] = set()
        #: Known to be detached: there may be hundreds, and only this janitor removes what they had in flight.
        self._needless: set[Epoch] = set()
        self._requests: queue.SimpleQueue[tuple[ReleaseEpochs, OnCollected] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutline-janitor", daemon=True)
        #: Released epochs that are not collected yet; the next request retries a failed collection.
        self._doomed: set[Epoch] = set()
        #: Of a history that was given up: no start restores them.
        self._abandoned: set[Epoch] = set()
        #: Epochs that are being read: they stay even if they are released.
        self._held: Counter[Epoch] = Counter()

    def start(self, abandoned: Iterable[Epoch] = ()) -> None:
        """``abandoned``: complete epochs of a history that was given up."""
        self._abandoned.update(abandoned)
        self._doomed.update(abandoned)
        self._thread.start()

    def stop(self) -> None:
        """Perform the requests that wait, if that is quick; drop the rest: the next start releases the same again.

        The first pass of a run is performed however long it takes: short runs would otherwise never collect anything.
        """
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_SECONDS)
            self._is_stopping.set()
            self._thread.join(timeout=30)

    def release(self, request: ReleaseEpochs, on_collected: OnCollected = lambda _: None) -> None:
        """``on_collected`` receives the log entries that the remaining checkpoints need."""
        self._requests.put((request, on_collected))

    def hold(self, epoch: Epoch) -> bool:
        """Keep a checkpoint, and all it needs, until ``end_hold``; False if it, or the logs it needs, may be gone."""
        with self.at_rest:
            if epoch not in self._checkpoints.epochs() or self._is_detached(epoch):
                return False
            self._held[epoch] += 1
            return True

    def end_hold(self, epoch: Epoch) -> None:
        with self.at_rest:
            self._held -= Counter([epoch])

    def while_at_rest(self, collect: Collect[Result]) -> Result:
        """Run a collection that a user has requested, while no other collection and no restore of a region runs."""
        with self.at_rest:
            return collect(self._checkpoints, self._check_fence)

    def _run(self) -> None:
        is_last = False
        while not is_last and (request := self._requests.get()) is not None:
            requests = [request]
            while not is_last and not self._requests.empty():  # no other thread takes from the queue
                waiting = self._requests.get()
                is_last = waiting is None
                requests += [] if waiting is None else [waiting]
            released = joint_release([one for one, _ in requests])
            try:
                self._check_stop()
                needs = self.collect(released)
                self._has_passed = True
                for on_collected in dict.fromkeys(answer for _, answer in requests):
                    on_collected(needs)
            except _StoppedError:
                log.debug("releases_dropped", drop=released.drop)
                return
            except Exception:  # keeping too much loses nothing; the next request retries
                log.warning("collection_failed", drop=released.drop, exc_info=True)

    def _check_stop(self) -> None:
        if self._has_passed and self._is_stopping.is_set():
            raise _StoppedError

    def _check(self) -> None:
        """Called before anything is deleted."""
        self._check_stop()
        self._check_fence()

    def collect(self, request: ReleaseEpochs) -> list[EpochNeeds]:
        """Collect the named epochs and what no retained one needs; return the log entries that the retained ones need.

        Epochs go before the entries that only they need: after a kill half-way, every epoch left can be restored.
        """
        with self.at_rest:
            self._doomed.update(request.drop)
            held = {*self._held, *self._to_be_restored()}
            self._detach(set(request.detach) - held)
            needs = self._needs_of({*request.retained, *held})
            gone = self._checkpoints.collect(self._doomed - held, request.open_from, self._check)
            self._doomed &= held
            self._check()
            for epoch in set(self._detached.epochs()).difference(self._checkpoints.epochs()):
                self._needless.discard(epoch)
                self._detached.remove(epoch)
            try:
                self._collect_left_logs()
            except Exception:  # the next request retries; what the other logs may release does not depend on it
                log.warning("left_logs_not_collected", exc_info=True)
        if gone:
            log.debug("checkpoints_collected", epochs=gone)
        return needs

    def _to_be_restored(self) -> set[Epoch]:
        requested = set(self._requested()) - self._abandoned
        return requested.intersection(self._checkpoints.epochs()) if requested else requested

    def _detach(self, epochs: Collection[Epoch]) -> None:
        self._beyond_logs &= set(epochs)
        for epoch in sorted(set(epochs) - self._beyond_logs):
            if self._is_detached(epoch):
                continue
            self._check()
            try:
                self._detached.store(self._checkpoints.load_manifest(epoch))
            except (CutlineError, OSError) as error:  # it keeps its part of the logs; the next request retries
                log.warning("checkpoint_not_detached", epoch=epoch, reason=str(error))
                if isinstance(error, DamagedRecordError):
                    self._beyond_logs.add(epoch)

    def _needs_of(self, epochs: Collection[Epoch]) -> list[EpochNeeds]:
        """What the epochs need of the logs: nothing if they are detached, or cannot be restored from the logs."""
        attached = {epoch for epoch in epochs if epoch not in self._beyond_logs and not self._is_detached(epoch)}
        self._needs = {
            epoch: self._needs.get(epoch) or needs_of(self._checkpoints.load_manifest(epoch)) for epoch in attached
        }
        return list(self._needs.values())

    def _is_detached(self, epoch: Epoch) -> bool:
        if epoch not in self._needless and self._detached.has(epoch):
            self._needless.add(epoch)
        return epoch in self._needless
