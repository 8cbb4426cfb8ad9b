"""What one operator tells the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from cutline.protocol.messages.wire import ToCoordinator, ToOperator
from cutline.transport.mailbox import Mailbox


class Outbox:
    """Sends messages from any thread of the operator."""

    def __init__(self, mailbox: Mailbox[ToCoordinator, ToOperator], wake: Callable[[], None]) -> None:
        """``wake`` wakes the operator's thread, which resends lost messages."""
        self._mailbox = mailbox
        self._wake = wake

    def tell(self, message: ToCoordinator) -> None:
        self._mailbox.send(message)
        self._wake()
