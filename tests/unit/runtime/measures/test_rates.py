from __future__ import annotations

from cutline.runtime.measures.rates import Rates


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_covers_the_last_seconds_only() -> None:
    clock = Clock()
    rates = Rates(window_seconds=10, monotonic=clock)
    assert rates.per_second({"a": 1_000}) == {"a": 0.0}  # what came before is not known
    for second in range(1, 21):
        clock.now += 1
        found = rates.per_second({"a": 1_000 + 50 * second})
        assert found == {"a": 50.0}
    clock.now += 5
    assert rates.per_second({"a": 2_000}) == {"a": 25.0}
    clock.now += 10
    assert rates.per_second({"a": 2_000}) == {"a": 0.0}


def test_asking_often_changes_nothing() -> None:
    clock = Clock()
    rates = Rates(window_seconds=10, monotonic=clock)
    found = rates.per_second({"a": 0})
    for step in range(1, 2_000):
        clock.now += 0.01
        found = rates.per_second({"a": step})
    assert 99 < found["a"] < 101
    assert len(rates._seen) < 25


def test_a_counter_that_is_new_or_begins_anew_has_no_negative_rate() -> None:
    clock = Clock()
    rates = Rates(monotonic=clock)
    rates.per_second({"a": 500})
    clock.now += 2
    assert rates.per_second({"a": 3, "b": 7}) == {"a": 0.0, "b": 0.0}
