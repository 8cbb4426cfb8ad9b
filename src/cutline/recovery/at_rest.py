"""A flow that does not run: its definition, and where its state is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutline.model.generation import FlowCode
from cutline.model.graph import FlowGraph
from cutline.model.ids import OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.generation_store import GenerationStore
from cutline.ports.metadata import MetadataStore
from cutline.ports.progress import NoProgress, Progress
from cutline.ports.query_dir import QueryDir
from cutline.ports.sinks import Sink
from cutline.protocol.history.evolution import Definition
from cutline.tiers.remote_at_start import RemoteAtStart


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowAtRest:
    """Everything that recovery reads and writes."""

    graph: FlowGraph
    plans: Mapping[OperatorId, OperatorPlan]
    layout: Layout
    query_dirs: QueryDir
    checkpoints: CheckpointStore
    generations: GenerationStore
    metadata: MetadataStore
    #: Open them before the recovery: what they have published decides which epochs the flow may restore.
    sinks: Mapping[SinkId, Sink] = field(default_factory=dict)
    #: The tier that has checkpoints when this host has none; None: the flow has no remote tier.
    remote: RemoteAtStart | None = None
    is_per_operator: bool = False
    #: What is about to run; None: not known.
    code: FlowCode | None = None
    #: Told what the recovery does.
    progress: Progress = field(default_factory=NoProgress)

    @property
    def definition(self) -> Definition:
        return Definition(
            flow=self.graph.flow,
            inputs={node.operator: node.inputs for node in self.graph.operators},
            schemas={name: plan.schema_ipc for name, plan in self.plans.items()},
            sinks={node.sink: node.operator for node in self.graph.sinks},
            is_per_operator=self.is_per_operator,
        )
