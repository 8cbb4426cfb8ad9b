"""The permit: no sink publishes without one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutline.model.ids import NO_BATCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPermit:
    """States that the manifest of ``epoch`` is stored, and which batches the epoch publishes.

    Only the coordinator makes permits, when it handles ``ManifestStored`` or finds the manifest at a start.
    """

    flow: FlowName
    operator: OperatorId
    sink: SinkId
    epoch: Epoch
    generation: Generation
    #: The complete epoch before this one in the same history; NO_EPOCH if there is none.
    previous_epoch: Epoch
    #: The epoch publishes the staged batches in (after_batch, through_batch].
    after_batch: BatchId
    through_batch: BatchId
    #: The epochs that the flow may be restored to from now on: a sink keeps what a rewind to them needs. None: not
    #: known, so it keeps what it has. It says nothing about what is published: a repeated permit may have others.
    rewind_points: tuple[Epoch, ...] | None = field(default=None, compare=False)

    def covers(self, batch: BatchId) -> bool:
        """Whether a staged batch belongs to this epoch."""
        return self.after_batch < batch <= self.through_batch


class StagedOutput:
    """Which staged batches of an operator an epoch's record must hold: all since the newest complete epoch.

    The outcome of the epochs in between is open, so each record binds their batches again; the permit decides which
    epoch publishes which batch.
    """

    def __init__(self, completed_batch: BatchId = NO_BATCH) -> None:
        """``completed_batch``: the operator's cut batch in the newest complete epoch."""
        self._completed_batch = completed_batch
        self._cuts: dict[Epoch, BatchId] = {}

    def cut(self, epoch: Epoch, batch: BatchId) -> None:
        self._cuts[epoch] = batch

    def closed(self, epoch: Epoch, *, completed: bool) -> None:
        """A complete epoch publishes the batches it holds; later epochs need not hold them."""
        batch = self._cuts.pop(epoch, None)
        if completed and batch is not None:
            self._completed_batch = max(self._completed_batch, batch)

    def binds(self, batch: BatchId, cut_batch: BatchId) -> bool:
        """Whether an epoch that is cut at ``cut_batch`` must hold the staged output of ``batch``."""
        return self._completed_batch < batch <= cut_batch
