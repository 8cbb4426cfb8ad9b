"""Writes docs/state-machines.md from the tables of legal moves: a diagram and a plain table for each machine."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from cutline.protocol.machines import MACHINES, Machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "state-machines.md"

S = TypeVar("S", bound=enum.Enum)

HEAD = """# State machines

Drawn from the tables of legal moves in `cutline.protocol`. A move that is not here is a bug, and the code or a test
says so.
Do not edit: `make docs` writes this page, and a test fails when it differs from the tables.
"""


def diagram(machine: Machine[S]) -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {machine.start.value}"
    for state, other in machine.all_moves():
        yield f"    {state.value} --> {other.value}"
    for state in machine.states():
        if machine.is_final(state):
            yield f"    {state.value} --> [*]"
    yield "```"


def table(machine: Machine[S]) -> Iterator[str]:
    yield "| state | meaning | may go to |"
    yield "|---|---|---|"
    for state in machine.states():
        following = ", ".join(other.value for other in machine.following(state)) or "nothing: it is over"
        yield f"| {state.value} | {machine.meanings[state]} | {following} |"


def section(machine: Machine[S]) -> str:
    return "\n".join([f"## {machine.name}", "", machine.subject, "", *diagram(machine), "", *table(machine), ""])


def render() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(machine) for machine in MACHINES)])


def main() -> int:
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
