"""Which staged batches an epoch's record must hold, and which of them its permit publishes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.model.ids import NO_BATCH, BatchId, Epoch
from cutline.protocol.publish.commit import StagedOutput


def bound(staged: StagedOutput, cut_batch: int) -> list[int]:
    return [batch for batch in range(20) if staged.binds(BatchId(batch), BatchId(cut_batch))]


def test_the_first_epoch_binds_everything_up_to_its_cut() -> None:
    assert bound(StagedOutput(), 2) == [0, 1, 2]


def test_a_complete_epoch_takes_its_batches_with_it() -> None:
    staged = StagedOutput()
    staged.cut(Epoch(1), BatchId(2))
    staged.closed(Epoch(1), completed=True)
    assert bound(staged, 4) == [3, 4]


def test_an_aborted_epoch_leaves_its_batches_to_the_next() -> None:
    staged = StagedOutput()
    staged.cut(Epoch(1), BatchId(2))
    staged.closed(Epoch(1), completed=False)
    assert bound(staged, 4) == [0, 1, 2, 3, 4]


def test_while_the_outcome_is_open_the_batches_are_bound_again() -> None:
    staged = StagedOutput()
    staged.cut(Epoch(1), BatchId(2))
    assert bound(staged, 4) == [0, 1, 2, 3, 4]


def test_an_epoch_that_completes_late_gives_nothing_back() -> None:
    staged = StagedOutput()
    staged.cut(Epoch(1), BatchId(2))
    staged.cut(Epoch(2), BatchId(5))
    staged.closed(Epoch(2), completed=True)
    staged.closed(Epoch(1), completed=True)
    assert bound(staged, 7) == [6, 7]


def test_an_epoch_that_this_operator_never_cut_for_changes_nothing() -> None:
    staged = StagedOutput(BatchId(1))
    staged.closed(Epoch(9), completed=True)
    assert bound(staged, 3) == [2, 3]


def test_it_goes_on_after_the_newest_complete_epoch() -> None:
    assert bound(StagedOutput(BatchId(3)), 5) == [4, 5]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["cut", "complete", "abort"]), st.integers(0, 9))))
def test_every_batch_is_published_once_whatever_becomes_of_the_epochs(steps: list[tuple[int, str, int]]) -> None:
    """Epochs are cut in order, several at a time, and end in any order; completed ones ascend."""
    staged, batch, epoch = StagedOutput(), 0, 0
    open_cuts: dict[int, int] = {}
    held: dict[int, list[int]] = {}
    published: list[int] = []
    through, newest = int(NO_BATCH), 0
    for more_batches, what, choice in steps:
        batch += more_batches
        if what == "cut":
            epoch += 1
            open_cuts[epoch] = batch
            held[epoch] = [one for one in range(batch + 1) if staged.binds(BatchId(one), BatchId(batch))]
            staged.cut(Epoch(epoch), BatchId(batch))
        elif open_cuts:
            ends = sorted(open_cuts)[choice % len(open_cuts)]
            cut_batch = open_cuts.pop(ends)
            completed = what == "complete" and ends > newest
            staged.closed(Epoch(ends), completed=completed)
            if completed:
                newest = ends
                permitted = list(range(through + 1, cut_batch + 1))
                assert set(permitted) <= set(held[ends]), "what is published was bound to the epoch"
                published += permitted
                through = cut_batch
    assert published == list(range(through + 1))
