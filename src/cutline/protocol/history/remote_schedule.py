"""When each operator's content is uploaded, and when a checkpoint is sealed in the remote tier. Decides only.

The remote tier has a checkpoint as a whole or not at all, so it is sealed when the slowest operator is due. Content of
operators that are due more often is uploaded early, in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutline.base.backoff import Backoff
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId

#: Pauses after failures, of uploads and of early uploads.
UPLOAD_BACKOFF = Backoff(first_s=1.0, limit_s=30.0)


class Cadence:
    """Which operators are due. Times are seconds of a monotonic clock."""

    def __init__(self, flow_ms: int, own_ms: Mapping[OperatorId, int]) -> None:
        """``own_ms``: the interval of every operator, if any has its own; otherwise empty."""
        #: The least time between two seals.
        self.seal_s = max([flow_ms, *own_ms.values()]) / 1000
        self._every_s = {name: ms / 1000 for name, ms in own_ms.items() if ms / 1000 < self.seal_s}
        self._last_s = dict.fromkeys(self._every_s, -math.inf)
        #: The newest epoch whose content was uploaded, early or with its seal.
        self._sent: dict[OperatorId, Epoch] = dict.fromkeys(self._every_s, NO_EPOCH)
        #: After a failure no early upload begins before this time.
        self._not_before_s = -math.inf
        self._failures = 0

    def early_s(self, newest: Epoch) -> float:
        """When the next operator with newer content is due; infinite if there is none."""
        due_s = (self._last_s[name] + every for name, every in self._every_s.items() if self._sent[name] < newest)
        return max(min(due_s, default=math.inf), self._not_before_s)

    def due(self, newest: Epoch, now_s: float) -> frozenset[OperatorId]:
        return frozenset(
            name
            for name, every in self._every_s.items()
            if self._sent[name] < newest and self._last_s[name] + every <= now_s
        )

    def sent(self, operators: frozenset[OperatorId], epoch: Epoch, now_s: float) -> None:
        """Their content of this epoch is in the remote tier, or can never be uploaded."""
        self._failures = 0
        for name in operators:
            self._sent[name] = max(self._sent[name], epoch)
            self._last_s[name] = now_s

    def sealed(self, epoch: Epoch, now_s: float) -> None:
        self.sent(frozenset(self._every_s), epoch, now_s)

    def failed(self, now_s: float) -> None:
        """An early upload failed: retry later, with growing pauses while it keeps failing."""
        self._failures += 1
        self._not_before_s = now_s + UPLOAD_BACKOFF.pause_s(self._failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Upload and seal checkpoints up to this one."""

    newest: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUpload:
    """Upload these operators' content of the newest checkpoint without sealing it."""

    newest: Epoch
    operators: frozenset[OperatorId]


class UploadSchedule:
    """What one process has uploaded of a flow, and when the next upload is due."""

    def __init__(self, cadence: Cadence) -> None:
        self.cadence = cadence
        #: The newest complete checkpoint that it was told about.
        self.newest = NO_EPOCH
        #: The newest one that this process has sealed in the remote tier.
        self.uploaded = NO_EPOCH
        #: Sealed, or skipped for good: no upload up to here is retried.
        self.done_up_to = NO_EPOCH
        self._last_s = -math.inf
        self._failures = 0

    def completed(self, epoch: Epoch) -> None:
        self.newest = max(self.newest, epoch)

    def wait_s(self, now_s: float) -> float | None:
        """How long until something is due; None: until another checkpoint completes."""
        if self.newest <= self.done_up_to:
            return None
        return max(min(self._seal_s(), self.cadence.early_s(self.newest)) - now_s, 0.0)

    def due(self, now_s: float) -> Upload | EarlyUpload | None:
        if self.newest <= self.done_up_to:
            return None
        if self._seal_s() <= now_s:
            return Upload(newest=self.newest)
        operators = self.cadence.due(self.newest, now_s) if self.cadence.early_s(self.newest) <= now_s else None
        return EarlyUpload(newest=self.newest, operators=operators) if operators else None

    def _seal_s(self) -> float:
        pause_s = UPLOAD_BACKOFF.pause_s(self._failures) if self._failures else self.cadence.seal_s
        return self._last_s + pause_s

    def began(self, now_s: float) -> None:
        """The interval to the next upload counts from the start of this one."""
        self._last_s = now_s

    def sealed(self, epoch: Epoch, now_s: float) -> None:
        self.uploaded = max(self.uploaded, epoch)
        self.skipped(epoch)
        self._failures = 0
        self.cadence.sealed(epoch, now_s)

    def skipped(self, epoch: Epoch) -> None:
        """It can never be uploaded: damaged or collected here, or its number is taken in the remote tier."""
        self.done_up_to = max(self.done_up_to, epoch)

    def failed(self, now_s: float) -> None:
        """An upload failed; the newest checkpoint at that time is tried later."""
        self._failures += 1
        self._last_s = now_s


def epochs_to_upload(kept: Sequence[Epoch], *, done_up_to: Epoch, newest: Epoch, published: Epoch) -> list[Epoch]:
    """The newest of the checkpoints ``kept`` here, preceded by those that some sink has yet to publish.

    The newest one does not hold the staged output of the others. ``published``: every sink has published up to here.
    """
    candidates = [epoch for epoch in kept if done_up_to < epoch <= newest]
    return [epoch for epoch in candidates if epoch > published or epoch == candidates[-1]]
