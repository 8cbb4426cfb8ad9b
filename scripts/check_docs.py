"""Checks that every relative link in the Markdown files points to an existing file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def markdown_files() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def dead_links(page: Path) -> Iterator[str]:
    text = INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        path = target.partition("#")[0]
        if path and "://" not in target and not target.startswith("mailto:") and not (page.parent / path).exists():
            yield target


def main() -> int:
    pages = markdown_files()
    dead = [f"{page.relative_to(ROOT)}: no such file: {target}" for page in pages for target in dead_links(page)]
    print("\n".join([*dead, f"{len(pages)} pages, {len(dead)} dead links"]))
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
