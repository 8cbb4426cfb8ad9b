"""The post between the coordinator and its operators: numbered, put back into order, sent again until it is answered.

Today both sides live in one process and the wire is a queue; another wire needs nothing else of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from cutline.base.clock import now_ms
from cutline.model.ids import Generation
from cutline.protocol.link import Endpoint, Envelope
from cutline.protocol.messages.coordinator import (
    AckRequested,
    BarrierRequested,
    EpochClosed,
    OperatorAcked,
    OperatorStarted,
    ProgressMade,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
)
from cutline.protocol.publish.commit import CommitPermit

#: What the coordinator tells an operator.
ToOperator = BarrierRequested | EpochClosed | AckRequested | CommitPermit
#: What an operator tells the coordinator.
ToCoordinator = OperatorStarted | OperatorAcked | SnapshotFailed | SinkCommitted | SinkCommitFailed | ProgressMade

Letter = Envelope[Any]
#: Puts a letter on its way. It may lose, repeat or delay it; it must not block.
Wire = Callable[[Letter], None]

S = TypeVar("S")
R = TypeVar("R")


class PostBox(Generic[S, R]):
    """One side of a link: sends S, receives R. Any thread may send; one thread receives and looks at the time."""

    def __init__(self, session: Generation, wire: Wire, *, retry_ms: int, retry_limit: int) -> None:
        """``session``: the generation, which grows with every life of either side."""
        self._endpoint: Endpoint[Any] = Endpoint(session, retry_ms=retry_ms, retry_limit=retry_limit)
        self._wire = wire
        self._lock = threading.Lock()

    def send(self, message: S) -> None:
        with self._lock:
            for letter in self._endpoint.send(message, now_ms=now_ms()):
                self._wire(letter)

    def receive(self, letter: Letter) -> tuple[R, ...]:
        """What has arrived with this letter, in the order in which it was sent; nothing comes twice."""
        with self._lock:
            received = self._endpoint.receive(letter, now_ms=now_ms())
            for reply in received.replies:
                self._wire(reply)
        return received.payloads

    def send_again(self) -> None:
        """Repeat what is due and was not answered."""
        with self._lock:
            for letter in self._endpoint.time_passed(now_ms=now_ms()):
                self._wire(letter)

    def next_deadline_ms(self) -> int | None:
        with self._lock:
            return self._endpoint.next_deadline_ms()

    def counts(self) -> Counter[str]:
        """What went wrong on the way so far; see ``Endpoint.counts``."""
        with self._lock:
            return Counter(self._endpoint.counts)
