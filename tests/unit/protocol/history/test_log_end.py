"""A log ends before the first barrier that a power cut has torn or taken, unless something rests on it."""

from __future__ import annotations

import pytest

from cutline.model.ids import START, Position
from cutline.protocol.history.log_end import Found, never_written_from

KINDS = {"d": Found.BATCH, "b": Found.BARRIER, "t": Found.TORN}


def end_of(log: str, forked: int = START, *, first: int = 0) -> int | None:
    """``d``: a batch, ``b``: a barrier, ``t``: torn, ``_``: missing."""
    entries = [(Position(first + at), KINDS[kind]) for at, kind in enumerate(log) if kind != "_"]
    return never_written_from(entries, Position(forked))


@pytest.mark.parametrize("log", ["", "d", "db", "dbbdb", "b"])
def test_a_whole_log_counts_as_a_whole(log: str) -> None:
    assert end_of(log) is None
    assert end_of(log, first=7) is None


@pytest.mark.parametrize(("log", "end"), [("dt", 1), ("t", 0), ("dbt", 2), ("dtb", 1), ("dtbt", 1), ("db_b", 2)])
def test_barriers_from_the_first_torn_or_missing_one_on_were_never_written(log: str, end: int) -> None:
    assert end_of(log) == end
    assert end_of(log, first=7) == 7 + end


@pytest.mark.parametrize("log", ["dtd", "d_d", "dt_bd", "_dtd"])
def test_what_a_batch_follows_is_damaged(log: str) -> None:
    assert end_of(log) is None


def test_what_the_log_was_forked_behind_is_damaged() -> None:
    assert end_of("dt", forked=2) is None
    assert end_of("dt", forked=1) == 1
    assert end_of("d_b", forked=2) is None
