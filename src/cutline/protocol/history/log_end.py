"""Where a log ends after a power cut.

A barrier is written without a sync; it is synced before anything rests on it: a later batch, the acknowledgement of its
cut, a fork of the log. So a power cut may leave the newest barriers torn, or some of them and not those before. Nothing
rests on these, and the log ends before the first that is missing or torn.
A torn entry that something does rest on is damage: a batch follows it, or the log was forked behind it. A complete
checkpoint whose barrier is then beyond the log's end is noticed where checkpoints are compared with the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from cutline.model.ids import Position


class Found(Enum):
    """What the file of an entry holds."""

    BATCH = "batch"
    BARRIER = "barrier"
    #: Nothing, or part of an entry that may have been a barrier.
    TORN = "torn"


def never_written_from(entries: Sequence[tuple[Position, Found]], forked: Position) -> Position | None:
    """From where on entries count as never written; None if all of them count, or something is damaged.

    ``entries``: as the lineage shows them, ascending. ``forked``: where the newest generation begins to write.
    """
    expected: Position | None = None
    for index, (seq, found) in enumerate(entries):
        if found is Found.TORN or (expected is not None and seq != expected):
            first = seq if expected is None else min(seq, expected)
            rests = any(later is Found.BATCH for _, later in entries[index:])
            return None if rests or first < forked else first
        expected = Position(seq + 1)
    return None
