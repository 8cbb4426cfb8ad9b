"""Which sink publishes which epoch next: after the manifest, in order, each once, one at a time per sink."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cutline.errors import InvariantViolation
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.protocol.messages.coordinator import CommitSink
from cutline.protocol.publish.commit import CommitPermit


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteEpoch:
    """A checkpoint whose manifest is stored."""

    epoch: Epoch
    generation: Generation
    previous_epoch: Epoch
    #: Per operator: the batch after which its snapshot lies.
    batches: Mapping[OperatorId, BatchId]
    completed_ms: int = 0
    #: The same in the flow's own time, see ``RetentionPolicy``; 0: of a former version, which had no other time.
    flow_ms: int = 0
    #: Per operator: the cut batch of the previous epoch, in case that epoch is collected. Empty: it is not collected.
    after_batches: Mapping[OperatorId, BatchId] = field(default_factory=dict)

    #: Of an epoch of another host this one may have only the records, to publish it; nothing can be restored from them.
    is_restorable: bool = True

    @property
    def moment_ms(self) -> int:
        """When it was completed, in the flow's own time."""
        return self.flow_ms or self.completed_ms


class SinkState(enum.Enum):
    """The state of a sink. The values are shown to users."""

    IDLE = "idle"  # everything complete is published
    COMMITTING = "committing"  # told to publish; the answer is awaited
    WAITING = "waiting"  # it failed, or said nothing; tried again later


#: Every legal move of a sink.
MOVES: Mapping[SinkState, frozenset[SinkState]] = {
    SinkState.IDLE: frozenset({SinkState.COMMITTING}),
    SinkState.COMMITTING: frozenset({SinkState.IDLE, SinkState.WAITING}),
    SinkState.WAITING: frozenset({SinkState.COMMITTING, SinkState.IDLE}),
}


@dataclass(slots=True, kw_only=True)
class _Sink:
    operator: OperatorId
    published: Epoch
    state: SinkState = SinkState.IDLE
    #: The epoch it was last told to publish.
    epoch: Epoch = NO_EPOCH
    attempt: int = 0
    #: When to tell it again, after a failure or without an answer.
    again_at_ms: int = 0

    def move(self, to: SinkState) -> None:
        if to not in MOVES[self.state]:
            raise InvariantViolation(f"sink cannot go from {self.state.value} to {to.value}", epoch=self.epoch)
        self.state = to


class Publisher:
    """Leads each sink through the complete epochs."""

    def __init__(
        self,
        flow: FlowName,
        sinks: Mapping[SinkId, OperatorId],
        published: Mapping[SinkId, Epoch],
        *,
        retry_ms: int,
        retry_limit_ms: int,
        silence_ms: int,
    ) -> None:
        """``silence_ms``: a sink that does not answer for this long is told again; publishing twice does no harm."""
        self._flow = flow
        self._silence_ms = silence_ms
        self._sinks = {
            sink: _Sink(operator=operator, published=published.get(sink, NO_EPOCH)) for sink, operator in sinks.items()
        }
        self._retry_ms = retry_ms
        self._retry_limit_ms = retry_limit_ms
        self._newest = NO_EPOCH

    def published(self, sink: SinkId) -> Epoch:
        return self._sinks[sink].published

    def published_by_each(self) -> dict[SinkId, Epoch]:
        return {sink: state.published for sink, state in self._sinks.items()}

    def published_everywhere(self, complete: Sequence[CompleteEpoch]) -> Epoch:
        """The newest epoch that every sink has published; without sinks, the newest complete one."""
        newest = complete[-1].epoch if complete else NO_EPOCH
        return min((state.published for state in self._sinks.values()), default=newest)

    def is_idle(self) -> bool:
        return all(state.published >= self._newest for state in self._sinks.values())

    def deadlines_ms(self) -> list[int]:
        return [sink.again_at_ms for sink in self._sinks.values() if sink.state is not SinkState.IDLE]

    def retry_ms(self, sink: SinkId) -> int | None:
        """When a sink that has failed is told again; None: it has not failed."""
        state = self._sinks[sink]
        return state.again_at_ms if state.state is SinkState.WAITING else None

    def committed(self, sink: SinkId, epoch: Epoch) -> None:
        """A sink reports that the epoch is published. A repeated report changes nothing."""
        state = self._sinks[sink]
        state.published = max(state.published, epoch)
        if state.epoch == epoch and state.state is not SinkState.IDLE:
            state.move(SinkState.IDLE)
            state.attempt = 0

    def failed(self, sink: SinkId, epoch: Epoch, now_ms: int) -> None:
        """Retry later, with doubling pauses."""
        state = self._sinks[sink]
        if state.epoch == epoch and state.state is SinkState.COMMITTING:
            state.move(SinkState.WAITING)
            state.again_at_ms = now_ms + min(self._retry_ms * 2**state.attempt, self._retry_limit_ms)
            state.attempt += 1

    def restarted(self, operator: OperatorId, now_ms: int) -> None:
        """The operator has restarted and no longer knows what its sinks were told."""
        for state in self._sinks.values():
            if state.operator == operator and state.state is SinkState.COMMITTING:
                state.move(SinkState.WAITING)
                state.again_at_ms = now_ms

    def due(self, complete: Sequence[CompleteEpoch], now_ms: int, *, pins: Collection[Epoch] = ()) -> list[CommitSink]:
        """The commits to begin now."""
        self._newest = complete[-1].epoch if complete else NO_EPOCH
        actions: list[CommitSink] = []
        for sink, state in self._sinks.items():
            if state.state is SinkState.COMMITTING and now_ms >= state.again_at_ms:
                state.move(SinkState.WAITING)
            if state.state is SinkState.COMMITTING or (state.state is SinkState.WAITING and now_ms < state.again_at_ms):
                continue
            following = bisect_right(complete, state.published, key=lambda item: item.epoch)
            if following == len(complete):
                if state.state is SinkState.WAITING:
                    state.move(SinkState.IDLE)
                continue
            epoch = complete[following]
            before = complete[following - 1] if following else None
            # An epoch is released only when every sink has published it: a gap above that is a loss.
            is_gap = before is not None and before.epoch < epoch.previous_epoch and before.epoch not in pins
            if is_gap and state.published < epoch.previous_epoch:
                raise InvariantViolation(
                    f"epoch {epoch.epoch} follows epoch {epoch.previous_epoch}, which is gone",
                    sink=sink,
                    published=state.published,
                )
            state.move(SinkState.COMMITTING)
            state.epoch, state.again_at_ms = epoch.epoch, now_ms + self._silence_ms
            points = tuple(item.epoch for item in complete)
            permit = replace(self._permit(sink, state, epoch, before), rewind_points=points)
            actions.append(CommitSink(permit=permit, attempt=state.attempt))
        return actions

    def _permit(self, sink: SinkId, state: _Sink, epoch: CompleteEpoch, before: CompleteEpoch | None) -> CommitPermit:
        return CommitPermit(
            flow=self._flow,
            operator=state.operator,
            sink=sink,
            epoch=epoch.epoch,
            generation=epoch.generation,
            previous_epoch=before.epoch if before else NO_EPOCH,
            after_batch=max(
                epoch.after_batches.get(state.operator, NO_BATCH),
                before.batches.get(state.operator, NO_BATCH) if before else NO_BATCH,
            ),
            through_batch=epoch.batches[state.operator],
        )
