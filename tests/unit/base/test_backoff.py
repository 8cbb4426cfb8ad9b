"""Pauses grow up to a limit."""

from __future__ import annotations

import pytest

from cutline.base.backoff import NO_PAUSE, Backoff


def test_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(first_s=1.0, limit_s=5.0)
    assert [backoff.pause_s(failures) for failures in range(1, 6)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_any_number_of_failures_has_a_pause() -> None:
    assert Backoff(first_s=1.0, limit_s=30.0).pause_s(100_000) == 30.0


def test_a_factor_of_one_keeps_pauses_equal() -> None:
    assert {Backoff(first_s=0.5, factor=1.0).pause_s(failures) for failures in (1, 2, 50)} == {0.5}


def test_jitter_only_shortens_a_pause_and_by_no_more_than_its_share() -> None:
    backoff = Backoff(first_s=2.0, jitter=0.5)
    assert [backoff.pause_s(1, chance) for chance in (0.0, 0.5, 1.0)] == [2.0, 1.5, 1.0]


def test_no_pause_is_none_however_often_it_fails() -> None:
    assert NO_PAUSE.pause_s(1) == NO_PAUSE.pause_s(50) == 0.0


def test_there_is_no_pause_before_the_first_failure() -> None:
    with pytest.raises(ValueError, match="0 failures"):
        NO_PAUSE.pause_s(0)
