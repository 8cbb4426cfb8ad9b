"""Lets go, in the background, of what retained epochs no longer need: checkpoints, their content, channel entries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from cutline.channels.log import ChannelLog
from cutline.ids import Epoch, OperatorId, Position
from cutline.logs import get_logger
from cutline.ports import Manifest, SnapshotStore

log = get_logger(__name__)


def needed_from(manifest: Manifest, channel: OperatorId) -> Position:
    """The lowest entry of a channel that a restore to this epoch would read: what is in flight, and the barrier."""
    cut = manifest.channels[channel]
    return min([cut.barrier, *(flight.first for flight in cut.in_flight.values())])


class Janitor:
    """One thread; a request that comes while it works replaces the one that waits."""

    def __init__(self, *, snapshots: SnapshotStore, channels: Mapping[OperatorId, ChannelLog]) -> None:
        self._snapshots = snapshots
        self._channels = channels
        self._requests: queue.SimpleQueue[Epoch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutline-janitor", daemon=True)
        self._abandoned: frozenset[Epoch] = frozenset()

    def start(self, abandoned: frozenset[Epoch] = frozenset()) -> None:
        """``abandoned``: complete epochs of a history that was given up."""
        self._abandoned = abandoned
        self._thread.start()

    def stop(self) -> None:
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def release_below(self, min_epoch: Epoch) -> None:
        self._requests.put(min_epoch)

    def _run(self) -> None:
        while (min_epoch := self._requests.get()) is not None:
            try:
                self.collect(min_epoch)
            except Exception:  # nothing is lost by keeping too much; the next round tries again
                log.warning("collection_failed", min_epoch=min_epoch, exc_info=True)

    def collect(self, min_epoch: Epoch) -> None:
        """Keep ``min_epoch`` and everything after it."""
        manifest = self._snapshots.load_manifest(min_epoch)
        for channel in self._channels.values():
            channel.truncate(needed_from(manifest, channel.operator))
        drop = [e for e in self._snapshots.epochs() if e < min_epoch or e in self._abandoned]
        gone = self._snapshots.collect(drop)
        if gone:
            log.debug("checkpoints_collected", epochs=gone)
