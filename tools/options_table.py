"""Writes the table of options in docs/guide.md from their declarations in ``cutline.config.options``."""

from __future__ import annotations

import sys
from pathlib import Path

from cutline.config.options import Declaration, declarations

PAGE = Path(__file__).resolve().parent.parent / "docs" / "guide.md"
BEGIN = "<!-- options: `make docs` writes this table from the declarations in cutline.config.options -->"
END = "<!-- end of options -->"


def table() -> str:
    """Return the table, one row per option."""
    lines = ["| option | default | value | per operator | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, declarations().values())])


def _row(option: Declaration) -> str:
    shown = option.shown_default()
    default = f"`{shown}`" if shown else "unset"
    own = "yes" if option.is_per_operator else ""
    return f"| `{option.name}` | {default} | {option.kind.allowed()} | {own} | {option.doc} |"


def with_table(page: str) -> str:
    """Return the page with the table between the two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name}: the marks around the table of options are missing")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> int:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
