"""Lets go, in the background, of what retained epochs no longer need: checkpoints, their content, channel entries."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.model.ids import START, BatchId, Epoch, OperatorId
from cutline.ports import Manifest, SnapshotStore
from cutline.protocol.history.retention import EpochNeeds, truncation_points
from cutline.protocol.messages.coordinator import ReleaseEpochs

log = get_logger(__name__)

Result = TypeVar("Result")
#: Gets the snapshots, the logs, what operators need that are behind theirs, and the check for a successor.
Sweep = Callable[
    [SnapshotStore, Mapping[OperatorId, ChannelLog], Iterable[EpochNeeds], Callable[[], None]],
    Result,
]


def needs_of(manifest: Manifest) -> EpochNeeds:
    """What a restore to this epoch would read."""
    return EpochNeeds.of(
        {name: cut.barrier for name, cut in manifest.operators.items()},
        [cut.positions for cut in manifest.operators.values()],
    )


def needs_behind_log(channel: ChannelLog, committed: BatchId) -> EpochNeeds | None:
    """What an operator needs that has finished ``committed`` and has more batches in its log; None if it has not."""
    following = channel.find_batch(BatchId(committed + 1))
    if committed >= channel.last_batch or following is None:
        return None
    read = channel.positions_after(committed)
    inputs = {name: read.get(name, START) for name in following.positions}
    # The entry of the batch that it has finished stays too: it says from where on the next one reads.
    finished = channel.find_batch(committed) or following
    # No snapshot of its own: it says what must stay, not that somebody could begin from there.
    return EpochNeeds(operators=(), channels={channel.operator: finished.seq, **inputs})


class Janitor:
    """One thread; requests are taken in the order in which they come."""

    def __init__(
        self,
        *,
        snapshots: SnapshotStore,
        channels: Mapping[OperatorId, ChannelLog],
        touched_by: Mapping[OperatorId, Collection[OperatorId]],
        check_fence: Callable[[], None] = lambda: None,
        live_needs: Callable[[], Iterable[EpochNeeds]] = tuple,
        forget_left: Callable[[], object] = tuple,
    ) -> None:
        """``touched_by``: who writes and reads each channel.

        ``live_needs``: what operators need that are behind their own logs, perhaps by more than their newest snapshot.
        ``check_fence`` raises when another process runs the flow: it is asked before anything is deleted.
        ``forget_left`` deletes the logs of operators that neither the flow nor a checkpoint has any more.
        """
        self._touched_by = touched_by
        self._live_needs = live_needs
        self._check_fence = check_fence
        #: Held while something is deleted; who reads logs anew, as a region that goes back, holds it too.
        self.at_rest = threading.Lock()
        self._forget_left = forget_left
        self._snapshots = snapshots
        self._channels = channels
        self._requests: queue.SimpleQueue[ReleaseEpochs | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutline-janitor", daemon=True)
        #: Epochs that may go and are not gone yet: what fails is tried again with the next request.
        self._doomed: set[Epoch] = set()
        #: Epochs that somebody reads at this moment, whatever may be said of them.
        self._held: Counter[Epoch] = Counter()

    def start(self, abandoned: Iterable[Epoch] = ()) -> None:
        """``abandoned``: complete epochs of a history that was given up."""
        self._doomed.update(abandoned)
        self._thread.start()

    def stop(self) -> None:
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def release(self, request: ReleaseEpochs) -> None:
        self._requests.put(request)

    def hold(self, epoch: Epoch) -> bool:
        """Keep a checkpoint, and all it needs, until ``let_go``; False if it is gone already."""
        with self.at_rest:
            if epoch not in self._snapshots.epochs():
                return False
            self._held[epoch] += 1
            return True

    def let_go(self, epoch: Epoch) -> None:
        with self.at_rest:
            self._held -= Counter([epoch])

    def while_at_rest(self, sweep: Sweep[Result]) -> Result:
        """Let somebody else collect, while nothing is collected here and no region goes back."""
        with self.at_rest:
            return sweep(self._snapshots, self._channels, self._live_needs(), self._check_fence)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self.collect(request)
            except Exception:  # nothing is lost by keeping too much; the next round tries again
                log.warning("collection_failed", drop=request.drop, exc_info=True)

    def collect(self, request: ReleaseEpochs) -> None:
        """Drop exactly the epochs named, and what no retained one needs.

        The epochs before the entries that only they need: killed half-way, no epoch is left that cannot be restored.
        """
        with self.at_rest:
            self._doomed.update(request.drop)
            held = set(self._held)
            needs = [needs_of(self._snapshots.load_manifest(epoch)) for epoch in {*request.retained, *held}]
            gone = self._snapshots.collect(self._doomed - held, request.open_from, self._check_fence)
            self._doomed &= held
            # Asked for under the lock, and after an operator that went back is in its new directory.
            for name, below in truncation_points([*needs, *self._live_needs()], self._touched_by).items():
                self._check_fence()
                self._channels[name].truncate(below)
            self._check_fence()
            self._forget_left()
        if gone:
            log.debug("checkpoints_collected", epochs=gone)
