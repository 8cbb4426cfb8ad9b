"""How ``cutline checkpoints`` names epochs."""

from __future__ import annotations

import pytest

from cutline.cli.history.checkpoints import _ranges


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([4], "4"),
        ([1, 2, 3], "1 to 3"),
        ([1, 2, 5, 8, 9], "1 to 2, 5, 8 to 9"),
        ([*range(0, 40, 2)], "0, 2, 4, 6, 8, 10, 12, … 38 (20 in all)"),
    ],
)
def test_only_numbers_that_follow_one_another_are_a_range(numbers: list[int], shown: str) -> None:
    assert _ranges(numbers) == shown
