from __future__ import annotations

import itertools

import pytest

from cutline.model.ids import NO_BATCH, BatchId
from cutline.protocol.history.live_directory import mismatch


@pytest.mark.parametrize("may_be_behind", [False, True])
@pytest.mark.parametrize("complete", [-1, 0, 5])
@pytest.mark.parametrize("last_appended", [0, 1, 5])
def test_a_directory_without_anything_in_it_is_called_missing(
    last_appended: int, complete: int, may_be_behind: bool
) -> None:
    problem = mismatch(
        planned=NO_BATCH,
        committed=NO_BATCH,
        last_appended=BatchId(last_appended),
        complete=BatchId(min(complete, last_appended)),
        may_be_behind=may_be_behind,
    )
    assert problem == f"the directory is missing or empty, and the log ends with batch {last_appended}"


def test_no_text_shows_the_number_of_no_batch() -> None:
    numbers = [BatchId(number) for number in range(-1, 4)]
    for planned, committed, last_appended, complete in itertools.product(numbers, repeat=4):
        for may_be_behind in (False, True):
            problem = mismatch(
                planned=planned,
                committed=committed,
                last_appended=last_appended,
                complete=complete,
                may_be_behind=may_be_behind,
            )
            assert "-1" not in (problem or "")


def test_a_directory_that_is_behind_a_checkpoint_says_how_far_it_is() -> None:
    problem = mismatch(
        planned=BatchId(3), committed=BatchId(2), last_appended=BatchId(3), complete=BatchId(3), may_be_behind=False
    )
    assert problem == "Spark has committed batch 2, but batch 3 is part of a checkpoint"
