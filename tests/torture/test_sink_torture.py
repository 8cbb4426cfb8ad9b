"""The torture of sinks notices what it is there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sink_torture import Report, View, _Reader, _Torture, lives
from tests.support.torture_flow import Row, all_rows, newest_rows, with_totals


def looking_at(*views: View, only_newest: bool = False) -> _Reader:
    left = list(views)
    reader = _Reader(read=lambda: left.pop(0), only_newest=only_newest)
    for _ in views:
        reader.look()
    return reader


def view(events: int, latest: int) -> dict[str, list[Row]]:
    return {"events": all_rows(events), "latest": with_totals(latest)}


def test_what_is_right_is_right() -> None:
    assert not looking_at(view(0, 0), view(8, 4), view(8, 8), view(20, 16)).wrong
    newest = {"events": all_rows(20), "latest": newest_rows(with_totals(20))}
    assert not looking_at(newest, only_newest=True).wrong


def test_a_row_twice_a_row_too_few_and_a_wrong_value_are_noticed() -> None:
    right = view(8, 8)
    for wrong in (
        {**right, "events": [*right["events"], right["events"][2]]},
        {**right, "latest": right["latest"][1:]},
        {**right, "latest": [*right["latest"][:-1], (7, "k0", 1)]},
    ):
        assert looking_at(wrong).wrong


def test_rows_that_vanish_are_noticed_unless_the_flow_goes_back() -> None:
    assert looking_at(view(8, 8), view(4, 8)).wrong
    reader = _Reader(
        read=iter([view(8, 8), view(4, 4), view(4, 4), view(8, 4), view(4, 4)]).__next__, only_newest=False
    )
    reader.look()
    reader.may_vanish = True
    reader.look()
    reader.may_vanish, reader.era = False, 1
    reader.look()
    reader.look()
    assert not reader.wrong
    reader.look()
    assert reader.wrong


def test_a_part_of_an_epoch_and_tables_of_different_epochs_are_noticed() -> None:
    def judge(*views: View, same_epoch: bool) -> None:
        run = _Torture(None, looking_at(*views), {}, Path())  # type: ignore[arg-type]
        run.epochs = {1: (8, 4), 2: (16, 12)}
        run.check_states(same_epoch=same_epoch)

    judge(view(0, 0), view(8, 4), view(16, 12), same_epoch=True)
    judge(view(0, 0), view(8, 0), view(8, 12), same_epoch=False)
    for wrong in (view(4, 4), view(8, 8)):
        with pytest.raises(AssertionError, match="no checkpoint"):
            judge(wrong, same_epoch=False)
    with pytest.raises(AssertionError, match="no checkpoint"):
        judge(view(8, 12), same_epoch=True)


def test_every_point_has_a_life() -> None:
    import random

    from cutline.base.crashpoints import POINTS

    planned = lives(random.Random(1), 30, POINTS, can_rewind=True)
    assert {life.crash_at.partition("#")[0].partition(":")[0] for life in planned if life.crash_at} == set(POINTS)
    assert sum(not life.crash_at for life in planned) == 30
    assert not [life for life in lives(random.Random(1), 30, POINTS, can_rewind=False) if life.rollback]
    assert Report().killed == 0
