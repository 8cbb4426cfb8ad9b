"""When whose content is sent to the remote tier, and when a checkpoint is sealed there. Decides only; told the time.

A checkpoint is there as a whole or not at all, so it is sealed when the slowest operator's time has come. Operators
that are due more often have their content sent ahead in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cutline.model.ids import NO_EPOCH, Epoch, OperatorId

_RETRY_SECONDS, _RETRY_LIMIT_SECONDS = 1.0, 30.0


class Cadence:
    """Times are seconds of a clock that never goes back."""

    def __init__(self, flow_ms: int, own_ms: Mapping[OperatorId, int]) -> None:
        """``own_ms``: of every operator, if any has an interval for itself; otherwise of none."""
        #: At least so long between two seals.
        self.seal_s = max([flow_ms, *own_ms.values()]) / 1000
        self._every_s = {name: ms / 1000 for name, ms in own_ms.items() if ms / 1000 < self.seal_s}
        self._last_s = dict.fromkeys(self._every_s, -math.inf)
        #: The newest epoch whose content was sent, ahead or with its seal.
        self._sent: dict[OperatorId, Epoch] = dict.fromkeys(self._every_s, NO_EPOCH)
        #: After a failure nothing is sent ahead before this.
        self._not_before_s, self._pause_s = -math.inf, 0.0

    def ahead_s(self, newest: Epoch) -> float:
        """When the next operator is due, for which there is something newer; infinite if there is none."""
        due_s = (self._last_s[name] + every for name, every in self._every_s.items() if self._sent[name] < newest)
        return max(min(due_s, default=math.inf), self._not_before_s)

    def due(self, newest: Epoch, now_s: float) -> frozenset[OperatorId]:
        return frozenset(
            name
            for name, every in self._every_s.items()
            if self._sent[name] < newest and self._last_s[name] + every <= now_s
        )

    def sent(self, operators: frozenset[OperatorId], epoch: Epoch, now_s: float) -> None:
        """Their content of this epoch is there, or cannot be sent at all."""
        self._pause_s = 0.0
        for name in operators:
            self._sent[name] = max(self._sent[name], epoch)
            self._last_s[name] = now_s

    def sealed(self, epoch: Epoch, now_s: float) -> None:
        self.sent(frozenset(self._every_s), epoch, now_s)

    def failed(self, now_s: float) -> None:
        """Not now: later, and later still if it goes on failing."""
        self._pause_s = min(max(self._pause_s * 2, _RETRY_SECONDS), _RETRY_LIMIT_SECONDS)
        self._not_before_s = now_s + self._pause_s
