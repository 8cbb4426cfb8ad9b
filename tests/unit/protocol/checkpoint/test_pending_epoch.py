"""The tally of one epoch: who has acknowledged, and which state it is in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.errors import InvariantViolation
from cutline.model.cut import BarrierTerms
from cutline.model.ids import Epoch, Generation, OperatorId, Subtask
from cutline.protocol.checkpoint.pending_epoch import MOVES, AckOutcome, EpochState, PendingEpoch
from tests.support.driven_coordinator import operator_ack


def collecting(**subtasks: int) -> PendingEpoch:
    """An epoch of generation 2 whose barriers are under way."""
    return PendingEpoch(
        epoch=Epoch(7),
        generations={OperatorId(name): Generation(2) for name in subtasks},
        terms=BarrierTerms(alignment_limit_ms=None),
        started_ms=0,
        awaiting={OperatorId(name): {Subtask(i) for i in range(count)} for name, count in subtasks.items()},
        state=EpochState.COLLECTING,
    )


def test_an_epoch_is_acknowledged_only_when_every_subtask_of_every_operator_has() -> None:
    epoch = collecting(a=2, b=1)
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[0, 1], generation=2)) is AckOutcome.ACCEPTED
    assert not epoch.is_acknowledged_by_all()
    assert epoch.acknowledge(operator_ack("b", 7, generation=2)) is AckOutcome.ACCEPTED
    assert epoch.is_acknowledged_by_all()


def test_subtasks_are_counted_by_who_not_by_how_many() -> None:
    epoch = collecting(a=3)
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[0], generation=2)) is AckOutcome.ACCEPTED
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[0], generation=2)) is AckOutcome.DUPLICATE
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[0], generation=2)) is AckOutcome.DUPLICATE
    assert epoch.missing() == {"a": [1, 2]}


def test_an_acknowledgement_that_says_something_new_is_accepted() -> None:
    epoch = collecting(a=3)
    epoch.acknowledge(operator_ack("a", 7, subtasks=[0], generation=2))
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[0, 2], generation=2)) is AckOutcome.ACCEPTED
    assert epoch.missing() == {"a": [1]}


def test_an_operator_that_acknowledges_in_parts_is_kept_whole() -> None:
    """The manifest counts files and bytes from here: no subtask may fall out."""
    epoch = collecting(a=3)
    epoch.acknowledge(operator_ack("a", 7, subtasks=[0, 1], generation=2))
    epoch.acknowledge(operator_ack("a", 7, subtasks=[1, 2], generation=2))
    assert [subtask.subtask for subtask in epoch.merged_acks()[OperatorId("a")].subtasks] == [0, 1, 2]


def test_an_acknowledgement_of_another_generation_is_stale() -> None:
    epoch = collecting(a=1)
    assert epoch.acknowledge(operator_ack("a", 7, generation=1)) is AckOutcome.STALE
    assert epoch.acknowledge(operator_ack("a", 7, generation=3)) is AckOutcome.STALE
    assert not epoch.merged_acks()


def test_an_acknowledgement_of_an_unknown_operator_is_unknown() -> None:
    assert collecting(a=1).acknowledge(operator_ack("x", 7, generation=2)) is AckOutcome.UNKNOWN


def test_an_acknowledgement_of_an_unknown_subtask_counts_for_nothing() -> None:
    epoch = collecting(a=1)
    assert epoch.acknowledge(operator_ack("a", 7, subtasks=[5], generation=2)) is not AckOutcome.ACCEPTED
    assert not epoch.is_acknowledged_by_all()


@pytest.mark.parametrize("state", [state for state in EpochState if state is not EpochState.COLLECTING])
def test_nothing_is_accepted_unless_barriers_are_under_way(state: EpochState) -> None:
    epoch = collecting(a=1)
    epoch.state = state
    assert epoch.acknowledge(operator_ack("a", 7, generation=2)) is AckOutcome.UNKNOWN
    assert not epoch.merged_acks()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(EpochState, EpochState)))
def test_an_epoch_makes_only_the_moves_in_the_table(before: EpochState, after: EpochState) -> None:
    epoch = collecting(a=1)
    epoch.state = before
    if after in MOVES[before]:
        epoch.move(after)
        assert epoch.state is after
    else:
        with pytest.raises(InvariantViolation):
            epoch.move(after)
        assert epoch.state is before


def test_what_is_over_stays_over() -> None:
    assert MOVES[EpochState.COMPLETED] == MOVES[EpochState.ABORTED] == frozenset()


def test_an_abort_under_way_ends_in_the_abort_or_in_a_manifest_that_was_there_before_it() -> None:
    """It never goes back to collecting: nothing that is said after the decision counts."""
    assert MOVES[EpochState.ABORTING] == {EpochState.ABORTED, EpochState.COMPLETED}


def test_each_operator_has_a_generation_of_its_own() -> None:
    epoch = collecting(a=1, b=1)
    epoch.generations = {OperatorId("a"): Generation(2), OperatorId("b"): Generation(5)}
    assert epoch.acknowledge(operator_ack("b", 7, generation=2)) is AckOutcome.STALE
    assert epoch.acknowledge(operator_ack("b", 7, generation=5)) is AckOutcome.ACCEPTED
    assert epoch.missing() == {"a": [0]}


def test_parts_of_two_snapshots_are_never_put_together() -> None:
    """The manifest names one record per operator; a subtask's files in another one would be lost."""
    epoch = collecting(a=2)
    epoch.acknowledge(operator_ack("a", 7, subtasks=[0], generation=2, record="first"))
    second = operator_ack("a", 7, subtasks=[0, 1], generation=2, record="second")
    assert epoch.acknowledge(second) is AckOutcome.DUPLICATE
    assert epoch.missing() == {"a": [1]}
    assert epoch.merged_acks()[OperatorId("a")].record_sha256 == "first"


parts = st.lists(
    st.tuples(st.sampled_from(["a", "b", "x"]), st.sets(st.integers(0, 4)), st.integers(1, 2)), max_size=20
)


@given(parts)
def test_the_tally_agrees_with_counting_everything_anew(parts: list[tuple[str, set[int], int]]) -> None:
    epoch, heard = collecting(a=4, b=2), {"a": set[int](), "b": set[int]()}
    whole = {"a": {0, 1, 2, 3}, "b": {0, 1}}
    for operator, subtasks, generation in parts:
        outcome = epoch.acknowledge(operator_ack(operator, 7, subtasks=sorted(subtasks), generation=generation))
        fresh = (subtasks & whole.get(operator, set())) - heard.get(operator, set()) if generation == 2 else set()
        assert (outcome is AckOutcome.ACCEPTED) == bool(fresh)
        if fresh:
            heard[operator] |= fresh
        assert epoch.missing() == {
            name: sorted(whole[name] - heard[name]) for name in whole if whole[name] - heard[name]
        }
        assert epoch.is_acknowledged_by_all() == (heard == whole)
        merged = {name: sorted(one.subtask for one in ack.subtasks) for name, ack in epoch.merged_acks().items()}
        assert merged == {name: sorted(subtasks) for name, subtasks in heard.items() if subtasks}, "each once"
