"""Which stored checkpoints belong to the present history, and what they say."""

from __future__ import annotations

from cutline.model.ids import BatchId, Epoch
from cutline.protocol.history.known_checkpoints import complete_epoch, of_present_history
from tests.support.recovery_facts import ORDERS, TOTALS, began, manifest


def test_a_checkpoint_with_new_names_counts_only_with_the_generation_that_restores_it() -> None:
    """It is written before that generation exists: killed in between, it belongs to nothing."""
    stored = [manifest(1), manifest(2), manifest(3, generation=2, evolved_from=2)]
    assert [one.epoch for one in of_present_history(stored, [began(1)])] == [1, 2]
    entered = [began(1), began(2, restored=3, path="local")]
    assert [one.epoch for one in of_present_history(stored, entered)][-1] == 3


def test_a_checkpoint_whose_barriers_stand_in_other_logs_is_of_another_history() -> None:
    """The logs have forked at 15: what the older process has written behind that is not read."""
    forked = began(2, lineage=((1, 0), (2, 15)))
    stored = [manifest(1), manifest(2)]
    assert [one.epoch for one in of_present_history(stored, [began(1), forked])] == [1]


def test_a_complete_epoch_says_after_which_batches_it_begins() -> None:
    known = complete_epoch(manifest(3))
    assert known.epoch == Epoch(3)
    assert known.after_batches == {ORDERS: BatchId(2), TOTALS: BatchId(2)}
