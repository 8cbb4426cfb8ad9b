"""Draws the live view of a flow that has some trouble, at 80 and 160 columns, into docs/pictures.

``make docs`` runs it, and a test fails when a picture differs from the code.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console

from cutline.cli.running.live import flow_view
from tests.support.sample_status import AT_MS, SAMPLE

PICTURES = {80: ROOT / "docs" / "pictures" / "live-80.svg", 160: ROOT / "docs" / "pictures" / "live-160.svg"}

#: Rich's own frame asks a server for its font. This one takes what the reader's machine has.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
        font-size: {char_height}px;
        line-height: {line_height}px;
        font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
    </g>
</svg>
"""


def drawn(columns: int) -> str:
    """The picture, the same each time."""
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(flow_view(SAMPLE, "Ctrl-C stops", at_ms=AT_MS))
    picture = console.export_svg(title="cutline run payments.py", code_format=_FORMAT, unique_id=f"live-{columns}")
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


def main() -> int:
    for columns, path in PICTURES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
