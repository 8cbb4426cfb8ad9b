"""When content is sent ahead, and when a checkpoint is sealed."""

from __future__ import annotations

import math

from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.history.remote_schedule import Cadence

FAST, SLOW, NEVER = OperatorId("fast"), OperatorId("slow"), math.inf


def test_with_one_interval_for_all_nothing_is_sent_ahead() -> None:
    assert Cadence(5_000, {}).ahead_s(Epoch(9)) == NEVER
    same = Cadence(5_000, {FAST: 5_000, SLOW: 5_000})
    assert (same.seal_s, same.ahead_s(Epoch(9))) == (5.0, NEVER)


def test_the_slowest_decides_when_a_checkpoint_is_sealed() -> None:
    assert Cadence(5_000, {FAST: 1_000, SLOW: 60_000}).seal_s == 60.0
    assert Cadence(90_000, {FAST: 1_000, SLOW: 60_000}).seal_s == 90.0


def test_each_operator_is_due_at_its_own_interval_if_there_is_something_new() -> None:
    cadence = Cadence(2_000, {FAST: 1_000, SLOW: 60_000, OperatorId("as the flow"): 2_000})
    cadence.sealed(Epoch(1), 100.0)
    assert cadence.ahead_s(Epoch(1)) == NEVER
    assert cadence.ahead_s(Epoch(2)) == 101.0
    assert cadence.due(Epoch(2), 100.9) == frozenset()
    assert cadence.due(Epoch(2), 101.0) == {FAST}
    assert cadence.due(Epoch(2), 102.0) == {FAST, "as the flow"}, "who is slowest is never sent ahead"
    cadence.sent(frozenset({FAST}), Epoch(2), 101.0)
    assert cadence.ahead_s(Epoch(2)) == 102.0, "the other one"
    assert cadence.due(Epoch(3), 101.5) == frozenset()


def test_after_failures_it_waits_longer_and_longer_up_to_a_limit() -> None:
    cadence = Cadence(0, {FAST: 0, SLOW: 60_000})
    pauses = []
    for _ in range(8):
        cadence.failed(1_000.0)
        pauses.append(cadence.ahead_s(Epoch(1)) - 1_000.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    cadence.sent(frozenset({FAST}), Epoch(1), 1_030.0)
    cadence.failed(2_000.0)
    assert cadence.ahead_s(Epoch(2)) == 2_001.0
