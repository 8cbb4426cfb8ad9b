"""A restore in figures: rows that are withdrawn, read again, and how long that takes."""

from __future__ import annotations

from typing import Any

import pytest

from cutline.model.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.protocol.preview import EpochWork, Rows, Work, preview
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.plan import Refusal

READ, SUM, TABLE = OperatorId("read"), OperatorId("sum"), SinkId("table")
REFUSED = Refusal(kind="recovery", what="no", next_step="")


def epoch(number: int, read: int | None, summed: int | None) -> EpochWork:
    return EpochWork(epoch=Epoch(number), rows={READ: read, SUM: summed})


def sink(published: int, **more: Any) -> SinkFacts:
    return SinkFacts(sink=TABLE, operator=SUM, published=Epoch(published), **more)


WORK = Work(
    epochs=[epoch(5, 100, 10), epoch(7, 200, 20), epoch(8, 300, 30)],
    since={READ: 50, SUM: 5},
    rates={READ: 100.0, SUM: 2.0},
)


def previewed(facts: SinkFacts, work: Work = WORK) -> Any:
    return preview(REFUSED, Epoch(4), sinks=[facts], operators=[READ, SUM], work=work)


def test_a_sink_withdraws_what_it_has_published_and_no_more() -> None:
    (one,) = previewed(sink(7)).sinks
    assert (one.fate, one.epochs, one.rows) == ("rewind", 2, Rows(30, 0))


def test_sources_read_everything_again_up_to_now() -> None:
    assert previewed(sink(7)).rows[READ] == Rows(650, 0)


def test_the_slowest_operator_decides_how_long_it_takes() -> None:
    estimate = previewed(sink(8)).estimate
    assert (estimate.operator, estimate.seconds, estimate.rows) == (SUM, 32.5, Rows(65, 0))


def test_what_was_not_measured_is_counted_as_such() -> None:
    work = Work(epochs=[epoch(5, None, 10), epoch(6, 7, None)], since={READ: None}, rates={})
    found = previewed(sink(6), work)
    assert found.sinks[0].rows == Rows(10, 1)
    assert found.rows == {READ: Rows(7, 2), SUM: Rows(10, 2)}
    assert found.estimate is None


@pytest.mark.parametrize(
    ("facts", "fate", "why"),
    [
        (sink(8, on_rollback="keep"), "keep", ""),
        (sink(8, on_rollback="fail"), "refuse", "must not be rewound"),
        (sink(8, can_rewind=False), "refuse", "cannot be rewound"),
        (sink(8, oldest_rewind=Epoch(5)), "refuse", "cannot be rewound further than epoch 5"),
        (sink(8, oldest_rewind=Epoch(4)), "rewind", ""),
        (sink(4, can_rewind=False), "nothing", ""),
        (sink(NO_EPOCH), "nothing", ""),
    ],
)
def test_what_happens_to_a_sink(facts: SinkFacts, fate: str, why: str) -> None:
    (one,) = previewed(facts).sinks
    assert (one.fate, one.why) == (fate, why)
