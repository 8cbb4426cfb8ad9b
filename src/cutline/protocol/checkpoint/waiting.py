"""How long a pending epoch waits for its operators: when they are asked again, and when the epoch is given up."""

from __future__ import annotations

from cutline.model.ids import Subtask
from cutline.protocol.checkpoint.pending_epoch import EpochState, PendingEpoch
from cutline.protocol.checkpoint.setup import Settings

_SUBTASKS_SHOWN = 8


def can_expire(epoch: PendingEpoch) -> bool:
    """Whether it may still be given up. A completing one may not: its manifest may be stored at this moment."""
    return epoch.state in (EpochState.RECORDING, EpochState.COLLECTING)


class Waiting:
    """The limits of one flow, applied to its pending epochs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def asks(self, epoch: PendingEpoch) -> bool:
        """Whether operators that have not acknowledged will be asked again."""
        is_waited_for = epoch.state is EpochState.COLLECTING and not epoch.is_acknowledged_by_all()
        return is_waited_for and epoch.asked < self._settings.ask_again_limit

    def begin(self, epoch: PendingEpoch, now_ms: int) -> None:
        epoch.ask_at_ms = now_ms + self._settings.ask_again_ms

    def asked(self, epoch: PendingEpoch, now_ms: int) -> None:
        epoch.asked += 1
        epoch.ask_at_ms = now_ms + self._settings.ask_again_ms * 2**epoch.asked

    def late_operators(self, epoch: PendingEpoch, now_ms: int) -> str:
        """The late operators and subtasks, because of which the epoch is given up; empty when none is late."""
        waited = now_ms - epoch.started_ms
        limits = self._settings.operator_timeouts_ms
        if waited < self._limit_ms(epoch):
            return ""
        late = {
            operator: subtasks
            for operator, subtasks in epoch.missing().items()
            if waited >= min(self._settings.timeout_ms, limits.get(operator, self._settings.timeout_ms))
        }
        return "; ".join(f"{operator} subtasks {_in_short(subtasks)}" for operator, subtasks in late.items())

    def deadlines_ms(self, epoch: PendingEpoch) -> list[int]:
        deadlines = []
        # An epoch that all have acknowledged waits for the manifest before it; time does not change that.
        if can_expire(epoch) and not epoch.is_acknowledged_by_all():
            deadlines.append(epoch.started_ms + self._limit_ms(epoch))
        if self.asks(epoch):
            deadlines.append(epoch.ask_at_ms)
        return deadlines

    def _limit_ms(self, epoch: PendingEpoch) -> int:
        limits = self._settings.operator_timeouts_ms
        missing = [limit_ms for operator, limit_ms in limits.items() if operator in epoch.incomplete]
        return min([self._settings.timeout_ms, *missing])


def _in_short(subtasks: list[Subtask]) -> str:
    """At most a few: there may be thousands."""
    shown = ", ".join(str(subtask) for subtask in subtasks[:_SUBTASKS_SHOWN])
    return f"[{shown}]" if len(subtasks) <= _SUBTASKS_SHOWN else f"[{shown}, … {len(subtasks)} in all]"
