"""The parts of a running flow, in the order in which the assembly builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutline.base.outages import Outages
from cutline.config.options import Options
from cutline.model.generation import FlowCode
from cutline.model.graph import FlowGraph
from cutline.model.ids import Epoch, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.engine import Engine
from cutline.ports.generation_store import GenerationStore
from cutline.ports.query_dir import QueryDir
from cutline.ports.sinks import Sink
from cutline.protocol.checkpoint.setup import StoredPending
from cutline.protocol.history.retention import EpochNeeds

if TYPE_CHECKING:
    from cutline.coordinator.loop import CoordinatorService
    from cutline.coordinator.retention import Janitor
    from cutline.recovery.region import RegionRecovery
    from cutline.recovery.start import Recovered
    from cutline.runtime.draining import SourcePause
    from cutline.runtime.metrics import Metrics
    from cutline.savepoints.automatic import AutomaticSavepoints
    from cutline.savepoints.store import Savepoints
    from cutline.storage.metadata.sqlite import SqliteMetadata
    from cutline.tiers.remote_at_start import RemoteAtStart
    from cutline.tiers.remote_tier import RemoteTier
    from cutline.tiers.replicator import Replicator
    from cutline.worker.operator import OperatorService
    from cutline.worker.query_supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What is to run, where, and how."""

    graph: FlowGraph
    plans: Mapping[OperatorId, OperatorPlan]
    sinks: Mapping[SinkId, Sink]
    options: Options
    layout: Layout
    engine: Engine
    #: Which code it is.
    code: FlowCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The open stores of one flow."""

    metadata: SqliteMetadata
    query_dirs: QueryDir
    checkpoints: CheckpointStore
    generations: GenerationStore
    #: The remote tier, for writing and for recovery; None without one.
    remote: RemoteTier | None
    remote_at_start: RemoteAtStart | None
    savepoints: Savepoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The flow's state after recovery, when sinks and pending epochs agree with it."""

    recovered: Recovered
    #: The newest epoch that each sink has published.
    published: dict[SinkId, Epoch]
    #: The highest epoch number that any part has ever used.
    last_epoch: Epoch
    #: Epochs that an earlier process left open.
    pending: list[StoredPending]
    pins: frozenset[Epoch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The present services; restoring a region replaces its services in these dicts."""

    operators: dict[OperatorId, OperatorService]
    supervisors: dict[OperatorId, Supervisor]
    pause: SourcePause


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The services beside the flow: they release old checkpoints and upload new ones."""

    janitor: Janitor
    #: None without a remote tier.
    replicator: Replicator | None
    #: The log ranges that operators behind their own log need; for a collection on request.
    live_needs: Callable[[], list[EpochNeeds]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowParts:
    """Everything that runs, and what it runs on."""

    definition: Definition
    stores: Stores
    settled: Settled
    workers: Workers
    coordinator: CoordinatorService
    regions: RegionRecovery
    background: Background
    metrics: Metrics
    #: What the flow waits for.
    outages: Outages
    #: What this start has saved of the state before it, and why.
    automatic: AutomaticSavepoints
