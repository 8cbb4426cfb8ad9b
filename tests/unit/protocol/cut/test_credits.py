"""How much a producer may still write before its consumers have read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import OperatorId, Position
from cutline.protocol.cut.credits import CreditAccount

FAST, SLOW = OperatorId("fast"), OperatorId("slow")


def account(*consumers: OperatorId, entries: int = 3, size_bytes: int = 1_000) -> CreditAccount:
    return CreditAccount(consumers or (FAST, SLOW), entries=entries, size_bytes=size_bytes)


def write(credit: CreditAccount, *seqs: int, rows: int = 1, size_bytes: int = 10) -> None:
    for seq in seqs:
        credit.appended(Position(seq), rows, size_bytes)


def test_room_ends_with_the_number_of_entries() -> None:
    credit = account(entries=3)
    write(credit, 0, 1)
    assert credit.has_room()
    write(credit, 2)
    assert not credit.has_room()


def test_room_ends_with_the_bytes() -> None:
    credit = account(size_bytes=100)
    write(credit, 0, size_bytes=99)
    assert credit.has_room()
    write(credit, 1, size_bytes=1)
    assert not credit.has_room()


def test_one_entry_may_be_larger_than_the_whole_channel() -> None:
    """The producer cannot know before it has written; if it could never write, the flow would stand still."""
    credit = account(size_bytes=100)
    assert credit.may_run()
    write(credit, 0, size_bytes=10_000)
    assert not credit.may_run()


def test_the_slowest_consumer_decides() -> None:
    credit = account(entries=1)
    write(credit, 0)
    credit.consumed(FAST, Position(1))
    assert not credit.has_room()
    credit.consumed(SLOW, Position(1))
    assert credit.has_room()


def test_a_position_is_the_place_after_what_was_read() -> None:
    credit = account(FAST, entries=2)
    write(credit, 0, 1)
    credit.consumed(FAST, Position(0))
    assert not credit.has_room()
    credit.consumed(FAST, Position(1))
    assert credit.has_room()


def test_an_old_position_that_comes_late_takes_no_room_back() -> None:
    credit = account(FAST, entries=1)
    write(credit, 0)
    credit.consumed(FAST, Position(1))
    credit.consumed(FAST, Position(0))
    write(credit, 1)
    assert credit.backlog_rows() == {FAST: 1}


def test_entries_without_rows_cost_nothing() -> None:
    credit = account(entries=1)
    write(credit, 0, 1, 2, rows=0)
    assert credit.has_room()
    assert credit.is_drained()


def test_a_channel_that_nobody_reads_never_fills() -> None:
    credit = CreditAccount((), entries=1, size_bytes=1)
    write(credit, 0, 1, 2)
    assert credit.may_run()
    assert credit.is_drained()


def test_withheld_credit_stops_a_producer_that_has_room() -> None:
    credit = account()
    credit.is_withheld = True
    assert credit.has_room()
    assert not credit.may_run()
    credit.is_withheld = False
    assert credit.may_run()


def test_what_was_read_before_a_restart_takes_no_room_when_it_is_found_again() -> None:
    """An idle consumer says no more where it is: the producer would wait for it for ever."""
    credit = account(FAST, entries=2)
    credit.consumed(FAST, Position(5))
    write(credit, 2, 3, 4)
    assert credit.may_run()
    assert credit.is_drained()
    write(credit, 5)
    assert credit.backlog_rows() == {FAST: 1}


def test_the_backlog_is_counted_in_rows_for_each_consumer() -> None:
    credit = account()
    write(credit, 0, rows=5)
    write(credit, 1, rows=7)
    credit.consumed(FAST, Position(1))
    assert credit.backlog_rows() == {FAST: 7, SLOW: 12}


def test_a_consumer_that_is_none_is_a_bug() -> None:
    with pytest.raises(KeyError):
        account().consumed(OperatorId("stranger"), Position(1))


# ------------------------------------------------------------------------------------------------- against a model


@dataclass
class Model:
    """Keeps everything and counts anew each time."""

    entries: int
    size_bytes: int
    positions: dict[OperatorId, int]
    log: list[tuple[int, int, int]] = field(default_factory=list)

    def unread(self) -> list[tuple[int, int, int]]:
        slowest = min(self.positions.values(), default=10**9)
        return [entry for entry in self.log if entry[0] >= slowest and entry[1]]

    def has_room(self) -> bool:
        return len(self.unread()) < self.entries and sum(entry[2] for entry in self.unread()) < self.size_bytes

    def backlog(self) -> dict[OperatorId, int]:
        return {name: sum(rows for seq, rows, _ in self.log if seq >= at) for name, at in self.positions.items()}


steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 50)),
    st.tuples(st.sampled_from(["fast", "slow"]), st.integers(0, 30), st.none()),
)


@given(
    consumers=st.sets(st.sampled_from([FAST, SLOW])),
    entries=st.integers(1, 5),
    size_bytes=st.integers(1, 120),
    history=st.lists(steps, max_size=40),
)
def test_it_agrees_with_counting_everything_anew(
    consumers: set[OperatorId], entries: int, size_bytes: int, history: list[tuple[str, int, int | None]]
) -> None:
    credit = CreditAccount(sorted(consumers), entries=entries, size_bytes=size_bytes)
    model = Model(entries, size_bytes, dict.fromkeys(consumers, 0))
    for what, number, size in history:
        if size is not None:
            seq = len(model.log)
            model.log.append((seq, number, size))
            credit.appended(Position(seq), number, size)
        elif OperatorId(what) in consumers:
            name = OperatorId(what)
            model.positions[name] = max(model.positions[name], number)
            credit.consumed(name, Position(number))
        assert credit.has_room() == credit.may_run() == model.has_room()
        assert credit.is_drained() == (not model.unread())
        assert credit.backlog_rows() == model.backlog()


def test_a_producer_that_aligns_may_run_without_room_but_not_when_paused() -> None:
    """What lies before the barriers must get through: a consumer may wait for a barrier that comes after it."""
    account = CreditAccount([OperatorId("slow")], entries=1, size_bytes=10)
    account.appended(Position(0), 1, 1)
    assert not account.may_run()
    account.is_exempt = True
    assert account.may_run()
    assert not account.has_room()
    account.is_withheld = True
    assert not account.may_run()


def test_an_entry_that_is_heard_of_twice_counts_once() -> None:
    account = CreditAccount([OperatorId("slow")], entries=2, size_bytes=10)
    for _ in range(3):
        account.appended(Position(0), 1, 1)
    assert account.has_room()


def test_only_those_who_went_back_read_again() -> None:
    account = CreditAccount([OperatorId("back"), OperatorId("on")], entries=2, size_bytes=100)
    entries = [(Position(seq), 1, 1) for seq in range(3)]
    for entry in entries:
        account.appended(*entry)
    for name in ("back", "on"):
        account.consumed(OperatorId(name), Position(3))
    account.restored({OperatorId("back"): Position(1)}, entries)
    assert not account.has_room()
    assert account.backlog_rows() == {"back": 2, "on": 0}
    account.consumed(OperatorId("back"), Position(3))
    assert account.is_drained()
