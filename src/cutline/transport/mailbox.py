"""One side of the link between the coordinator and an operator: messages numbered, in order, repeated until answered.

Today both sides run in one process and the wire is a queue; the mailboxes work over any other wire unchanged.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cutline.base.clock import now_ms
from cutline.model.ids import Generation
from cutline.protocol.link import Endpoint, Envelope

AnyEnvelope = Envelope[Any]
#: Sends an envelope. It may lose, repeat or delay it; it must not block.
Send = Callable[[AnyEnvelope], None]

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How often an unacknowledged message is sent again."""

    retry_ms: int
    retry_limit: int


class Mailbox(Generic[S, R]):
    """One side of a link: sends S, receives R. Any thread may send; one thread receives and resends."""

    def __init__(self, session: Generation, send: Send, settings: LinkSettings) -> None:
        """``session``: the generation, which grows with every restart of either side."""
        self._endpoint: Endpoint[Any] = Endpoint(session, retry_ms=settings.retry_ms, retry_limit=settings.retry_limit)
        self._send = send
        self._lock = threading.Lock()

    def send(self, message: S) -> None:
        with self._lock:
            for envelope in self._endpoint.send(message, now_ms=now_ms()):
                self._send(envelope)

    def receive(self, envelope: AnyEnvelope) -> tuple[R, ...]:
        """The messages that this envelope makes available, in the order of sending; each message appears once."""
        with self._lock:
            received = self._endpoint.receive(envelope, now_ms=now_ms())
            for reply in received.replies:
                self._send(reply)
        return received.payloads

    def send_again(self) -> None:
        """Resend unacknowledged messages that are due."""
        with self._lock:
            for envelope in self._endpoint.time_passed(now_ms=now_ms()):
                self._send(envelope)

    def next_deadline_ms(self) -> int | None:
        with self._lock:
            return self._endpoint.next_deadline_ms()

    def counts(self) -> Counter[str]:
        """Delivery problems so far; see ``Endpoint.counts``."""
        with self._lock:
            return Counter(self._endpoint.counts)
