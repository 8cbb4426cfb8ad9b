"""Delivers messages in order, each once, over a network that loses, repeats, delays and re-orders them.

Both sides of a link hold an ``Endpoint``. A message carries the sender's session (a number that grows whenever it
restarts), a sequence number within that session, the lowest number it still holds, and how far it has received itself.
The sender resends an unacknowledged message with doubling pauses, up to a limit; then it gives the message up, the
lowest number advances, and the other side does not wait for it: a sender that needs an answer has its own timeout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

P = TypeVar("P")

#: Session of an unknown peer.
NO_SESSION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope(Generic[P]):
    """One message on the wire. Without a payload it only acknowledges."""

    sender_session: int
    #: The receiver's session; NO_SESSION when the sender knows of none.
    receiver_session: int
    #: 0 without a payload.
    seq: int
    #: The lowest sequence number the sender still holds: it never sends a lower one again.
    base: int
    #: Everything below this number of the receiver's messages has arrived.
    received: int
    payload: P | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[P]):
    """The result of receiving an envelope."""

    #: In the order in which they were sent.
    payloads: tuple[P, ...] = ()
    replies: tuple[Envelope[P], ...] = ()
    #: The other side has begun a new session: it knows no earlier message.
    peer_restarted: bool = False


@dataclass(slots=True)
class _Unacknowledged(Generic[P]):
    payload: P
    #: 0: held back, because it is beyond the other side's window.
    attempts: int = 0
    retry_at_ms: int = 0


class Endpoint(Generic[P]):
    """One side of a link. Pure: it returns the envelopes to send."""

    def __init__(self, session: int, *, retry_ms: int = 500, retry_limit: int = 8, window: int = 64) -> None:
        """``session``: higher than any earlier one. ``window``: the most messages in flight, or kept out of order."""
        if session <= NO_SESSION:
            raise ValueError(f"session {session} is not positive")
        self.session = session
        self._retry_ms = retry_ms
        self._retry_limit = retry_limit
        self._window = window
        self._peer_session = NO_SESSION
        self._next_seq = 1
        self._unacknowledged: dict[int, _Unacknowledged[P]] = {}
        self._expected = 1
        self._early: dict[int, P] = {}
        #: duplicate, early, stale, overflow, skipped, retried, given_up
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------------ sending

    def send(self, payload: P, *, now_ms: int) -> list[Envelope[P]]:
        """Accept a message; return the envelopes to send now. A held-back message goes out when others have arrived."""
        self._unacknowledged[self._next_seq] = _Unacknowledged(payload)
        self._next_seq += 1
        return self._send_held_back(now_ms)

    def _send_held_back(self, now_ms: int) -> list[Envelope[P]]:
        """The other side discards messages beyond its window; resent ever later, they would never catch up."""
        end = min(self._unacknowledged, default=self._next_seq) + self._window
        held = [seq for seq, message in self._unacknowledged.items() if not message.attempts and seq < end]
        for seq in held:
            self._unacknowledged[seq].attempts = 1
            self._unacknowledged[seq].retry_at_ms = now_ms + self._retry_ms
        return [self._envelope(seq, self._unacknowledged[seq].payload) for seq in held]

    def time_passed(self, *, now_ms: int) -> list[Envelope[P]]:
        """The envelopes to send again."""
        due = [seq for seq, one in self._unacknowledged.items() if one.attempts and now_ms >= one.retry_at_ms]
        again: list[Envelope[P]] = []
        for seq in due:
            message = self._unacknowledged[seq]
            if message.attempts > self._retry_limit:
                del self._unacknowledged[seq]
                self.counts["given_up"] += 1
                continue
            message.retry_at_ms = now_ms + self._retry_ms * 2**message.attempts
            message.attempts += 1
            self.counts["retried"] += 1
            again.append(self._envelope(seq, message.payload))
        return again + self._send_held_back(now_ms)

    def next_deadline_ms(self) -> int | None:
        return min((message.retry_at_ms for message in self._unacknowledged.values() if message.attempts), default=None)

    def _envelope(self, seq: int, payload: P | None) -> Envelope[P]:
        return Envelope(
            sender_session=self.session,
            receiver_session=self._peer_session,
            seq=seq,
            base=min(self._unacknowledged, default=self._next_seq),
            received=self._expected,
            payload=payload,
        )

    # ------------------------------------------------------------------ receiving

    def receive(self, envelope: Envelope[P], *, now_ms: int) -> Received[P]:
        """Handle an envelope; duplicates, strays and early ones do no harm."""
        if envelope.sender_session < self._peer_session:
            self.counts["stale"] += 1
            return Received()
        if envelope.receiver_session not in (NO_SESSION, self.session):
            # Meant for an earlier session of this side, whose numbers do not apply. The reply names the present one,
            # for whichever session the peer has now: the sender may have been dead for long.
            self.counts["stale"] += 1
            return Received(replies=(replace(self._envelope(0, None), receiver_session=NO_SESSION),))
        restarted = envelope.sender_session > self._peer_session != NO_SESSION
        if envelope.sender_session > self._peer_session:
            self._meet(envelope, now_ms)
        released: list[Envelope[P]] = []
        if envelope.receiver_session == self.session:
            for seq in [seq for seq in self._unacknowledged if seq < envelope.received]:
                del self._unacknowledged[seq]
            released = self._send_held_back(now_ms)
        payloads = self._skip_to(envelope.base)
        if envelope.payload is None:
            return Received(payloads=tuple(payloads), replies=tuple(released), peer_restarted=restarted)
        payloads += self._take(envelope.seq, envelope.payload)
        replies = (*released, self._envelope(0, None))
        return Received(payloads=tuple(payloads), replies=replies, peer_restarted=restarted)

    def _meet(self, envelope: Envelope[P], now_ms: int) -> None:
        """The first envelope of a session of the peer."""
        if self._peer_session != NO_SESSION:
            # Unacknowledged messages were meant for the earlier session; the new one is told anew what it needs.
            self.counts["given_up"] += len(self._unacknowledged)
            self._unacknowledged.clear()
        self._peer_session = envelope.sender_session
        self._expected = envelope.base
        self._early.clear()
        for message in self._unacknowledged.values():
            message.retry_at_ms = min(message.retry_at_ms, now_ms)

    def _take(self, seq: int, payload: P) -> list[P]:
        if seq < self._expected or seq in self._early:
            self.counts["duplicate"] += 1
            return []
        if seq >= self._expected + self._window:
            self.counts["overflow"] += 1  # it will be sent again
            return []
        if seq > self._expected:
            self.counts["early"] += 1
        self._early[seq] = payload
        return self._in_order()

    def _skip_to(self, base: int) -> list[P]:
        """The sender has given up every missing message below ``base``."""
        payloads: list[P] = []
        while self._expected < base:
            if self._expected in self._early:
                payloads.append(self._early.pop(self._expected))
            else:
                self.counts["skipped"] += 1
            self._expected += 1
        return payloads + self._in_order()

    def _in_order(self) -> list[P]:
        payloads: list[P] = []
        while self._expected in self._early:
            payloads.append(self._early.pop(self._expected))
            self._expected += 1
        return payloads
