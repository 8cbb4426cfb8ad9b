"""How values of options are written: durations, sizes, and how they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from cutline.config.values import (
    Choice,
    Count,
    Duration,
    Kind,
    Ladder,
    Place,
    Size,
    TextTable,
    parse_bytes,
    parse_duration_ms,
)
from cutline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("10s", 10_000), (" 2 m ", 120_000), ("2min", 120_000), ("1.5h", 5_400_000), ("1d", 86_400_000)],
)
def test_durations_have_a_unit(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(("seconds", "ms"), [(0, 0), (3, 3_000), (0.25, 250)])
def test_a_plain_number_is_seconds(seconds: float, ms: int) -> None:
    assert parse_duration_ms(seconds) == ms


@pytest.mark.parametrize(
    "wrong", ["", "10", "ten seconds", "-5s", "10 s s", "5x", -1, -0.5, float("nan"), float("inf"), ["10s"], True]
)
def test_a_duration_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="alignment_timeout"):
        parse_duration_ms(wrong, option="alignment_timeout")


@pytest.mark.parametrize(
    ("text", "size"), [("64MB", 64 << 20), ("512kb", 512 << 10), ("1 GB", 1 << 30), ("7", 7), ("9b", 9), (4096, 4096)]
)
def test_sizes_may_have_a_unit(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("wrong", ["", "MB", "-1", "1.5MB", "5 TB", 1.5, -3])
def test_a_size_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_batch_bytes"):
        parse_bytes(wrong, option="max_batch_bytes")


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        (Duration(), 10_000, "10s"),
        (Duration(), 50, "50ms"),
        (Duration(), 60_000, "60s"),
        (Duration(), 120_000, "2min"),
        (Duration(), 3_600_000, "1h"),
        (Duration(), 1_500, "1500ms"),
        (Duration(), 0, "0"),
        (Size(), 512 << 20, "512MB"),
        (Size(), 2 << 30, "2GB"),
        (Size(), 1_000, "1000"),
        (Count(), 3, "3"),
        (Choice(("auto", "aligned")), "auto", "auto"),
        (Place("/folder"), "/data", "/data"),
    ],
)
def test_a_value_is_shown_as_a_user_would_write_it(kind: Kind, value: Any, written: str) -> None:
    assert kind.show(value) == written
    assert kind.parse("option", 0 if written == "0" else written) == value


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (Duration(never_zero="nothing would ever end"), 0, ["option: nothing would ever end", "more than zero"]),
        (Size(1), 0, ["option: 0 is too small", "use 1 or more"]),
        (Count(2), "1", ["option: 1 is too small", "use 2 or more"]),
        (Count(2), "one", ["option: 'one' is not a whole number", "use 2 or more"]),
        (Choice(("auto", "aligned")), "sideways", ["option: 'sideways' is not known", "auto, aligned"]),
        (Place("s3://bucket", is_needed=True), "", ["option: '' is not a place", "s3://bucket"]),
        (Place("s3://bucket"), 7, ["option: 7 is not a place", "s3://bucket"]),
        (TextTable("options"), {"a": 1}, ["option: not a table of texts", "[options]"]),
    ],
)
def test_an_error_names_option_value_and_what_is_allowed(kind: Kind, wrong: Any, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.parse("option", wrong)
    assert all(text in str(caught.value) for text in named)


def test_a_ladder_is_a_list_of_ages_and_distances() -> None:
    minutes, hours = 60_000, 3_600_000
    expected = ((10 * minutes, 0), (2 * hours, minutes), (48 * hours, hours))
    assert Ladder().parse("retain", "10min, 2h/1min, 2d/1h") == expected
    assert Ladder().parse("retain", ["10min", "2h/60s", "48h/1h"]) == expected
    assert Ladder().parse("retain", "") == ()
    assert Ladder().parse("retain", Ladder().show(expected)) == expected


@pytest.mark.parametrize("wrong", ["2h/1min, 10min", "10min, 20min", "1min/2min", "1h/0", "often", 3, "1h//2", [1]])
def test_a_ladder_that_keeps_nothing_or_does_not_rise_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="retain"):
        Ladder().parse("retain", wrong)
