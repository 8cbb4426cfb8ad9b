"""Writes the lists of the examples and of the decisions: examples/README.md and docs/adr/README.md."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
DECISIONS = ROOT / "docs" / "adr"

NOTE = "<!-- `make docs` writes this page from the first line of each file -->"


def examples_page() -> str:
    rows = [f"| [{path.name}]({path.name}) | {_says(path)} |" for path in sorted(EXAMPLES.glob("*.py"))]
    head = "Complete flows, all run by the tests. The first lines of each file say how to run it."
    return "\n".join(["# Examples", "", NOTE, "", head, "", "| file | what it shows |", "|---|---|", *rows, ""])


def _says(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def decisions_page() -> str:
    rows = [f"- [{_title(path)}]({path.name})" for path in sorted(DECISIONS.glob("0*.md"))]
    head = "Decisions that would surprise a newcomer: what was decided, why, and what it costs."
    return "\n".join(["# Decisions", "", NOTE, "", head, "", *rows, ""])


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


PAGES = {EXAMPLES / "README.md": examples_page, DECISIONS / "README.md": decisions_page}


def main() -> int:
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
