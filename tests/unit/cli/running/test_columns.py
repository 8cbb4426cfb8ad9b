"""Tables that fit the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from cutline.cli.running.columns import Column, fitted

COLUMNS = (
    Column("name"),
    Column("first", rank=1, is_number=True),
    Column("never", rank=2),
    Column("last", rank=3, is_number=True),
    Column("note", rank=2, is_text=True),
)


def drawn(width: int, *rows: tuple[str, ...]) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(fitted(COLUMNS, [[Text(cell) for cell in row] for row in rows], width))
    lines = captured.get().splitlines()
    assert all(len(line) <= width for line in lines), lines
    return lines


ROW = ("a_long_operator_name", "12,345", "", "67.8 k", "some words that may be wrapped")


def test_with_room_for_all_every_column_with_content_is_shown() -> None:
    head, row = drawn(100, ROW)
    assert head.split() == ["name", "first", "last", "note"]
    assert row.split("  ")[0] == "a_long_operator_name" and "may be wrapped" in row


def test_what_ranks_last_is_left_out_first_and_text_is_wrapped_before() -> None:
    head, row, *rest = drawn(60, ROW)
    assert head.split() == ["name", "first", "last", "note"] and rest
    head, *_ = drawn(50, ROW)
    assert head.split() == ["name", "first", "note"]
    head, row = drawn(30, ROW)
    assert head.split() == ["name", "first"] and row.split() == ["a_long_operator_name", "12,345"]


def test_a_name_wider_than_the_terminal_is_shown_to_its_last_character() -> None:
    name = "n" * 70 + "_end"
    _, *lines = drawn(40, (name, "1", "", "2", "three"))
    assert "".join(line.strip() for line in lines) == name
