"""Draws the pictures of the README and of docs/concepts.md into docs/pictures.

Plain SVG with fonts of the reader's machine. Each picture has a background of its own, so it is legible on any page; it
turns dark where the reader prefers that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"

STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2733; }
  .title { font-weight: 600; font-size: 15px; }
  .small { font-size: 11.5px; fill: #566273; }
  .number { font-size: 11.5px; text-anchor: middle; }
  .mid { text-anchor: middle; }
  .end { text-anchor: end; }
  .page { fill: #fbfcfe; stroke: #d5dbe5; }
  .box { fill: #eef2f8; stroke: #7f8da3; }
  .entry { fill: #ffffff; stroke: #7f8da3; }
  .read { fill: #dfe6f1; stroke: #7f8da3; }
  .flight { fill: #ffe2a8; stroke: #b98113; }
  .gone { fill: none; stroke: #9aa5b6; stroke-dasharray: 3 3; }
  .barrier { fill: #d3406b; stroke: none; }
  .good { fill: #d6efdd; stroke: #3d8f5a; }
  .arrow { stroke: #566273; stroke-width: 1.5; fill: none; }
  .head { fill: #566273; }
  .cut { stroke: #d3406b; stroke-width: 2.5; fill: none; stroke-dasharray: 7 4; }
  .red { fill: #b3264f; font-weight: 600; }
  .faint { fill: #7d889a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e9f1; }
    .small { fill: #aab5c6; }
    .page { fill: #1b212b; stroke: #3a4555; }
    .box { fill: #2a3341; stroke: #8795ab; }
    .entry { fill: #1b212b; stroke: #8795ab; }
    .read { fill: #364256; stroke: #8795ab; }
    .flight { fill: #6b4f12; stroke: #e0a93b; }
    .gone { stroke: #6c798d; }
    .barrier { fill: #f0658c; }
    .good { fill: #1f4a30; stroke: #6cc48b; }
    .arrow { stroke: #aab5c6; }
    .head { fill: #aab5c6; }
    .cut { stroke: #f0658c; }
    .red { fill: #ff8fae; }
    .faint { fill: #8894a7; }
  }
"""

ENTRY = 30
HIGH = 30


