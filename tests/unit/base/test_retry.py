"""The retry loop: how many attempts, which pauses, which error comes out. A manual clock: no test sleeps."""

from __future__ import annotations

from typing import Any

import pytest

from cutline.base.backoff import Backoff
from cutline.base.clock import ManualClock
from cutline.base.retry import Retry


class AwayError(Exception):
    """What is retried."""


class Flaky:
    """Fails so many times, then answers with the number of the attempt."""

    def __init__(self, failures: int, error: type[Exception] = AwayError) -> None:
        self.attempts = 0
        self._failures = failures
        self._error = error

    def __call__(self) -> int:
        self.attempts += 1
        if self.attempts <= self._failures:
            raise self._error(f"attempt {self.attempts}")
        return self.attempts


def on(clock: ManualClock, **settings: Any) -> Retry:
    return Retry(now_s=clock.now_s, sleep=clock.sleep, **settings)


def test_the_first_result_is_returned_and_nothing_is_slept_for_it() -> None:
    clock, flaky = ManualClock(), Flaky(0)
    assert on(clock, limit=3).call(flaky, on=AwayError) == 1
    assert clock.slept_s == []


def test_pauses_follow_the_backoff() -> None:
    clock = ManualClock()
    assert on(clock, limit=5, backoff=Backoff(first_s=1.0, limit_s=3.0)).call(Flaky(4), on=AwayError) == 5
    assert clock.slept_s == [1.0, 2.0, 3.0, 3.0]


def test_the_limit_counts_attempts_and_the_last_error_comes_out() -> None:
    flaky = Flaky(10)
    with pytest.raises(AwayError, match="attempt 3"):
        on(ManualClock(), limit=3).call(flaky, on=AwayError)
    assert flaky.attempts == 3


def test_no_pause_reaches_beyond_the_deadline() -> None:
    clock, flaky = ManualClock(), Flaky(10)
    with pytest.raises(AwayError, match="attempt 3"):
        on(clock, deadline_s=3.5, backoff=Backoff(first_s=1.0)).call(flaky, on=AwayError)
    assert clock.slept_s == [1.0, 2.0]


def test_the_time_an_attempt_takes_counts_towards_the_deadline() -> None:
    clock = ManualClock()

    def slow() -> None:
        clock.sleep(4.0)
        raise AwayError

    with pytest.raises(AwayError):
        on(clock, deadline_s=10.0, backoff=Backoff(first_s=1.0, factor=1.0)).call(slow, on=AwayError)
    assert clock.slept_s == [4.0, 1.0, 4.0]


def test_a_deadline_of_zero_leaves_one_attempt() -> None:
    flaky = Flaky(10)
    with pytest.raises(AwayError, match="attempt 1"):
        on(ManualClock(), deadline_s=0.0).call(flaky, on=AwayError)


def test_other_errors_come_out_at_once() -> None:
    flaky = Flaky(1, KeyError)
    with pytest.raises(KeyError):
        on(ManualClock(), limit=3).call(flaky, on=(AwayError, ValueError))
    assert flaky.attempts == 1


def test_a_final_error_comes_out_at_once() -> None:
    flaky = Flaky(5)
    with pytest.raises(AwayError, match="attempt 2"):
        on(ManualClock(), limit=9).call(flaky, on=AwayError, is_final=lambda error: "2" in str(error))


def test_each_pause_is_announced_and_none_after_the_last_attempt() -> None:
    told: list[tuple[str, float]] = []
    with pytest.raises(AwayError):
        on(ManualClock(), limit=3, backoff=Backoff(first_s=1.0)).call(
            Flaky(9), on=AwayError, before_pause=lambda error, pause_s: told.append((str(error), pause_s))
        )
    assert told == [("attempt 1", 1.0), ("attempt 2", 2.0)]


def test_jitter_draws_anew_for_every_pause() -> None:
    clock, draws = ManualClock(), iter([0.0, 1.0])
    backoff = Backoff(first_s=1.0, factor=1.0, jitter=0.5)
    assert on(clock, limit=3, backoff=backoff, chance=lambda: next(draws)).call(Flaky(2), on=AwayError) == 3
    assert clock.slept_s == [1.0, 0.5]


def test_an_interrupted_pause_ends_the_attempts() -> None:
    flaky = Flaky(9)
    retry = Retry(limit=5, backoff=Backoff(first_s=1.0), sleep=lambda seconds: True)
    with pytest.raises(AwayError, match="attempt 1"):
        retry.call(flaky, on=AwayError)
    assert list(retry.attempts()) == [1]


def test_attempts_that_fail_with_a_value_are_paused_between_and_counted() -> None:
    clock = ManualClock()
    retry = on(clock, limit=3, backoff=Backoff(first_s=1.0))
    assert list(retry.attempts()) == [1, 2, 3]
    assert clock.slept_s == [1.0, 2.0]


def test_leaving_the_loop_ends_the_attempts_without_a_pause() -> None:
    clock = ManualClock()
    for number in on(clock, limit=3, backoff=Backoff(first_s=1.0)).attempts():
        if number == 2:
            break
    assert clock.slept_s == [1.0]


def test_attempts_without_any_end_are_refused() -> None:
    with pytest.raises(ValueError, match="limit or a deadline"):
        Retry()
    with pytest.raises(ValueError, match="at least one"):
        Retry(limit=0)
