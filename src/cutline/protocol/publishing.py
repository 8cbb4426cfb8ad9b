"""Which sink publishes which epoch next: after the manifest, in order, each once, one at a time per sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutline.errors import InvariantViolation
from cutline.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.protocol.commit import CommitPermit
from cutline.protocol.messages import CommitSink


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteEpoch:
    """A checkpoint whose manifest is stored."""

    epoch: Epoch
    generation: Generation
    previous_epoch: Epoch
    #: Per operator: the batch after which its snapshot lies.
    batches: Mapping[OperatorId, BatchId]


@dataclass(slots=True, kw_only=True)
class _SinkState:
    operator: OperatorId
    published: Epoch
    #: The epoch it is publishing now.
    committing: Epoch | None = None
    attempt: int = 0
    retry_at_ms: int | None = None


class Publisher:
    """Follows each sink through the complete epochs."""

    def __init__(
        self,
        flow: FlowName,
        sinks: Mapping[SinkId, OperatorId],
        published: Mapping[SinkId, Epoch],
        *,
        retry_ms: int,
        retry_limit_ms: int,
    ) -> None:
        self._flow = flow
        self._sinks = {
            sink: _SinkState(operator=operator, published=published.get(sink, NO_EPOCH))
            for sink, operator in sinks.items()
        }
        self._retry_ms = retry_ms
        self._retry_limit_ms = retry_limit_ms
        self._newest = NO_EPOCH

    def published(self, sink: SinkId) -> Epoch:
        return self._sinks[sink].published

    def published_everywhere(self, complete: Sequence[CompleteEpoch]) -> Epoch:
        """The newest epoch that every sink has published; without sinks, the newest complete one."""
        newest = complete[-1].epoch if complete else NO_EPOCH
        return min((state.published for state in self._sinks.values()), default=newest)

    def is_idle(self) -> bool:
        return all(state.published >= self._newest for state in self._sinks.values())

    def deadlines_ms(self) -> list[int]:
        return [state.retry_at_ms for state in self._sinks.values() if state.retry_at_ms is not None]

    def committed(self, sink: SinkId, epoch: Epoch) -> None:
        """A sink says that the epoch is published. Said before: nothing changes."""
        state = self._sinks[sink]
        state.published = max(state.published, epoch)
        if state.committing == epoch:
            state.committing, state.attempt, state.retry_at_ms = None, 0, None

    def failed(self, sink: SinkId, epoch: Epoch, now_ms: int) -> None:
        """Try again later, with doubling pauses."""
        state = self._sinks[sink]
        if state.committing == epoch:
            state.committing = None
            state.retry_at_ms = now_ms + min(self._retry_ms * 2**state.attempt, self._retry_limit_ms)
            state.attempt += 1

    def due(self, complete: Sequence[CompleteEpoch], now_ms: int) -> list[CommitSink]:
        """The commits to begin now."""
        self._newest = complete[-1].epoch if complete else NO_EPOCH
        actions: list[CommitSink] = []
        for sink, state in self._sinks.items():
            if state.committing is not None or (state.retry_at_ms is not None and now_ms < state.retry_at_ms):
                continue
            following = next((index for index, item in enumerate(complete) if item.epoch > state.published), None)
            if following is None:
                state.attempt, state.retry_at_ms = 0, None
                continue
            epoch = complete[following]
            before = complete[following - 1] if following else None
            # A beginning that is gone was let go of when every sink had published it; in between nothing ever goes.
            if before is not None and before.epoch < epoch.previous_epoch:
                raise InvariantViolation(
                    f"epoch {epoch.epoch} follows epoch {epoch.previous_epoch}, which is gone",
                    sink=sink,
                    published=state.published,
                )
            state.committing, state.retry_at_ms = epoch.epoch, None
            actions.append(CommitSink(permit=self._permit(sink, state, epoch, before), attempt=state.attempt))
        return actions

    def _permit(
        self, sink: SinkId, state: _SinkState, epoch: CompleteEpoch, before: CompleteEpoch | None
    ) -> CommitPermit:
        return CommitPermit(
            flow=self._flow,
            operator=state.operator,
            sink=sink,
            epoch=epoch.epoch,
            generation=epoch.generation,
            previous_epoch=before.epoch if before else NO_EPOCH,
            after_batch=before.batches.get(state.operator, NO_BATCH) if before else NO_BATCH,
            through_batch=epoch.batches[state.operator],
        )
