"""Health: consecutive failures are counted, and only changes are reported."""

from __future__ import annotations

from cutline.protocol.checkpoint.health import Health
from cutline.protocol.messages.coordinator import ReportHealth


def test_tolerated_failures_are_not_reported() -> None:
    health = Health(2)
    assert health.failed("one") == health.failed("two") == []
    assert health.is_healthy and health.failures_in_a_row == 2


def test_one_failure_too_many_is_reported_once() -> None:
    health = Health(0)
    assert health.failed("disk") == [ReportHealth(is_healthy=False, failures=1, reason="disk")]
    assert health.failed("disk") == []
    assert not health.is_healthy and health.failures_in_a_row == 2


def test_a_success_heals_and_starts_the_count_anew() -> None:
    health = Health(0)
    health.failed("disk")
    assert health.succeeded() == [ReportHealth(is_healthy=True, failures=0)]
    assert health.succeeded() == []
    assert health.failures_in_a_row == 0


def test_without_a_limit_any_number_is_tolerated() -> None:
    health = Health(None)
    assert [report for _ in range(50) for report in health.failed("again")] == []
