"""Two endpoints over a network that loses, repeats, delays and re-orders."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cutline.protocol.link import NO_SESSION, Endpoint, Envelope, Received

RETRY_MS = 100


def endpoint(session: int = 1, *, retry_limit: int = 3, window: int = 4) -> Endpoint[str]:
    return Endpoint(session, retry_ms=RETRY_MS, retry_limit=retry_limit, window=window)


def take(receiver: Endpoint[str], *envelopes: Envelope[str], now_ms: int = 0) -> list[str]:
    return [payload for one in envelopes for payload in receiver.receive(one, now_ms=now_ms).payloads]


def send(sender: Endpoint[str], text: str, now_ms: int = 0) -> Envelope[str]:
    """A message that may go out at once."""
    (envelope,) = sender.send(text, now_ms=now_ms)
    return envelope


def acquainted(*, window: int = 4) -> tuple[Endpoint[str], Endpoint[str]]:
    """Two sides that have heard of one another, with nothing under way."""
    a, b = endpoint(1, window=window), endpoint(2, window=window)
    (reply,) = b.receive(send(a, "hello", now_ms=0), now_ms=0).replies
    a.receive(reply, now_ms=0)
    assert a.next_deadline_ms() is None
    return a, b


# ------------------------------------------------------------------------------------------------- order and repeats


def test_messages_come_in_the_order_in_which_they_were_sent() -> None:
    a, b = acquainted()
    first, second, third = (send(a, text, now_ms=0) for text in ("1", "2", "3"))
    assert take(b, third) == []
    assert take(b, first) == ["1"]
    assert take(b, second) == ["2", "3"]


def test_a_repeated_message_is_taken_once() -> None:
    a, b = acquainted()
    first, second = send(a, "1", now_ms=0), send(a, "2", now_ms=0)
    assert take(b, second, second, first, first, second) == ["1", "2"]
    assert b.counts["duplicate"] == 3


def test_a_repeat_is_acknowledged_again_because_the_first_reply_may_be_lost() -> None:
    a, b = acquainted()
    message = send(a, "1", now_ms=0)
    b.receive(message, now_ms=0)
    (reply,) = b.receive(message, now_ms=0).replies
    a.receive(reply, now_ms=0)
    assert a.next_deadline_ms() is None


def test_acknowledgements_are_not_acknowledged() -> None:
    """Two sides that answer every answer would never be silent."""
    a, b = acquainted()
    (reply,) = b.receive(send(a, "1", now_ms=0), now_ms=0).replies
    assert reply.payload is None
    assert a.receive(reply, now_ms=0) == Received()


def test_a_message_acknowledges_what_its_sender_has_received() -> None:
    a, b = acquainted()
    b.receive(send(a, "question", now_ms=0), now_ms=0)
    a.receive(send(b, "answer", now_ms=0), now_ms=0)
    assert a.next_deadline_ms() is None


def test_an_acknowledgement_covers_only_what_has_come_without_a_gap() -> None:
    a, b = acquainted()
    _, second = send(a, "1", now_ms=0), send(a, "2", now_ms=0)
    (reply,) = b.receive(second, now_ms=0).replies
    a.receive(reply, now_ms=0)
    assert [one.payload for one in a.time_passed(now_ms=RETRY_MS)] == ["1", "2"]


def test_no_more_is_under_way_than_the_window_holds() -> None:
    """More would be thrown away by the other side, sent again ever later, and never catch up."""
    a, b = acquainted(window=3)
    under_way = [envelope for number in range(5) for envelope in a.send(str(number), now_ms=0)]
    assert [one.payload for one in under_way] == ["0", "1", "2"]
    (reply,) = b.receive(under_way[0], now_ms=0).replies
    (released,) = a.receive(reply, now_ms=0).replies
    assert released.payload == "3"
    assert take(b, *under_way, released) == ["1", "2", "3"]


def test_what_is_held_back_goes_when_those_before_it_are_given_up() -> None:
    a, b = acquainted(window=1)
    send(a, "lost")
    assert a.send("held back", now_ms=0) == []
    out: list[Envelope[str]] = []
    for now_ms in (100, 300, 700, 1_500):
        out = a.time_passed(now_ms=now_ms)
    assert take(b, *out) == ["held back"]
    assert a.counts["given_up"] == 1


def test_no_more_is_kept_than_the_window_holds() -> None:
    """Also of a peer that holds nothing back."""
    a, b = endpoint(1, window=10), endpoint(2, window=3)
    first, *others = [send(a, str(number)) for number in range(6)]
    b.receive(first, now_ms=0)
    second, *others = others
    assert take(b, *others) == []
    assert b.counts["early"] == 2
    assert b.counts["overflow"] == 2
    assert take(b, second) == ["1", "2", "3"]
    again = a.time_passed(now_ms=RETRY_MS)
    assert take(b, *again) == ["4", "5"]


# ------------------------------------------------------------------------------------------------- sending again


def test_what_is_not_acknowledged_is_sent_again_with_doubling_pauses_up_to_a_limit() -> None:
    a = endpoint(retry_limit=3)
    send(a, "1", now_ms=0)
    tries = []
    while (deadline := a.next_deadline_ms()) is not None:
        assert a.time_passed(now_ms=deadline - 1) == []
        if a.time_passed(now_ms=deadline):
            tries.append(deadline)
    assert tries == [100, 300, 700]
    assert a.counts["retried"] == 3
    assert a.counts["given_up"] == 1


def test_a_given_up_message_is_not_waited_for() -> None:
    a, b = acquainted()
    send(a, "lost", now_ms=0)
    for now_ms in (100, 300, 700, 1_500):
        a.time_passed(now_ms=now_ms)
    assert a.counts["given_up"] == 1
    assert take(b, send(a, "next", now_ms=1_500)) == ["next"]
    assert b.counts["skipped"] == 1


def test_what_came_early_is_taken_when_the_message_before_it_is_given_up() -> None:
    a, b = acquainted()
    send(a, "lost", now_ms=0)
    assert take(b, send(a, "early", now_ms=50)) == []
    again: list[Envelope[str]] = []
    for now_ms in (100, 300, 700, 1_500):
        again = [one for one in a.time_passed(now_ms=now_ms) if one.payload == "early"]
    assert take(b, *again) == ["early"]


def test_a_given_up_message_that_comes_late_after_all_is_not_taken_out_of_order() -> None:
    a, b = acquainted()
    late = send(a, "late", now_ms=0)
    for now_ms in (100, 300, 700, 1_500):
        a.time_passed(now_ms=now_ms)
    assert take(b, send(a, "next", now_ms=1_500), late) == ["next"]


# ------------------------------------------------------------------------------------------------- lives


@pytest.mark.parametrize("session", [NO_SESSION, -1])
def test_a_session_is_positive(session: int) -> None:
    with pytest.raises(ValueError, match="not positive"):
        endpoint(session)


def test_the_first_sign_of_a_peer_is_no_restart_and_a_higher_session_is_one() -> None:
    b = endpoint(9)
    assert not b.receive(send(endpoint(1), "1", now_ms=0), now_ms=0).peer_restarted
    assert b.receive(send(endpoint(2), "1", now_ms=0), now_ms=0).peer_restarted
    assert not b.receive(send(endpoint(2), "1", now_ms=0), now_ms=0).peer_restarted


def test_messages_of_an_earlier_life_of_the_peer_change_nothing() -> None:
    old, new, b = endpoint(1), endpoint(2), endpoint(9)
    stray, acknowledging = send(old, "stray", now_ms=0), send(old, "stray too", now_ms=0)
    take(b, send(new, "1", now_ms=0))
    send(b, "to the new one", now_ms=0)
    assert b.receive(stray, now_ms=0) == Received()
    assert b.receive(acknowledging, now_ms=0) == Received()
    assert b.counts["stale"] == 2
    assert b.next_deadline_ms() is not None


def test_a_message_meant_for_an_earlier_life_is_answered_with_who_is_there_now() -> None:
    a, _ = acquainted()
    meant_for_before = send(a, "to the one before", now_ms=0)
    b = endpoint(3)
    received = b.receive(meant_for_before, now_ms=0)
    assert received.payloads == ()
    (reply,) = received.replies
    assert a.receive(reply, now_ms=0).peer_restarted
    assert a.next_deadline_ms() is None, "the new life is told afresh"
    assert a.counts["given_up"] == 1
    assert take(b, send(a, "to the new one", now_ms=0)) == ["to the new one"]


def test_an_acknowledgement_for_an_earlier_life_acknowledges_nothing_of_this_one() -> None:
    a, b = acquainted()
    (reply_to_before,) = b.receive(send(a, "1", now_ms=0), now_ms=0).replies
    reborn = endpoint(7)
    send(reborn, "not yet heard", now_ms=0)
    reborn.receive(reply_to_before, now_ms=0)
    assert reborn.next_deadline_ms() is not None


def test_what_an_earlier_life_had_received_does_not_count_as_missing() -> None:
    a, b = acquainted()
    for text in ("1", "2"):
        (reply,) = b.receive(send(a, text, now_ms=0), now_ms=0).replies
        a.receive(reply, now_ms=0)
    reborn = endpoint(3)
    (reply,) = reborn.receive(send(a, "3", now_ms=0), now_ms=0).replies
    a.receive(reply, now_ms=0)
    assert take(reborn, send(a, "4", now_ms=0)) == ["4"]
    assert not reborn.counts["skipped"]


def test_a_stray_message_between_two_earlier_lives_loses_no_message_of_the_present_ones() -> None:
    """The router knows addresses, not sessions: a retry of the dead peer meets the new service first."""
    before, _ = acquainted()
    stray = send(before, "to the one before")
    a, b = endpoint(2), endpoint(3)
    (reply,) = b.receive(stray, now_ms=0).replies
    assert take(a, send(b, "to the present one")) == ["to the present one"]
    assert a.receive(reply, now_ms=0) == Received()


def test_who_is_there_now_is_understood_by_a_peer_of_any_session() -> None:
    """b takes a dead peer for the present one, and the present one knows only an earlier b."""
    early = send(endpoint(1), "from the one before")
    a = endpoint(4)
    (reply,) = endpoint(2).receive(send(a, "1"), now_ms=0).replies
    a.receive(reply, now_ms=0)
    b = endpoint(3)
    take(b, early)
    (reply,) = b.receive(send(a, "2"), now_ms=0).replies
    assert a.receive(reply, now_ms=0).peer_restarted
    assert take(b, send(a, "3")) == ["3"]


def test_what_was_sent_before_the_peer_was_known_goes_out_again_when_it_shows() -> None:
    a, b = endpoint(1), endpoint(2)
    send(a, "early bird", now_ms=0)
    a.receive(send(b, "hello", now_ms=10), now_ms=10)
    assert take(b, *a.time_passed(now_ms=10)) == ["early bird"]


# ------------------------------------------------------------------------------------------------- any network


@dataclass
class Side:
    """One side, in one of its lives."""

    name: str
    session: int
    end: Endpoint[tuple[int, int]]
    #: (own session, number) of everything it has sent, and of what must come: sent to a peer whose last life it knew.
    sent: list[tuple[int, int]] = field(default_factory=list)
    promised: list[tuple[int, int]] = field(default_factory=list)
    #: Of each life of the peer: what it has taken in this life of its own.
    taken: dict[int, list[int]] = field(default_factory=dict)

    @property
    def knows(self) -> int:
        """The life of the other side that it takes for the present one."""
        return self.end._peer_session


class Network(RuleBasedStateMachine):
    """Envelopes lie in a bag until they are delivered, perhaps often, or lost."""

    WINDOW = 3

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.sessions = 0
        self.wire: list[tuple[str, Envelope[tuple[int, int]]]] = []
        self.sides: dict[str, Side] = {}
        self.restarts = 0

    @initialize()
    def begin(self) -> None:
        for name in "ab":
            self.be_born(name)

    def be_born(self, name: str) -> None:
        self.sessions += 1
        # So many tries that nothing is given up before the network heals; giving up is tested above.
        end: Endpoint[tuple[int, int]] = Endpoint(
            self.sessions, retry_ms=RETRY_MS, retry_limit=1_000, window=self.WINDOW
        )
        self.sides[name] = Side(name, self.sessions, end)

    def other(self, name: str) -> Side:
        return self.sides["b" if name == "a" else "a"]

    @rule(name=st.sampled_from("ab"))
    def send(self, name: str) -> None:
        side = self.sides[name]
        message = (side.session, len(side.sent))
        side.sent.append(message)
        if side.knows in (self.other(name).session, NO_SESSION) and (side.knows or not self.restarts):
            side.promised.append(message)
        self.wire += [(self.other(name).name, envelope) for envelope in side.end.send(message, now_ms=self.now_ms)]

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), stays=st.booleans())
    def deliver(self, data: st.DataObject, stays: bool) -> None:
        """Any of them, whenever; one that stays comes again."""
        index = data.draw(st.integers(0, len(self.wire) - 1))
        to, envelope = self.wire[index] if stays else self.wire.pop(index)
        self.receive(to, envelope)

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    @rule(ms=st.sampled_from([50, 100, 1_000]))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        for side in self.sides.values():
            again = side.end.time_passed(now_ms=self.now_ms)
            self.wire += [(self.other(side.name).name, envelope) for envelope in again]
            deadline = side.end.next_deadline_ms()
            assert deadline is None or deadline > self.now_ms, "it would spin"

    @rule(name=st.sampled_from("ab"))
    def restart(self, name: str) -> None:
        self.restarts += 1
        self.be_born(name)
        # What the other side sends from now on without knowing of it may be lost, as may what is under way.
        self.other(name).promised.clear()

    def receive(self, to: str, envelope: Envelope[tuple[int, int]]) -> None:
        side = self.sides[to]
        received = side.end.receive(envelope, now_ms=self.now_ms)
        for session, number in received.payloads:
            taken = side.taken.setdefault(session, [])
            assert not taken or number > taken[-1], "in order, each at most once"
            assert session >= max(side.taken), "nothing of an earlier life after the first sign of a later one"
            taken.append(number)
        self.wire += [(self.other(to).name, reply) for reply in received.replies]

    @invariant()
    def little_is_kept(self) -> None:
        for side in self.sides.values():
            assert len(side.end._early) < self.WINDOW, "the next one is never kept, it is taken"
            assert sum(1 for one in side.end._unacknowledged.values() if one.attempts) <= self.WINDOW

    def teardown(self) -> None:
        """The network heals: what is sent from now on comes, in whatever order."""
        if not self.sides:
            return
        self.heal()
        self.check_promises()
        # One who knows of no other life, or of the present one, is heard with the very next message.
        for name, side in self.sides.items():
            self.send(name)
            if side.knows in (NO_SESSION, self.other(name).session):
                side.promised.append(side.sent[-1])
        self.heal()
        self.check_promises()

    def heal(self) -> None:
        for _ in range(40):
            self.pass_time(10**9)
            under_way, self.wire = self.wire, []
            for to, envelope in reversed(under_way):
                self.receive(to, envelope)

    def check_promises(self) -> None:
        for side in self.sides.values():
            taken = self.other(side.name).taken.get(side.session, [])
            assert {number for _, number in side.promised} <= set(taken), f"{side.name} was not heard"
            assert side.end.next_deadline_ms() is None, "everything is acknowledged"


TestNetwork = Network.TestCase
TestNetwork.settings = settings(stateful_step_count=50)
