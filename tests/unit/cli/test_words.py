"""Numbers, sizes and spans of time in few characters, with the right plural."""

from __future__ import annotations

import pytest

from cutline.cli.words import counted, iso, local_short, number, rate, size, span


def test_a_slow_rate_is_not_zero() -> None:
    assert [rate(one) for one in (0.0, 0.4, 9.94, 12.6, 480.0)] == ["0", "0.4", "9.9", "13", "480"]


def test_one_is_no_plural() -> None:
    assert [counted(count, "checkpoint") for count in (0, 1, 2, 1000)] == [
        "0 checkpoints",
        "1 checkpoint",
        "2 checkpoints",
        "1,000 checkpoints",
    ]


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (5e15, "5000.0 TB")],
)
def test_sizes(size_bytes: float, shown: str) -> None:
    assert size(int(size_bytes)) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (9_999, "9,999"), (10_000, "10.0 k"), (999_950, "1.0 M"), (4e12, "4000.0 G")]
)
def test_numbers(count: float, shown: str) -> None:
    assert number(int(count)) == shown


@pytest.mark.parametrize(
    ("duration_ms", "shown"),
    [(-5, "0 s"), (119_999, "119 s"), (120_000, "2 min"), (7_199_999, "119 min"), (7_200_000, "2 h"), (2e8, "2 d")],
)
def test_spans(duration_ms: float, shown: str) -> None:
    assert span(int(duration_ms)) == shown


def test_moments() -> None:
    assert iso(1_794_983_593_843) == "2026-11-18T06:33:13.843Z"
    day_ms = 86_400_000
    assert len(local_short(day_ms, day_ms)) == len("12:34:56")
    assert len(local_short(day_ms, 5 * day_ms)) == len("01-02 12:34")
