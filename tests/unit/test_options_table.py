"""The guide's table of options is what the declarations say: an option without documentation cannot exist."""

from __future__ import annotations

from cutline.config.options import OPTION_NAMES
from tools.options_table import PAGE, table, with_table


def test_the_page_on_disk_holds_the_table_that_the_declarations_give() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run: make docs"


def test_the_table_has_a_row_for_every_option() -> None:
    assert [line.split("`")[1] for line in table().splitlines()[2:]] == list(OPTION_NAMES)
