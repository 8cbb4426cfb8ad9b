"""What all sinks share after ``open``: the context, the claim, the judgement of the ledger, the crash points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cutline.base.crashpoints import crashpoint
from cutline.errors import FencedError, InvariantViolation
from cutline.protocol.publish.sink_ledger import (
    RewindVerdict,
    SinkLedger,
    Verdict,
    fenced,
    judge,
    judge_rewind,
    refusal,
    rewind_refusal,
)

if TYPE_CHECKING:
    from cutline.model.ids import Epoch
    from cutline.model.staging import StagedBatch
    from cutline.ports.sinks import SinkContext
    from cutline.protocol.publish.commit import CommitPermit


class OpenedSink:
    """One instance of a sink. Before ``enter`` it is not open, and only ``enter`` is legal.

    ``target``: what errors call the target; ``where``: how to find it.
    """

    def __init__(self, target: str, **where: object) -> None:
        self._target = target
        self._where: Mapping[str, object] = where
        self._context: SinkContext | None = None
        #: Identifies this instance among those that open the same target; empty: it has claimed nothing.
        self.claim = ""

    def enter(self, context: SinkContext) -> None:
        self._context = context

    @property
    def context(self) -> SinkContext:
        if self._context is None:
            raise not_opened(**self._where)
        return self._context

    def require(self) -> None:
        """Raise InvariantViolation if the sink is not open."""
        _ = self.context

    def reach(self, point: str) -> None:
        """A place at which tests kill the process."""
        crashpoint(point, self.context.sink)

    def check_covered(self, permit: CommitPermit, staged: Sequence[StagedBatch]) -> None:
        """Refuse a permit for another sink, or a batch outside the permit: both are bugs of the caller."""
        context = self.context
        if (permit.flow, permit.sink) != (context.flow, context.sink):
            raise InvariantViolation(
                "commit with another sink's permit", flow=permit.flow, sink=permit.sink, expected=context.sink
            )
        for batch in staged:
            if not permit.covers(batch.batch):
                raise InvariantViolation(
                    "commit of a batch outside the permit", flow=permit.flow, epoch=permit.epoch, batch=batch.batch
                )

    def is_to_publish(self, ledger: SinkLedger, permit: CommitPermit, digest: str) -> bool:
        """False: the epoch is published already. Raises FencedError or SinkError if it must not be published."""
        match judge(ledger, permit, digest, claim=self.claim):
            case Verdict.PUBLISH:
                return True
            case Verdict.ALREADY:
                return False
            case verdict:
                raise refusal(verdict, ledger, permit, target=self._target, **self._where)

    def is_to_rewind(self, ledger: SinkLedger, epoch: Epoch, *, keep_more: str = "") -> bool:
        """False: nothing above the epoch is published. Raises FencedError or SinkError if it cannot be rewound.

        ``keep_more``: what to do so that the next rewind reaches further back.
        """
        match judge_rewind(ledger, epoch, claim=self.claim):
            case RewindVerdict.REWIND:
                return True
            case RewindVerdict.ALREADY:
                return False
            case verdict:
                raise rewind_refusal(verdict, ledger, epoch, keep_more=keep_more, **self._where)

    def check_expected(self, found: str, expected: str) -> None:
        """Raise FencedError if the newest claim is not the expected one: another start was faster."""
        if found != expected:
            context = self.context
            raise FencedError(
                f"another start has taken {self._target} over meanwhile",
                next_step="start the flow from one storage only; nothing has been published by this start",
                flow=context.flow,
                sink=context.sink,
                **self._where,
            )

    def check_held(self, ledger: SinkLedger, epoch: Epoch) -> None:
        """Raise FencedError if another instance has taken the sink over."""
        if not ledger.is_held_by(self.claim):
            raise fenced(ledger, epoch=epoch, **self._where)


def not_opened(**where: object) -> InvariantViolation:
    return InvariantViolation("the sink is used before it was opened", next_step="", **where)
