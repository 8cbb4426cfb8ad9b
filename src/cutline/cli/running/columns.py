"""Tables that fit the terminal: what matters least is left out first, and names are never cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_GAP = 2
#: The least width of a column whose text may be wrapped.
_LEAST_TEXT = 18


@dataclass(frozen=True, slots=True)
class Column:
    """A column. ``rank``: of the columns, those with the highest are left out first; 0: it always stays."""

    title: str
    rank: int = 0
    is_number: bool = False
    #: It may be wrapped at spaces, and takes the width that is left.
    is_text: bool = False


#: One cell per column; an empty one says that there is nothing to say.
Row: TypeAlias = "Sequence[Text]"


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table:
    """A table with all columns that fit. Columns without any content are left out."""
    from rich.table import Table
    from rich.text import Text

    kept = [index for index in range(len(columns)) if any(row[index].plain for row in rows)]
    while _width(columns, rows, kept) > width:
        least = max(kept, key=lambda index: columns[index].rank)
        if not columns[least].rank:
            break
        kept.remove(least)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP), collapse_padding=True, header_style="dim")
    has_room = _width(columns, rows, kept) <= width
    for index in kept:
        one = columns[index]
        table.add_column(
            one.title,
            justify="right" if one.is_number else "left",
            # Of a name that is wider than the terminal every character is shown, on several lines.
            overflow="fold",
            min_width=_natural(one, index, rows) if has_room and not one.is_text else None,
        )
    for row in rows:
        table.add_row(*map(Text.copy, (row[index] for index in kept)))
    return table


def _width(columns: Sequence[Column], rows: Sequence[Row], kept: Sequence[int]) -> int:
    return sum(_least(columns[index], index, rows) for index in kept) + _GAP * (len(kept) - 1)


def _least(column: Column, index: int, rows: Sequence[Row]) -> int:
    natural = _natural(column, index, rows)
    return min(natural, _LEAST_TEXT) if column.is_text else natural


def _natural(column: Column, index: int, rows: Sequence[Row]) -> int:
    from rich.cells import cell_len

    return max(cell_len(column.title), *(cell_len(row[index].plain) for row in rows))
