"""What a coordinator is built from: the flow's topology, limits, epoch numbers, and epochs left by an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.cut import BarrierTerms
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, OperatorId, SinkId
from cutline.protocol.checkpoint.trigger import TriggerPolicy
from cutline.protocol.history.retention import RetentionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The part of a flow's graph that the coordinator uses."""

    flow: FlowName
    #: Expected subtasks of each operator.
    subtasks: Mapping[OperatorId, int]
    sources: frozenset[OperatorId]
    sinks: Mapping[OperatorId, tuple[SinkId, ...]]
    #: Per-operator mode: the only operator coordinated here; it counts as a source, whatever its inputs.
    alone: OperatorId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPending:
    """A pending epoch that an earlier generation recorded."""

    epoch: Epoch
    terms: BarrierTerms
    #: Whether the flow continues the logs that hold the epoch's barriers (it was not restored to another epoch).
    is_resumable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The coordinator's own limits."""

    timeout_ms: int
    #: An operator that has not acknowledged after this time fails the epoch before the flow's timeout does.
    operator_timeouts_ms: Mapping[OperatorId, int] = field(default_factory=dict)
    alignment_limit_ms: int | None
    retention: RetentionPolicy
    trigger: TriggerPolicy
    #: Consecutive aborted checkpoints tolerated before the flow counts as unhealthy. None: any number.
    tolerable_failures: int | None = None
    #: Operators that have not acknowledged are asked again, with doubling pauses, up to the limit.
    ask_again_ms: int = 2_000
    ask_again_limit: int = 8
    sink_retry_ms: int = 500
    sink_retry_limit_ms: int = 30_000
    sink_silence_ms: int = 60_000


class EpochNumbers:
    """Issues each number once."""

    def __init__(self, last: Epoch = NO_EPOCH) -> None:
        self.last = last

    def take(self) -> Epoch:
        self.last = Epoch(self.last + 1)
        return self.last

    def saw(self, epoch: Epoch) -> None:
        self.last = max(self.last, epoch)
