from __future__ import annotations

from cutline.model.ids import OperatorId
from cutline.runtime.measures.state_sizes import StateSizes
from cutline.testing.twins.engine import IdleQuery

TOTALS = OperatorId("totals")


class Keeping(IdleQuery):
    """A query whose state grows whenever it is asked."""

    def __init__(self, *answers: int | None) -> None:
        super().__init__()
        self.answers = list(answers)

    def state_bytes(self) -> int | None:
        return self.answers.pop(0)


def test_a_query_is_asked_once_per_batch_and_not_too_often() -> None:
    now = [100.0]
    sizes = StateSizes(monotonic=lambda: now[0])
    query = Keeping(None, 10, 20)
    assert sizes.of(TOTALS, 0, None) is None
    assert sizes.of(TOTALS, 1, query) is None  # Spark has not told of the batch yet
    assert sizes.of(TOTALS, 1, query) is None and len(query.answers) == 2
    now[0] += 3
    assert sizes.of(TOTALS, 1, query) == 10
    now[0] += 3
    assert sizes.of(TOTALS, 1, query) == 10 and query.answers == [20]  # no batch since
    assert sizes.of(TOTALS, 2, query) == 20


def test_while_a_query_is_restarted_the_last_answer_counts() -> None:
    now = [100.0]
    sizes = StateSizes(monotonic=lambda: now[0])
    assert sizes.of(TOTALS, 1, Keeping(10)) == 10
    now[0] += 3
    assert sizes.of(TOTALS, 2, None) == 10
    assert sizes.of(TOTALS, 2, Keeping(None)) == 10
