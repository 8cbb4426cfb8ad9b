"""Moments as text, computed."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.history import utc_text


@given(st.integers(min_value=0, max_value=253_402_300_799_999))
def test_a_moment_reads_as_the_calendar_says(moment_ms: int) -> None:
    expected = datetime.fromtimestamp(moment_ms // 1000, UTC)
    assert utc_text(moment_ms) == f"{expected:%Y-%m-%d %H:%M:%S} UTC".rjust(23, "0")
