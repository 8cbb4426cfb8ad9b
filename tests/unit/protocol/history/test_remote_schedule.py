"""When content is sent ahead, and when a checkpoint is sealed."""

from __future__ import annotations

import math

from cutline.model.ids import Epoch, OperatorId
from cutline.protocol.history.remote_schedule import Cadence, EarlyUpload, Upload, UploadSchedule, epochs_to_upload

FAST, SLOW, NEVER = OperatorId("fast"), OperatorId("slow"), math.inf


def test_with_one_interval_for_all_nothing_is_sent_ahead() -> None:
    assert Cadence(5_000, {}).early_s(Epoch(9)) == NEVER
    same = Cadence(5_000, {FAST: 5_000, SLOW: 5_000})
    assert (same.seal_s, same.early_s(Epoch(9))) == (5.0, NEVER)


def test_the_slowest_decides_when_a_checkpoint_is_sealed() -> None:
    assert Cadence(5_000, {FAST: 1_000, SLOW: 60_000}).seal_s == 60.0
    assert Cadence(90_000, {FAST: 1_000, SLOW: 60_000}).seal_s == 90.0


def test_each_operator_is_due_at_its_own_interval_if_there_is_something_new() -> None:
    cadence = Cadence(2_000, {FAST: 1_000, SLOW: 60_000, OperatorId("as the flow"): 2_000})
    cadence.sealed(Epoch(1), 100.0)
    assert cadence.early_s(Epoch(1)) == NEVER
    assert cadence.early_s(Epoch(2)) == 101.0
    assert cadence.due(Epoch(2), 100.9) == frozenset()
    assert cadence.due(Epoch(2), 101.0) == {FAST}
    assert cadence.due(Epoch(2), 102.0) == {FAST, "as the flow"}, "who is slowest is never sent ahead"
    cadence.sent(frozenset({FAST}), Epoch(2), 101.0)
    assert cadence.early_s(Epoch(2)) == 102.0, "the other one"
    assert cadence.due(Epoch(3), 101.5) == frozenset()


def test_after_failures_it_waits_longer_and_longer_up_to_a_limit() -> None:
    cadence = Cadence(0, {FAST: 0, SLOW: 60_000})
    pauses = []
    for _ in range(8):
        cadence.failed(1_000.0)
        pauses.append(cadence.early_s(Epoch(1)) - 1_000.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    cadence.sent(frozenset({FAST}), Epoch(1), 1_030.0)
    cadence.failed(2_000.0)
    assert cadence.early_s(Epoch(2)) == 2_001.0


# ------------------------------------------------------------------------------------------------- what follows when


def schedule(flow_ms: int = 5_000, **own_ms: int) -> UploadSchedule:
    return UploadSchedule(Cadence(flow_ms, {OperatorId(name): ms for name, ms in own_ms.items()}))


def test_without_a_new_checkpoint_nothing_is_due() -> None:
    one = schedule()
    assert one.wait_s(0.0) is None and one.due(0.0) is None
    one.completed(Epoch(3))
    one.sealed(Epoch(3), 0.0)
    assert one.wait_s(1_000.0) is None and one.due(1_000.0) is None


def test_the_first_checkpoint_is_due_at_once_and_the_next_after_the_interval() -> None:
    one = schedule()
    one.completed(Epoch(3))
    assert one.wait_s(10.0) == 0.0 and one.due(10.0) == Upload(newest=Epoch(3))
    one.began(10.0)
    one.sealed(Epoch(3), 12.0)
    one.completed(Epoch(4))
    assert one.wait_s(12.0) == 3.0, "counted from the start of the one before"
    assert one.due(14.9) is None
    assert one.due(15.0) == Upload(newest=Epoch(4))


def test_an_upload_that_fails_is_tried_later_and_with_the_newest() -> None:
    one = schedule(flow_ms=0)
    one.completed(Epoch(3))
    pauses = []
    for _ in range(7):
        one.failed(100.0)
        pauses.append(one.wait_s(100.0))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    one.completed(Epoch(5))
    assert one.due(130.0) == Upload(newest=Epoch(5))
    one.sealed(Epoch(5), 131.0)
    one.completed(Epoch(6))
    assert one.due(131.0) == Upload(newest=Epoch(6)), "a success forgets the failures"


def test_a_skipped_checkpoint_is_not_tried_again_and_does_not_count_as_uploaded() -> None:
    one = schedule()
    one.completed(Epoch(3))
    one.skipped(Epoch(3))
    assert one.due(1_000.0) is None
    assert (one.uploaded, one.done_up_to) == (0, 3)


def test_between_two_seals_operators_with_shorter_intervals_are_uploaded_early() -> None:
    one = schedule(60_000, fast=1_000, slow=60_000)
    one.completed(Epoch(1))
    one.began(0.0)
    one.sealed(Epoch(1), 0.0)
    one.completed(Epoch(2))
    assert one.wait_s(0.0) == 1.0
    assert one.due(0.5) is None
    assert one.due(1.0) == EarlyUpload(newest=Epoch(2), operators=frozenset({FAST}))
    one.cadence.failed(1.0)
    assert one.due(1.5) is None, "not before its pause is over"
    assert one.due(2.0) == EarlyUpload(newest=Epoch(2), operators=frozenset({FAST}))
    assert one.due(60.0) == Upload(newest=Epoch(2)), "the seal comes first"


def test_the_newest_checkpoint_is_uploaded_and_before_it_those_not_published() -> None:
    kept = [Epoch(number) for number in (2, 3, 4, 5, 6)]

    def chosen(done_up_to: int, newest: int, published: int) -> list[Epoch]:
        return epochs_to_upload(kept, done_up_to=Epoch(done_up_to), newest=Epoch(newest), published=Epoch(published))

    assert chosen(0, 6, 6) == [6]
    assert chosen(0, 6, 3) == [4, 5, 6]
    assert chosen(4, 6, 3) == [5, 6], "what was done is not done again"
    assert chosen(0, 5, 9) == [5], "what completes later has its own turn"
    assert chosen(6, 9, 3) == []
