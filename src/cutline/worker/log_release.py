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


class LogRelease:
    """Truncates one operator's log; requests are performed in order of arrival."""

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
        self._requests: queue.SimpleQueue[Position | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=f"cutline-release-{channel.operator}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current request; later requests cover those still in the queue."""
        self._is_stopped = True
        self._requests.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def request(self, below: Position) -> None:
        self._requests.put(below)

    def _run(self) -> None:
        while (below := self._requests.get()) is not None and not self._is_stopped:
            try:
                self._check_fence()
                self._channel.truncate(below)
            except Exception:  # keeping too much loses nothing; the next request covers it
                log.warning("entries_not_released", channel=self._channel.operator, below=below, exc_info=True)
            # Sent in either case: this request deletes nothing later.
            self._outbox.tell(
                EntriesReleased(operator=self._channel.operator, generation=self._generation, below=below)
            )
