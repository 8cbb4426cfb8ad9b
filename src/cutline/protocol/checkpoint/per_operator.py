"""Per-operator mode: every operator is checkpointed by itself, at its own interval.

No cut spans the flow. Each operator has its own coordinator, as if it were a flow of one; the coordinators share only
the epoch numbers. The logs keep the flow consistent: an operator that is restored to its own snapshot runs exactly the
batches in its log again; their output is in the log already, so the new output is discarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from cutline.errors import InvariantViolation
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.protocol.checkpoint.coordinator import Coordinator
from cutline.protocol.checkpoint.pending_epoch import AckOutcome, PendingEpoch
from cutline.protocol.checkpoint.setup import EpochNumbers, StoredPending
from cutline.protocol.messages.coordinator import (
    AbortStored,
    AnswerRequest,
    CheckpointRequested,
    CoordinatorAction,
    CoordinatorEvent,
    ManifestRefused,
    ManifestStored,
    PendingStored,
    PinChanged,
    RegionLost,
    RegionRestored,
    ReleaseEpochs,
    ReportHealth,
)
from cutline.protocol.messages.time import TimePassed
from cutline.protocol.messages.wire import (
    OperatorAcked,
    OperatorStarted,
    ProgressMade,
    SinkCommitFailed,
    SinkCommitted,
    SnapshotFailed,
)
from cutline.protocol.publish.publishing import CompleteEpoch


@dataclass(slots=True)
class _Request:
    """A requested checkpoint of every operator."""

    awaiting: set[OperatorId]
    epoch: Epoch = NO_EPOCH
    failures: list[str] = field(default_factory=list)


class PerOperatorCoordinator:
    """Has the interface of a flow's coordinator, and delegates to one coordinator per operator."""

    def __init__(self, parts: Mapping[OperatorId, Coordinator], numbers: EpochNumbers) -> None:
        self._parts = dict(parts)
        self._numbers = numbers
        self._owner_of_sink = {sink: part for part in self._parts.values() for sink in part.sinks}
        self._requests: dict[str, _Request] = {}
        self._reported_healthy = True

    # ------------------------------------------------------------------ what others may look at

    @property
    def generation(self) -> Generation:
        return max(part.generation for part in self._parts.values())

    @property
    def last_epoch(self) -> Epoch:
        return self._numbers.last

    @property
    def min_epoch(self) -> Epoch:
        return min((item.epoch for item in self.complete), default=NO_EPOCH)

    @property
    def pins(self) -> frozenset[Epoch]:
        return frozenset(epoch for part in self._parts.values() for epoch in part.pins)

    @property
    def is_healthy(self) -> bool:
        return all(part.is_healthy for part in self._parts.values())

    @property
    def failures_in_a_row(self) -> int:
        return max(part.failures_in_a_row for part in self._parts.values())

    @property
    def pending(self) -> Mapping[Epoch, PendingEpoch]:
        return {epoch: item for part in self._parts.values() for epoch, item in part.pending.items()}

    @property
    def complete(self) -> tuple[CompleteEpoch, ...]:
        return tuple(sorted((one for part in self._parts.values() for one in part.complete), key=lambda one: one.epoch))

    @property
    def ack_outcomes(self) -> dict[AckOutcome, int]:
        return {outcome: sum(part.ack_outcomes[outcome] for part in self._parts.values()) for outcome in AckOutcome}

    def published(self, sink: SinkId) -> Epoch:
        return self._owner_of_sink[sink].published(sink)

    def sink_retry_ms(self, sink: SinkId) -> int | None:
        return self._owner_of_sink[sink].sink_retry_ms(sink)

    def is_settled(self) -> bool:
        return all(part.is_settled() for part in self._parts.values())

    # ------------------------------------------------------------------ the doors

    def start(self, pending: Iterable[StoredPending], *, now_ms: int) -> list[CoordinatorAction]:
        """Continue the work of an earlier process, each part its own."""
        left: dict[OperatorId, list[StoredPending]] = {}
        for stored in pending:
            if stored.terms.alone not in self._parts:
                raise InvariantViolation("a pending epoch belongs to no operator of this flow", epoch=stored.epoch)
            left.setdefault(stored.terms.alone, []).append(stored)
        actions = [
            action for name, part in self._parts.items() for action in part.start(left.get(name, ()), now_ms=now_ms)
        ]
        return self._joined(actions)

    def handle(self, event: CoordinatorEvent, *, now_ms: int) -> list[CoordinatorAction]:
        """Handle one event and return the actions to perform."""
        return self._joined(
            [action for name, own in self._addressed(event) for action in self._parts[name].handle(own, now_ms=now_ms)]
        )

    def stop_triggering(self, *, now_ms: int) -> list[CoordinatorAction]:
        actions = [action for part in self._parts.values() for action in part.stop_triggering(now_ms=now_ms)]
        return self._joined(actions)

    def next_deadline_ms(self, *, now_ms: int) -> int | None:
        deadlines = [part.next_deadline_ms(now_ms=now_ms) for part in self._parts.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def next_checkpoint_ms(self, *, now_ms: int) -> int | None:
        """When the first of the operators begins its next checkpoint."""
        due = [part.next_checkpoint_ms(now_ms=now_ms) for part in self._parts.values()]
        return min((one for one in due if one is not None), default=None)

    # ------------------------------------------------------------------ the parts that an event concerns

    def _addressed(self, event: CoordinatorEvent) -> list[tuple[OperatorId, CoordinatorEvent]]:
        match event:
            case OperatorAcked():
                return [(event.ack.operator, event)]
            case OperatorStarted():
                # Pending epochs of other operators do not concern it and are not closed.
                others = [name for name in self._parts if name != event.operator]
                open_elsewhere = {epoch for name in others for epoch in self._parts[name].pending}
                own = tuple(epoch for epoch in event.open_epochs if epoch not in open_elsewhere)
                return [(event.operator, replace(event, open_epochs=own))]
            case ProgressMade():
                # Each operator's own batches and rows count towards its own checkpoint.
                return [(event.operator, replace(event, is_source=True))]
            case SnapshotFailed() | SinkCommitted() | SinkCommitFailed():
                return [(event.operator, event)]
            case PendingStored() | ManifestStored() | ManifestRefused() | AbortStored():
                return [(name, event) for name, part in self._parts.items() if event.epoch in part.pending]
            case RegionLost():
                return [(name, replace(event, operators=frozenset({name}))) for name in sorted(event.operators)]
            case RegionRestored():
                # The others only write their records in the new generation from now on.
                return [(name, replace(event, operators=event.operators & {name})) for name in self._parts]
            case CheckpointRequested():
                self._requests[event.request] = _Request(awaiting=set(self._parts))
                return [(name, replace(event, request=_own(event.request, name))) for name in self._parts]
            case PinChanged():
                return [
                    (name, event)
                    for name, part in self._parts.items()
                    if event.epoch in part.pins or any(one.epoch == event.epoch for one in part.complete)
                ]
            case TimePassed():
                return [(name, event) for name in self._parts]
            case _:
                assert_never(event)

    # ------------------------------------------------------------------ actions of all parts, joined

    def _joined(self, actions: Iterable[CoordinatorAction]) -> list[CoordinatorAction]:
        joined: list[CoordinatorAction] = []
        drop: list[Epoch] = []
        for action in actions:
            match action:
                case ReleaseEpochs():
                    drop += action.drop
                case ReportHealth():
                    joined += self._health(action)
                case AnswerRequest():
                    joined += self._answer(action)
                case _:
                    joined.append(action)
        if drop:
            # One joint release: an epoch retained by one part may be released by another at the same moment.
            retained = tuple(one.epoch for one in self.complete)
            open_from = min(self.pending, default=Epoch(self._numbers.last + 1))
            joined.append(ReleaseEpochs(drop=tuple(sorted(drop)), retained=retained, open_from=open_from))
        return joined

    def _health(self, action: ReportHealth) -> list[ReportHealth]:
        if self.is_healthy == self._reported_healthy:
            return []
        self._reported_healthy = self.is_healthy
        return [action]

    def _answer(self, action: AnswerRequest) -> list[AnswerRequest]:
        """One answer for all operators, once every operator has answered."""
        name, _, operator = action.request.partition(_SEPARATOR)
        request = self._requests[name]
        request.awaiting.discard(OperatorId(operator))
        request.epoch = max(request.epoch, action.epoch)
        if not action.completed:
            request.failures.append(f"{operator}: {action.reason}")
        if request.awaiting:
            return []
        del self._requests[name]
        failures = "; ".join(request.failures)
        return [AnswerRequest(request=name, epoch=request.epoch, completed=not failures, reason=failures)]


_SEPARATOR = "/"


def _own(request: str, operator: OperatorId) -> str:
    return f"{request}{_SEPARATOR}{operator}"


#: The coordinator of a flow, in either mode.
FlowCoordinator = Coordinator | PerOperatorCoordinator
