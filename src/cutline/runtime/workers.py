"""Builds the services and supervisors of a flow's operators, at the start and again when a region is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cutline.base.logs import get_logger
from cutline.base.outages import Outages
from cutline.base.traces import store_trace
from cutline.channels.log import ChannelLog
from cutline.channels.tailing import FollowedLog
from cutline.coordinator.factory import own_options, trigger_settings
from cutline.model.ids import OperatorId
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.query_dir import QueryDir
from cutline.ports.telemetry import Telemetry
from cutline.runtime.lifecycle import FailureSink
from cutline.runtime.parts import Definition
from cutline.transport.in_process import InProcessRouter, operator_address
from cutline.worker.operator import OperatorService
from cutline.worker.operator_spec import OperatorPorts, OperatorSpec, OperatorStart
from cutline.worker.query_supervisor import Supervisor

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFactory:
    """Holds everything that the services of all operators share."""

    definition: Definition
    query_dirs: QueryDir
    checkpoints: CheckpointStore
    router: InProcessRouter
    failures: FailureSink
    metrics: Telemetry
    #: The present log of every operator; restoring a region replaces its logs.
    channels: Mapping[OperatorId, ChannelLog]
    #: Raises when another process runs the flow.
    check_fence: Callable[[], None]
    outages: Outages

    def build(self, start: OperatorStart) -> OperatorService:
        what = self.definition
        node = what.graph.node(start.operator)
        address = operator_address(node.operator)
        service = OperatorService(
            OperatorSpec(
                flow=what.graph.flow,
                operator=node.operator,
                plan=what.plans[node.operator],
                inputs=node.inputs,
                consumers=what.graph.consumers(node.operator),
                sinks={name: what.sinks[name] for name in what.graph.sinks_of(node.operator)},
                options=what.options,
                own_options=own_options(what.graph, what.options, node.operator),
                reports_progress=trigger_settings(what.options).needs_progress(),
            ),
            start,
            OperatorPorts(
                engine=what.engine,
                query_dirs=self.query_dirs,
                checkpoints=self.checkpoints,
                spark_checkpoint_dir=what.layout.spark_checkpoint_dir(node.operator, start.spark_dir),
                inputs={name: self.followed(name) for name in node.inputs},
                wire=self.router.wire_of(address),
                on_fatal=self.failures.fatal,
                check_fence=self.check_fence,
                outages=self.outages,
            ),
        )
        self.router.register(address, service.deliver)
        return service

    def followed(self, operator: OperatorId) -> FollowedLog:
        """This process writes all logs, so entries are passed on without reading a file."""
        return self.channels[operator]

    def supervise(self, service: OperatorService) -> Supervisor:
        return Supervisor(
            flow=self.definition.graph.flow,
            service=service,
            engine=self.definition.engine,
            options=self.definition.options,
            on_fatal=self.failures.fatal,
            on_given_up=self.failures.operator_failed,
            metrics=self.metrics,
            keep_trace=self._keep_trace,
        )

    def _keep_trace(self, operator: OperatorId, text: str) -> str:
        stored = store_trace(self.definition.layout.traces, operator, text)
        return str(stored) if stored is not None else ""
