"""``--at``: what a person may write, and what is refused."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from zoneinfo import ZoneInfo

import pytest

from cutline.cli.history.moments import parse_moment, shown_moment
from cutline.errors import ConfigError

BERLIN = ZoneInfo("Europe/Berlin")
#: 2 in the afternoon in Berlin, in winter.
NOW = datetime.datetime(2026, 11, 18, 13, 0, tzinfo=datetime.UTC)


def parsed(text: str, now: datetime.datetime = NOW, zone: datetime.tzinfo = BERLIN) -> str:
    return parse_moment(text, now=now, zone=zone).isoformat()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("02:00", "2026-11-18T01:00:00+00:00"),
        ("2:00", "2026-11-18T01:00:00+00:00"),
        ("now", "2026-11-18T13:00:00+00:00"),
        ("12:16:05 UTC", "2026-11-18T12:16:05+00:00"),
        ("13:16:05 utc", "2026-11-17T13:16:05+00:00"),  # not yet today
        ("yesterday 12:00Z", "2026-11-17T12:00:00+00:00"),
        ("2026-11-16 02:00:00 UTC", "2026-11-16T02:00:00+00:00"),
        ("2026-11-16 02:00:00 UTC (also local time)", "2026-11-16T02:00:00+00:00"),
        ("02:00:30", "2026-11-18T01:00:30+00:00"),
        ("14:00", "2026-11-18T13:00:00+00:00"),
        ("14:01", "2026-11-17T13:01:00+00:00"),  # not yet today
        ("today 02:00", "2026-11-18T01:00:00+00:00"),
        ("yesterday 14:00", "2026-11-17T13:00:00+00:00"),
        ("Yesterday  23:59:59", "2026-11-17T22:59:59+00:00"),
        ("2026-11-16T02:00", "2026-11-16T01:00:00+00:00"),
        ("2026-11-16 02:00:00", "2026-11-16T01:00:00+00:00"),
        ("2026-07-16T02:00", "2026-07-16T00:00:00+00:00"),  # summer time
        ("2026-11-16T02:00Z", "2026-11-16T02:00:00+00:00"),
        ("2026-11-16T02:00+05:30", "2026-11-15T20:30:00+00:00"),
        ("2026-11-16", "2026-11-15T23:00:00+00:00"),
        ("10m ago", "2026-11-18T12:50:00+00:00"),
        ("10 min ago", "2026-11-18T12:50:00+00:00"),
        ("1h30m ago", "2026-11-18T11:30:00+00:00"),
        ("2 days ago", "2026-11-16T13:00:00+00:00"),
        ("90s ago", "2026-11-18T12:58:30+00:00"),
        (" 0s ago ", "2026-11-18T13:00:00+00:00"),
    ],
)
def test_what_a_person_may_write(text: str, moment: str) -> None:
    assert parsed(text) == moment


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "25:00", "02:60", "2", "0200", "tomorrow 02:00", "yesterday", "10x ago", "ago", "10m", "-5m ago"),
        *("2026-13-01", "2026-11-16T02:00 CET", "9" * 5000, "9999999999d ago", "²:00", "a\x1b[31mb"),
    ],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        parsed(text)


@pytest.mark.parametrize("text", ["today 14:01", "2026-11-18T14:00:01", "2026-11-18T13:00:01Z", "2027-01-01"])
def test_a_moment_in_the_future_is_refused_with_both_times(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is in the future; it is 2026-11-18 14:00:00 CET"):
        parsed(text)


def test_before_clocks_are_put_forward_a_time_of_day_is_that_of_yesterday() -> None:
    before = datetime.datetime(2026, 3, 29, 0, 30, tzinfo=datetime.UTC)  # half past one
    assert parsed("02:30", before) == "2026-03-28T01:30:00+00:00"
    assert parsed("01:00", before) == "2026-03-29T00:00:00+00:00"


def test_between_the_two_of_a_time_of_day_it_is_the_first() -> None:
    between = datetime.datetime(2026, 10, 25, 1, 10, tzinfo=datetime.UTC)  # ten past two, for the second time
    assert parsed("02:30", between) == "2026-10-25T00:30:00+00:00"


def test_a_local_time_that_clocks_skipped_is_refused() -> None:
    after = datetime.datetime(2026, 3, 29, 12, 0, tzinfo=datetime.UTC)
    for text in ("02:30", "today 02:30", "2026-03-29T02:30"):
        with pytest.raises(ConfigError, match="2026-03-29 02:30:00 did not exist here"):
            parsed(text, after)
    assert parsed("01:59:59", after) == "2026-03-29T00:59:59+00:00"
    assert parsed("03:00", after) == "2026-03-29T01:00:00+00:00"


def test_a_local_time_that_was_twice_is_refused_and_both_are_named() -> None:
    after = datetime.datetime(2026, 10, 25, 12, 0, tzinfo=datetime.UTC)
    with pytest.raises(ConfigError, match="was twice here") as refused:
        parsed("02:30", after)
    assert "2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00" in refused.value.next_step
    assert parsed("2026-10-25T02:30:00+02:00", after) == "2026-10-25T00:30:00+00:00"


def test_between_the_two_only_the_first_can_be_meant() -> None:
    between = datetime.datetime(2026, 10, 25, 1, 10, tzinfo=datetime.UTC)  # 02:10 for the second time
    assert parsed("02:30", between) == "2026-10-25T00:30:00+00:00"


def test_a_moment_is_shown_with_its_zone_locally_and_in_utc() -> None:
    assert shown_moment(NOW, BERLIN) == "2026-11-18 14:00:00 CET (2026-11-18 13:00:00 UTC)"
    nameless = datetime.timezone(datetime.timedelta(hours=-3))
    assert shown_moment(NOW, nameless) == "2026-11-18 10:00:00 UTC-03:00 (2026-11-18 13:00:00 UTC)"
    assert shown_moment(NOW, datetime.UTC) == "2026-11-18 13:00:00 UTC (also local time)"


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_new_york")
def test_without_a_zone_the_machines_own_one_counts() -> None:
    assert os.environ["TZ"] == "America/New_York"
    assert parse_moment("2026-07-01T02:00", now=NOW).isoformat() == "2026-07-01T06:00:00+00:00"
    with pytest.raises(ConfigError, match="did not exist here"):
        parse_moment("2026-03-08T02:30", now=NOW)
    with pytest.raises(ConfigError, match="was twice here"):
        parse_moment("2026-11-01T01:30", now=NOW)
