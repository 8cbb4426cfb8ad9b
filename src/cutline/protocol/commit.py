"""The permit without which no sink publishes."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPermit:
    """Says that the manifest of ``epoch`` is stored, and which batches the epoch publishes.

    Only the coordinator makes one, and only when it handles ``ManifestStored`` (or finds the manifest at start).
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

    def covers(self, batch: BatchId) -> bool:
        """Whether a staged batch belongs to this epoch."""
        return self.after_batch < batch <= self.through_batch
