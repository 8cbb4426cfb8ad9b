"""The page of state machines is what the tables say, and the tables are whole."""

from __future__ import annotations

import enum
from typing import TypeVar

import pytest

from cutline.protocol.machines import MACHINES, Machine
from tools.state_diagrams import PAGE, render

S = TypeVar("S", bound=enum.Enum)

every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def test_the_page_on_disk_is_what_the_tables_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make docs"


@every_machine
def test_every_state_has_its_moves_and_its_meaning(machine: Machine[S]) -> None:
    assert set(machine.moves) == set(machine.states()) == set(machine.meanings)


@every_machine
def test_every_state_can_be_reached_and_nothing_moves_to_itself(machine: Machine[S]) -> None:
    reached = {machine.start}
    for _ in machine.states():
        reached |= {other for state in reached for other in machine.following(state)}
    assert reached == set(machine.states())
    assert all(state is not other for state, other in machine.all_moves())


@every_machine
def test_every_move_stands_in_the_diagram_and_in_the_table(machine: Machine[S]) -> None:
    page = render()
    for state, other in machine.all_moves():
        assert f"    {state.value} --> {other.value}\n" in page
    for state in machine.states():
        assert f"| {state.value} | {machine.meanings[state]} |" in page
