"""What an operator's service is built from: the operator's definition, its starting point, and its ports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cutline.base.outages import Outages
from cutline.channels.log import ChannelLog
from cutline.channels.tailing import FollowedLog
from cutline.config.options import OperatorOptions, Options
from cutline.model.ids import BatchId, Epoch, FlowName, Generation, OperatorId, SinkId
from cutline.model.plan import OperatorPlan
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.engine import Engine
from cutline.ports.query_dir import QueryDir
from cutline.ports.sinks import Sink
from cutline.transport.in_process import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """The operator's definition; the same in every generation of one process."""

    flow: FlowName
    operator: OperatorId
    plan: OperatorPlan
    inputs: tuple[OperatorId, ...]
    consumers: tuple[OperatorId, ...]
    sinks: Mapping[SinkId, Sink]
    options: Options
    own_options: OperatorOptions
    #: A trigger depends on the operators' progress.
    reports_progress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStart:
    """Where an operator's service starts."""

    operator: OperatorId
    generation: Generation
    channel: ChannelLog
    #: The generation whose spark_checkpoint_dir it runs on.
    spark_dir: Generation
    last_epoch: Epoch
    open_epochs: frozenset[Epoch]
    #: Cut batch of the newest complete epoch: output staged up to it is bound already.
    completed_batch: BatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPorts:
    """What an operator works with."""

    engine: Engine
    query_dirs: QueryDir
    checkpoints: CheckpointStore
    spark_checkpoint_dir: Path
    #: The logs of its inputs, written in this process or in another one.
    inputs: Mapping[OperatorId, FollowedLog]
    wire: Wire
    on_fatal: Callable[[BaseException], None]
    #: Raises when another process runs the flow; called before anything is deleted.
    check_fence: Callable[[], None]
    outages: Outages = field(default_factory=Outages)
