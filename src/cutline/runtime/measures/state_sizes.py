"""How much state the operators of a running flow keep."""

from __future__ import annotations

import time
from collections.abc import Callable

from cutline.model.ids import OperatorId
from cutline.ports.engine import Query

_ASK_SECONDS = 2.0


class StateSizes:
    """How much state each operator keeps. The query is asked once per batch, and not too often: it asks the JVM."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        #: Per operator: how many batches it had finished, when it was asked, and the answer.
        self._known: dict[OperatorId, tuple[int, float, int | None]] = {}

    def of(self, operator: OperatorId, batches: int, query: Query | None) -> int | None:
        asked_at, asked_s, known = self._known.get(operator, (-1, -_ASK_SECONDS, None))
        now = self._monotonic()
        # Spark tells of a batch a little after it has ended: whatever the answer is, it is asked again later.
        if query is None or (asked_at == batches and known is not None) or now - asked_s < _ASK_SECONDS:
            return known
        size_bytes = query.state_bytes()
        self._known[operator] = (batches, now, known if size_bytes is None else size_bytes)
        return self._known[operator][2]