@dataclass
class Picture:
    """Collects shapes; coordinates are pixels from the upper left corner."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, wide: float, high: float, kind: str, *, round_by: int = 5) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="{round_by}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        classes = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{classes} x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path class="arrow" marker-end="url(#head)" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')

    def path(self, way: str, kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="{way}"/>')

    def operator(self, x: float, y: float, name: str, what: str = "", *, wide: int = 104, kind: str = "box") -> None:
        self.rect(x, y, wide, 46, kind, round_by=8)
        self.text(x + wide / 2, y + (20 if what else 28), name, "mid")
        if what:
            self.text(x + wide / 2, y + 36, what, "small mid")

    def log(self, x: float, y: float, entries: str, *, first: int = 1) -> None:
        """A channel. One letter for each entry: r read, . not yet read, f in flight, g gone, B a barrier."""
        kinds = {"r": "read", ".": "entry", "f": "flight", "g": "gone"}
        for number, one in enumerate(entries):
            at = x + number * ENTRY
            if one == "B":
                self.rect(at + 9, y - 4, 10, HIGH + 8, "barrier", round_by=2)
            else:
                self.rect(at, y, ENTRY - 3, HIGH, kinds[one], round_by=3)
                self.text(at + (ENTRY - 3) / 2, y + 20, str(first + number), "number faint" if one == "g" else "number")

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        page = f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10"/>'
        return "\n".join(
            [
                head,
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                marker,
                page,
                *self.parts,
                "</svg>",
            ]
        )


def the_cut() -> Picture:
    """For the README: one line across all queries."""
    to = Picture(760, 330, "One consistent cut across all Spark queries of a pipeline")
    to.text(24, 32, "Epoch 812: one cut across every query of the pipeline", "title")
    for y, name in ((62, "cards"), (142, "upi")):
        to.operator(24, y, name, "Spark query", wide=92)
        to.arrow(118, y + 23, 138, y + 23)
    to.log(144, 70, "rrrB..", first=1)
    to.log(144, 150, "rrffB.", first=1)
    to.arrow(328, 85, 384, 112)
    to.arrow(328, 165, 384, 138)
    to.operator(388, 102, "totals", "Spark query", wide=92)
    to.arrow(482, 125, 502, 125)
    to.log(508, 110, "rrB.", first=1)
    to.arrow(630, 125, 652, 125)
    to.operator(656, 102, "Delta", "table", wide=80, kind="good")
    to.path("M247 52 L247 118 C247 132 277 128 277 142 L277 204 M582 92 L582 160", "cut")
    to.path("M277 204 C277 232 582 232 582 160", "cut")
    to.text(430, 205, "the cut", "red mid")
    to.text(24, 254, "The checkpoint is everything before the line:")
    for x, kind, words in (
        (24, "box", "state and source positions"),
        (250, "flight", "rows in flight: a range of a log"),
        (502, "good", "what the table has published"),
    ):
        to.rect(x, 272, 16, 16, kind, round_by=3)
        to.text(x + 24, 285, words)
    to.text(24, 314, "A restore brings all of it to this line, or refuses before anything changes.", "small")
    return to


def barriers() -> Picture:
    to = Picture(760, 372, "A barrier travels through the logs")
    rows = (
        ("The source writes a barrier into its log, behind its last batch.", "rr..B", "rr"),
        ("The consumer reads up to the barrier, and no further: it cuts here.", "rrrrB.", "rrr"),
        ("It writes its own barrier. Both snapshots are stored: the checkpoint is complete.", "rrrrB..", "rrrB"),
    )
    for number, (words, first, second) in enumerate(rows):
        y = 24 + number * 116
        to.text(24, y + 10, str(number + 1), "red")
        to.text(42, y + 10, words)
        to.operator(24, y + 30, "orders", "source", wide=84)
        to.arrow(110, y + 53, 128, y + 53)
        to.log(134, y + 38, first)
        to.arrow(366, y + 53, 388, y + 53)
        to.operator(392, y + 30, "totals", "counts", wide=84)
        to.arrow(478, y + 53, 496, y + 53)
        to.log(502, y + 38, second)
        if number == 2:
            to.text(66, y + 92, "snapshot", "red mid")
            to.text(434, y + 92, "snapshot", "red mid")
            to.text(640, y + 58, "→ sinks publish", "small")
    return to


def aligned_unaligned() -> Picture:
    to = Picture(760, 366, "Aligned and unaligned: what an operator does while one barrier is late")
    for y, title, words in (
        (24, "Aligned", ("waits: input A stands still", "until B has been read up", "to its barrier")),
        (202, "Unaligned", ("cuts now: B's rows before", "the barrier become part of", "the checkpoint, as a range")),
    ):
        to.text(24, y + 10, title, "title")
        to.text(24, y + 48, "A")
        to.text(24, y + 104, "B")
        is_aligned = title == "Aligned"
        to.log(44, y + 28, "rrrB..")
        to.log(44, y + 84, "rr...B" if is_aligned else "rrfffB")
        to.arrow(228, y + 43, 270, y + 62)
        to.arrow(228, y + 99, 270, y + 80)
        to.operator(274, y + 48, "totals", "two inputs", wide=100)
        to.arrow(376, y + 71, 396, y + 71)
        to.log(402, y + 56, "rr" if is_aligned else "rrB")
        for line, one in enumerate(words):
            to.text(520, y + 50 + line * 19, one)
        cut_of_b = 208 if is_aligned else 107
        to.path(f"M148 {y + 18} L148 {y + 66} L{cut_of_b} {y + 72} L{cut_of_b} {y + 124}", "cut")
    to.rect(24, 338, 14, 14, "read", round_by=3)
    to.text(44, 350, "read by totals", "small")
    to.rect(164, 338, 14, 14, "entry", round_by=3)
    to.text(184, 350, "not yet read", "small")
    to.rect(294, 338, 14, 14, "flight", round_by=3)
    to.text(314, 350, "in flight: before the barrier, not yet read", "small")
    to.rect(592, 336, 8, 18, "barrier", round_by=2)
    to.text(608, 350, "barrier", "small")
    return to


def in_flight() -> Picture:
    to = Picture(760, 222, "Rows in flight are a range of a log")
    to.text(24, 32, "In flight: two numbers in the manifest", "title")
    to.log(44, 84, "rrrrrffffB....")
    to.text(192, 70, "position of totals: 6", "end")
    to.path("M194 76 L194 128", "cut")
    to.text(320, 70, "barrier: 10")
    to.path("M194 134 L194 142 L312 142 L312 134", "arrow")
    to.text(253, 160, "range 6 to 9", "mid")
    to.text(24, 194, "The entries are durable files already. The checkpoint records the range; it copies no row.")
    to.text(24, 211, "A restore gives them to totals again, in the same order.", "small")
    return to


def restore() -> Picture:
    to = Picture(760, 316, "A restore: the flow leaves the epochs after its target, and sinks are rewound to it")
    to.text(24, 32, "restore --to 3", "title")
    to.text(24, 74, "checkpoints")
    names = ("1", "2", "3", "4", "5")
    for number, name in enumerate(names):
        x = 140 + number * 84
        to.rect(x, 54, 64, 32, "gone" if number > 2 else ("good" if number == 2 else "box"), round_by=6)
        to.text(x + 32, 75, f"epoch {name}", "mid faint" if number > 2 else "mid")
    to.text(372, 116, "bad deploy", "red mid")
    to.path("M372 94 L372 102", "arrow")
    to.text(24, 150, "log of orders")
    to.log(140, 132, "rrrrrrrBgggg")
    to.text(512, 150, "abandoned", "small")
    to.text(24, 208, "new generation")
    to.log(380, 190, "....", first=9)
    to.path("M360 168 C360 205 362 205 374 205", "arrow")
    to.text(512, 208, "the same input, read again", "small")
    to.text(24, 262, "table")
    to.rect(140, 244, 232, 30, "good", round_by=5)
    to.text(256, 264, "rows of epochs 1 to 3", "mid")
    to.rect(376, 244, 124, 30, "gone", round_by=5)
    to.text(438, 264, "rewound", "mid faint")
    to.text(512, 264, "readers see whole epochs", "small")
    to.text(24, 302, "State, positions, rows in flight and table are those of one moment.", "small")
    return to


def generations() -> Picture:
    to = Picture(760, 286, "Every start is a new generation; what an older one still writes is never read")
    to.text(24, 32, "kill -9, and a process that was only presumed dead", "title")
    to.text(24, 78, "generation 1")
    to.log(130, 60, "rrrrrrr")
    to.text(356, 78, "killed", "red")
    to.rect(420, 60, 27, 30, "gone", round_by=3)
    to.text(433, 80, "8", "number faint")
    to.text(462, 74, "an entry that the old process writes late:", "small")
    to.text(462, 90, "generation 2 forked before it, no reader sees it", "small")
    to.path("M340 94 C340 140 342 140 350 140", "arrow")
    to.text(24, 144, "generation 2")
    to.log(356, 126, "....", first=8)
    to.text(490, 146, "continues behind entry 7", "small")
    to.text(24, 200, "what counts")
    to.log(130, 182, "rrrrrrr")
    to.log(356, 182, "....", first=8)
    to.text(
        24,
        244,
        "Every entry is created once, under the number of its generation. Sinks and the remote tier record the newest",
    )
    to.text(24, 262, "generation that has claimed them, and refuse an older one.")
    return to


PICTURES: dict[str, Callable[[], Picture]] = {
    "cut.svg": the_cut,
    "barriers.svg": barriers,
    "aligned-unaligned.svg": aligned_unaligned,
    "in-flight.svg": in_flight,
    "restore.svg": restore,
    "generations.svg": generations,
}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
