"""Which logs a generation takes over, which it begins, and which nobody writes any more."""

from __future__ import annotations

from typing import Any

from cutline.model.ids import Generation, OperatorId
from cutline.protocol.history.log_histories import log_histories
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
