"""The gate of one input: never past the first barrier that the operator has not cut for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.errors import InvariantViolation
from cutline.model.ids import Epoch, Position
from cutline.protocol.cut.gate import InputGate


def gate_with(*entries: str, read_up_to: int = 0, first: int = 0) -> InputGate:
    """A gate that has seen a log: "row", "empty", "b<epoch>" (uncut) or "(b<epoch>)" (cut or closed)."""
    gate = InputGate(Position(read_up_to))
    for seq, entry in enumerate(entries, first):
        show(gate, seq, entry)
    return gate


def show(gate: InputGate, seq: int, entry: str) -> None:
    if entry in ("row", "empty"):
        gate.data_appeared(Position(seq), has_rows=entry == "row")
    else:
        epoch = Epoch(int(entry.strip("(b)")))
        gate.barrier_appeared(Position(seq), epoch, is_uncut=not entry.startswith("("))


def test_without_barriers_everything_with_rows_is_admitted() -> None:
    assert gate_with("row", "row").admit() == 2


def test_an_empty_log_admits_nothing() -> None:
    assert InputGate().admit() == 0


def test_rows_after_an_uncut_barrier_are_not_admitted() -> None:
    gate = gate_with("row", "b1", "row", "row")
    assert gate.admit() == 1
    assert gate.end == 4


def test_the_gate_opens_when_the_operator_has_cut() -> None:
    gate = gate_with("row", "b1", "row")
    gate.release(Epoch(1))
    assert gate.admit() == 3


def test_the_first_of_several_barriers_decides() -> None:
    gate = gate_with("row", "b1", "row", "b2", "row")
    assert gate.admit() == 1
    gate.release(Epoch(1))
    assert gate.admit() == 3
    gate.release(Epoch(2))
    assert gate.admit() == 5


def test_releasing_a_later_barrier_does_not_open_an_earlier_one() -> None:
    gate = gate_with("row", "b1", "row", "b2", "row")
    gate.release(Epoch(2))
    assert gate.admit() == 1


def test_a_barrier_moves_no_position() -> None:
    gate = gate_with("row", "(b1)", "(b2)")
    assert gate.admit() == 1


def test_an_empty_entry_moves_no_position() -> None:
    gate = gate_with("row", "empty", "empty")
    assert gate.admit() == 1


def test_a_barrier_after_empty_entries_stands_after_the_last_row() -> None:
    gate = gate_with("row", "empty", "b1", "empty", "row")
    assert gate.barrier_position(Epoch(1)) == 1
    assert gate.admit() == 1


def test_a_barrier_before_every_row_admits_nothing() -> None:
    assert gate_with("b1", "row").admit() == 0


def test_a_barrier_that_is_over_does_not_block() -> None:
    assert gate_with("row", "(b1)", "row").admit() == 3


def test_a_barrier_that_has_not_appeared_has_no_position() -> None:
    assert gate_with("row").barrier_position(Epoch(1)) is None


def test_a_released_barrier_has_no_position() -> None:
    gate = gate_with("row", "b1")
    gate.release(Epoch(1))
    assert gate.barrier_position(Epoch(1)) is None


def test_entries_seen_before_change_nothing() -> None:
    gate = gate_with("row", "b1", "row")
    gate.release(Epoch(1))
    show(gate, 0, "row")
    show(gate, 1, "b1")
    assert gate.admit() == 3
    assert gate.barrier_position(Epoch(1)) is None


def test_releasing_an_unknown_epoch_changes_nothing() -> None:
    gate = gate_with("row", "b1", "row")
    gate.release(Epoch(9))
    assert gate.admit() == 1


def test_what_was_read_before_a_restart_stays_admitted() -> None:
    """The log was truncated up to entry 7 and no row is left in it."""
    gate = gate_with("(b4)", "empty", read_up_to=7, first=7)
    assert gate.admit() == 7


def test_after_a_restart_a_barrier_stands_where_it_stood() -> None:
    gate = gate_with("row", "row", "b4", "row", read_up_to=6, first=5)
    assert gate.barrier_position(Epoch(4)) == 7
    assert gate.admit() == 7


def test_a_gap_in_the_log_is_not_passed_over() -> None:
    """The missing entry may be a barrier: reading past it would break the cut silently."""
    gate = gate_with("row")
    with pytest.raises(InvariantViolation):
        show(gate, 2, "row")
    with pytest.raises(InvariantViolation):
        show(gate, 2, "b1")


def test_a_barrier_that_was_read_past_before_a_restart_holds_nothing_and_says_so() -> None:
    gate = InputGate(Position(3))
    gate.data_appeared(Position(0), has_rows=True)
    assert not gate.barrier_appeared(Position(1), Epoch(1), is_uncut=True)
    gate.data_appeared(Position(2), has_rows=True)
    assert gate.barrier_appeared(Position(3), Epoch(2), is_uncut=True)
    assert gate.barrier_position(Epoch(1)) is None
    assert gate.admit() == 3


def test_a_barrier_that_is_cut_for_or_over_may_have_been_read_past() -> None:
    gate = InputGate(Position(3))
    assert gate.barrier_appeared(Position(1), Epoch(1), is_uncut=False)


def test_a_gate_has_caught_up_when_all_that_was_read_before_has_appeared_again() -> None:
    assert InputGate().has_caught_up()
    gate = InputGate(Position(7))
    assert not gate.has_caught_up()
    for seq in (5, 6):
        assert not gate.has_caught_up()
        show(gate, seq, "row")
    assert gate.has_caught_up()


@given(st.lists(st.sampled_from(["row", "empty", "barrier"])), st.data())
def test_nothing_after_the_first_uncut_barrier_is_ever_admitted(kinds: list[str], data: st.DataObject) -> None:
    gate = InputGate()
    uncut: dict[int, int] = {}
    end = 0
    for seq, kind in enumerate(kinds):
        if kind == "barrier":
            show(gate, seq, f"b{seq + 1}")
            uncut[seq + 1] = end
        else:
            show(gate, seq, kind)
            end = seq + 1 if kind == "row" else end
        released = data.draw(st.booleans())
        if uncut and released:
            epoch = data.draw(st.sampled_from(sorted(uncut)))
            gate.release(Epoch(epoch))
            del uncut[epoch]
        assert gate.admit() == (min(uncut.values()) if uncut else end)
