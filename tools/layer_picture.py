"""Draws the layers into ARCHITECTURE.md, from the contract in pyproject.toml and the rooms' own docstrings.

``make docs`` runs it, and a test fails when the picture differs from the code.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- layers: drawn by tools/layer_picture.py -->", "<!-- end of layers -->"


def layers() -> list[list[str]]:
    """The rooms of every layer, top to bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [lines] = [one["layers"] for one in contracts if one["id"] == "layers"]
    return [re.findall(r"\w+", line) for line in lines]


def purpose(room: str) -> str:
    """The first line of the room's docstring."""
    folder = ROOT / "src" / "cutline" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].rstrip(".")


def drawn() -> str:
    """A line per room; rooms of one layer stand together and do not import one another."""
    widest = max(len(room) for layer in layers() for room in layer)
    blocks = ["\n".join(f"{room:<{widest}}  {purpose(room)}" for room in layer) for layer in layers()]
    rule = "─" * 100
    return f"```\n{f'{chr(10)}{rule}{chr(10)}'.join(blocks)}\n```"


def with_picture(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{drawn()}\n{END}{tail}"


def main() -> int:
    PAGE.write_text(with_picture(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
