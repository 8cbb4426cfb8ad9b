"""Deletes the entries of an operator's log that the coordinator has released, on a thread of its own.

Deleting may take long where the rows lie in an object store; neither batches nor barriers wait for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.model.ids import Generation, Position
from cutline.protocol.messages.wire import EntriesReleased
from cutline.worker.outbox import Outbox

log = get_logger(__name__)

#: How long a stop waits for releases before it drops them.
_STOP_SECONDS = 1.0


class LogRelease:
    """Truncates one operator's log. Positions are cumulative: the highest of the waiting requests covers the others."""

    def __init__(
        self,
        channel: ChannelLog,
        generation: Generation,
        *,
        check_fence: Callable[[], None],
        outbox: Outbox,
    ) -> None:
        self._channel = channel
        self._generation = generation
        self._check_fence = check_fence
        self._outbox = outbox
        self._is_stopping = threading.Event()
        self._has_released = False
        self._requests: queue.SimpleQueue[Position | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"cutline-release-{channel.operator}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Perform the requests that wait, if that is quick; drop the rest: a later release covers them.

        The first request of a run is performed however long it takes: short runs would otherwise never delete anything.
        """
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_SECONDS)
            self._is_stopping.set()
            self._thread.join(timeout=30)

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def request(self, below: Position) -> None:
        self._requests.put(below)

    def _run(self) -> None:
        is_last = False
        while not is_last and (below := self._requests.get()) is not None:
            while not is_last and not self._requests.empty():  # no other thread takes from the queue
                waiting = self._requests.get()
                is_last = waiting is None
                below = below if waiting is None else max(below, waiting)
            if self._has_released and self._is_stopping.is_set():
                return
            self._release(below)
            self._has_released = True

    def _release(self, below: Position) -> None:
        try:
            self._check_fence()
            self._channel.truncate(below)
        except Exception:  # keeping too much loses nothing; the next request covers it
            log.warning("entries_not_released", channel=self._channel.operator, below=below, exc_info=True)
        # Sent in either case: this request deletes nothing later.
        self._outbox.tell(EntriesReleased(operator=self._channel.operator, generation=self._generation, below=below))
