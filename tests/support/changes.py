"""One change of a flow's operators that several tests make, and the generation before it."""

from __future__ import annotations

from pathlib import Path

from tests.support.changing import changing, counted

#: numbers ── totals ── (table), and a copy of the numbers in a log of its own
BEFORE = {"numbers": (), "totals": ("numbers",), "copy": ("numbers",)}


TABLES = {"table": "totals", "copies": "copy"}


#: totals is called sums, copy is gone, late is new
AFTER = {"numbers": (), "sums": ("numbers",), "late": ("sums",)}


NEW_TABLES = {"table": "sums", "latest": "late"}


CHANGES = {"rename": {"totals": "sums"}, "allow_dropped": True}


def first_life(storage: Path, *, more: int = 2) -> int:
    """Three numbers and a checkpoint, then ``more`` that will be given up; returns the checkpoint."""
    with changing(storage, BEFORE, TABLES) as flow:
        flow.emit(3)
        epoch = flow.settle()
        flow.emit(more)
        flow.settle()
        assert flow.table("table") == counted(0, 3 + more)
    return epoch
