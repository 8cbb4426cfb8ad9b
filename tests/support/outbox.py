"""What an operator tells the coordinator, kept for the test."""

from __future__ import annotations

import queue

from cutline.protocol.messages.wire import ToCoordinator
from cutline.worker.outbox import Outbox


class KeptOutbox(Outbox):
    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[ToCoordinator] = queue.SimpleQueue()

    def tell(self, message: ToCoordinator) -> None:
        self.heard.put(message)
