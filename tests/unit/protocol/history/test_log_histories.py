"""Which logs a generation takes over, which it begins, and which nobody writes any more."""

from __future__ import annotations

from typing import Any

from cutline.model.ids import Generation, OperatorId
from cutline.protocol.history.log_histories import log_histories, names_in_last_run
from tests.support.recovery_facts import ORDERS, TOTALS, began, manifest

SUMS = OperatorId("sums")
SECOND = Generation(2)


def test_the_first_generation_leaves_nothing_behind() -> None:
    assert log_histories(
        [], generation=Generation(1), names=[ORDERS], begun_now=[], restored=None, existing=[ORDERS]
    ) == ({}, {})


def test_logs_that_continue_are_neither_begun_nor_left() -> None:
    found = log_histories(
        [began(1)], generation=SECOND, names=[ORDERS, TOTALS], begun_now=[], restored=None, existing=[ORDERS, TOTALS]
    )
    assert found == ({}, {})


def test_the_log_of_a_renamed_operator_is_left_as_the_checkpoint_saw_it() -> None:
    begun, left = log_histories(
        [began(1)],
        generation=SECOND,
        names=[ORDERS, SUMS],
        begun_now=[SUMS],
        restored=manifest(1),
        existing=[ORDERS, TOTALS],
    )
    assert begun == {SUMS: 2}
    assert left == {TOTALS: [(1, 0), (2, 11)]}


def test_a_log_that_came_after_the_checkpoint_is_of_no_history() -> None:
    late = began(1, inputs={ORDERS: (), TOTALS: (ORDERS,), SUMS: (ORDERS,)})
    _, left = log_histories(
        [late],
        generation=SECOND,
        names=[ORDERS, TOTALS],
        begun_now=[],
        restored=manifest(1),
        existing=[ORDERS, TOTALS, SUMS],
    )
    assert left == {SUMS: [(2, 0)]}


def test_what_was_left_before_stays_until_its_folder_is_gone() -> None:
    current = began(1, left={SUMS: [(Generation(1), 0)]}, begun={TOTALS: Generation(1)})
    arguments: dict[str, Any] = {"generation": SECOND, "names": [ORDERS, TOTALS], "begun_now": [], "restored": None}
    begun, left = log_histories([current], existing=[ORDERS, TOTALS, SUMS], **arguments)
    assert (begun, left) == ({TOTALS: 1}, {SUMS: [(1, 0)]})
    assert log_histories([current], existing=[ORDERS, TOTALS], **arguments)[1] == {}


def test_an_operator_that_is_renamed_now_ran_under_its_name_in_the_checkpoint() -> None:
    assert names_in_last_run(began(1), Generation(1), {ORDERS: SUMS, TOTALS: TOTALS}) == {
        ORDERS: ORDERS,
        TOTALS: TOTALS,
    }
    swapped = {ORDERS: TOTALS, TOTALS: ORDERS}
    assert names_in_last_run(began(1), Generation(1), swapped) == {ORDERS: ORDERS, TOTALS: TOTALS}


def test_an_operator_that_was_renamed_since_the_checkpoint_ran_under_its_new_name() -> None:
    renamed = began(2, inputs={ORDERS: (), SUMS: (ORDERS,)}, begun={SUMS: 2})
    assert names_in_last_run(renamed, Generation(1), {ORDERS: ORDERS, TOTALS: SUMS}) == {ORDERS: ORDERS, TOTALS: SUMS}
    swapped = began(2, begun={ORDERS: 2, TOTALS: 2})
    names = {ORDERS: TOTALS, TOTALS: ORDERS}
    assert names_in_last_run(swapped, Generation(1), names) == names
    assert names_in_last_run(swapped, SECOND, {ORDERS: ORDERS, TOTALS: TOTALS}) == {ORDERS: ORDERS, TOTALS: TOTALS}


def test_another_operator_with_its_name_is_not_taken_for_it() -> None:
    swapped = began(2, begun={ORDERS: 2, TOTALS: 2})
    assert names_in_last_run(swapped, Generation(1), {ORDERS: ORDERS, TOTALS: TOTALS}) == {}
    joined = began(2, inputs={ORDERS: (), TOTALS: (ORDERS,), SUMS: (ORDERS,)}, begun={SUMS: 2})
    assert names_in_last_run(joined, Generation(1), {ORDERS: ORDERS, TOTALS: SUMS}) == {ORDERS: ORDERS, TOTALS: TOTALS}
