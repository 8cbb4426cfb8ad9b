"""When restarting a failed query is futile."""

from __future__ import annotations

from cutline.protocol.restarts import QueryRestarts


def restarts(limit: int = 2) -> QueryRestarts:
    return QueryRestarts(limit=limit, backoff_ms=500)


def test_a_query_is_restarted_with_doubling_pauses_up_to_the_limit() -> None:
    counted = restarts(5)
    assert [counted.failed(0, is_outage=False) for _ in range(6)] == [500, 1000, 2000, 4000, 8000, None]


def test_a_finished_batch_is_progress() -> None:
    counted = restarts()
    for finished in range(1, 20):
        assert counted.failed(finished, is_outage=False) == 500
    assert counted.failed(19, is_outage=False) == 1000
    assert counted.failed(19, is_outage=False) is None


def test_a_failure_for_lack_of_a_resource_is_retried_without_a_limit_and_does_not_count() -> None:
    counted = restarts()
    pauses = [counted.failed(3, is_outage=True) for _ in range(8)]
    assert pauses == [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]
    assert counted.failures == 0
    assert [counted.failed(3, is_outage=False) for _ in range(3)] == [500, 1000, None]


def test_an_outage_ends_with_the_next_finished_batch() -> None:
    counted = restarts()
    counted.failed(3, is_outage=True)
    assert not counted.has_ended_outage(3)
    assert counted.has_ended_outage(4)
    assert not counted.has_ended_outage(4), "it is said once"


def test_failures_are_over_when_a_batch_is_finished() -> None:
    counted = restarts()
    assert counted.failures_since(0) == 0
    counted.failed(3, is_outage=False)
    counted.failed(3, is_outage=False)
    assert (counted.failures_since(3), counted.failures_since(4)) == (2, 0)
