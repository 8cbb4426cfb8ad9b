"""Puts the parts together: the one place that knows which adapter stands behind which port."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline import durable, records
from cutline.config import Options, build_options, environment_layer, file_layer
from cutline.flow import Flow
from cutline.graph import FlowGraph
from cutline.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.layout import Layout
from cutline.logs import get_logger
from cutline.metadata.sqlite import SqliteMetadata
from cutline.ports import (
    EpochOutcome,
    GenerationRecord,
    Manifest,
    MetadataStore,
    OperatorPlan,
    Sink,
    SinkContext,
)
from cutline.protocol.coordinator import Coordinator, Settings, StoredPending, Topology
from cutline.protocol.messages import CoordinatorEvent
from cutline.protocol.publishing import CompleteEpoch
from cutline.protocol.trigger import TriggerPolicy
from cutline.service.clock import now_ms
from cutline.service.coordinator import CoordinatorService
from cutline.service.janitor import Janitor
from cutline.service.lock import FlowLock
from cutline.service.metrics import Metrics
from cutline.service.operator import OperatorService
from cutline.service.recovery import Recovered, Recovery, batch_in, sweep_spark_dirs
from cutline.service.running import RunningFlow
from cutline.service.supervisor import Supervisor
from cutline.snapshots.store import LocalSnapshotStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)

CONFIG_FILE = "cutline.toml"


def load_options(settings: Mapping[str, Any], *, config_file: Path | None = None) -> Options:
    """Settings win over the environment, the environment over the file, the file over the defaults."""
    path = config_file or Path(CONFIG_FILE)
    from_file = file_layer(path) if config_file or path.exists() else {}
    return build_options(from_file, environment_layer(os.environ), settings)


def start_flow(
    flow: Flow, *, spark: SparkSession | None, settings: Mapping[str, Any], config_file: Path | None = None
) -> RunningFlow:
    """Check, recover, run."""
    begun = time.monotonic()
    graph = flow.graph()
    options = load_options(settings, config_file=config_file)
    layout = Layout(Path(options.storage).resolve(), flow.name)
    durable.make_dir(layout.root)
    lock = FlowLock(layout.lock, flow.name)
    lock.acquire()
    try:
        return _start_locked(flow, graph, options, layout, lock=lock, spark=spark, begun=begun)
    except BaseException:
        lock.release()
        raise


def _start_locked(
    flow: Flow,
    graph: FlowGraph,
    options: Options,
    layout: Layout,
    *,
    lock: FlowLock,
    spark: SparkSession | None,
    begun: float,
) -> RunningFlow:
    # Spark is imported only here: checking a flow's graph or reading its records needs no JVM.
    from cutline.spark.engine import SparkEngine
    from cutline.spark.session import jvm_pid, open_session

    session = open_session(flow.name, spark)
    lock.note_jvm(jvm_pid(session))
    engine = SparkEngine(session, graph, flow.functions, layout, options)
    plans = engine.plan()
    _identify(layout, graph)
    metadata = SqliteMetadata(layout.metadata)
    snapshots = LocalSnapshotStore(layout)
    metrics = Metrics(graph.flow)
    recovery = Recovery(
        graph=graph, plans=plans, layout=layout, snapshots=snapshots, metadata=metadata, sinks=flow.sinks
    )
    recovery.check_definition()
    _open_sinks(flow, graph, plans)
    recovered = recovery.recover()
    published = _settle_sinks(flow, graph, recovered, metadata)
    sweep_spark_dirs(layout, recovered.spark_dirs)

    seen_by_sinks = [flow.sinks[node.sink].highest() for node in graph.sinks]
    last_epoch = _highest_epoch(metadata, recovered, [*snapshots.epochs(), *seen_by_sinks])
    pending = _pending(metadata, recovered, snapshots.generations())
    janitor = Janitor(snapshots=snapshots, channels=recovered.channels)
    mailbox: list[CoordinatorService] = []

    def notify(event: CoordinatorEvent) -> None:
        mailbox[0].notify(event)

    running: list[RunningFlow] = []

    def on_fatal(error: BaseException) -> None:
        running[0].fail(error)

    operators: dict[OperatorId, OperatorService] = {}
    for node in graph.operators:
        operators[node.operator] = OperatorService(
            flow=graph.flow,
            operator=node.operator,
            generation=recovered.generation,
            plan=plans[node.operator],
            channel=recovered.channels[node.operator],
            inputs={name: operators[name] for name in node.inputs},
            consumers=graph.consumers(node.operator),
            sinks={name: flow.sinks[name] for name in graph.sinks_of(node.operator)},
            spark_checkpoint_dir=layout.spark_checkpoint_dir(node.operator, recovered.spark_dirs[node.operator]),
            snapshots=snapshots,
            engine=engine,
            options=options,
            notify=notify,
            on_fatal=on_fatal,
            last_epoch=last_epoch,
            open_epochs=frozenset(one.epoch for one in pending if one.is_resumable),
            completed_batch=batch_in(recovered.manifests, node.operator),
        )
    coordinator = CoordinatorService(
        flow=graph.flow,
        generation=recovered.generation,
        core=_coordinator_core(
            graph=graph,
            plans=plans,
            options=options,
            recovered=recovered,
            last_epoch=last_epoch,
            published=published,
        ),
        metadata=metadata,
        snapshots=snapshots,
        operators=operators,
        release=janitor.release_below,
        on_fatal=on_fatal,
        metrics=metrics,
    )
    mailbox.append(coordinator)
    supervisors = {
        name: Supervisor(
            flow=graph.flow, service=service, engine=engine, options=options, on_fatal=on_fatal, metrics=metrics
        )
        for name, service in operators.items()
    }
    run = RunningFlow(
        graph=graph,
        options=options,
        layout=layout,
        recovered=recovered,
        coordinator=coordinator,
        operators=operators,
        supervisors=supervisors,
        janitor=janitor,
        engine=engine,
        metadata=metadata,
        metrics=metrics,
        release_lock=lock.release,
    )
    running.append(run)
    try:
        janitor.start(frozenset(snapshots.epochs()) - {manifest.epoch for manifest in recovered.manifests})
        for service in operators.values():
            service.start()
        coordinator.start(pending)
        for supervisor in supervisors.values():
            supervisor.start()
        run.begin()
    except BaseException:
        run.stop()  # half a flow must not go on behind the error
        raise
    metrics.recovered(recovered.path, time.monotonic() - begun)
    return run


def _identify(layout: Layout, graph: FlowGraph) -> None:
    """The folder says whose it is; written once."""
    if not layout.identity.exists():
        durable.create(layout.identity, records.encode("flow", {"name": graph.flow, "created_ms": now_ms()}))
    records.load("flow", layout.identity, dict)


def _coordinator_core(
    *,
    graph: FlowGraph,
    plans: Mapping[OperatorId, OperatorPlan],
    options: Options,
    recovered: Recovered,
    last_epoch: Epoch,
    published: Mapping[SinkId, Epoch],
) -> Coordinator:
    return Coordinator(
        topology=Topology(
            flow=graph.flow,
            subtasks={name: plans[name].subtasks for name in graph.names},
            sources=graph.sources,
            sinks={name: graph.sinks_of(name) for name in graph.names},
        ),
        generation=recovered.generation,
        settings=Settings(
            timeout_ms=options.checkpoint_timeout_ms,
            alignment_limit_ms=options.alignment_limit_ms(),
            retain_checkpoints=options.retain_checkpoints,
            trigger=TriggerPolicy(
                interval_ms=options.checkpoint_interval_ms,
                min_pause_ms=options.min_pause_ms,
                max_concurrent=options.max_concurrent_checkpoints,
                first_ms=now_ms() + options.checkpoint_interval_ms,
            ),
        ),
        last_epoch=last_epoch,
        complete=[_complete(manifest) for manifest in recovered.manifests],
        published=published,
    )


def _complete(manifest: Manifest) -> CompleteEpoch:
    return CompleteEpoch(
        epoch=manifest.epoch,
        generation=manifest.generation,
        previous_epoch=manifest.previous_epoch,
        batches={name: cut.batch for name, cut in manifest.operators.items()},
    )


def _highest_epoch(metadata: MetadataStore, recovered: Recovered, stored: list[Epoch]) -> Epoch:
    """The highest epoch anybody has ever seen, wherever: a number is never used twice."""
    in_logs = [barrier.epoch for channel in recovered.channels.values() for barrier in channel.barriers()]
    return max([metadata.last_epoch(), *stored, *in_logs], default=NO_EPOCH)


def _pending(metadata: MetadataStore, recovered: Recovered, generations: list[GenerationRecord]) -> list[StoredPending]:
    """Epochs an earlier incarnation left open. One whose manifest exists is complete, whatever the records say.

    One that a generation went back behind, be it several starts ago, can never complete.
    """
    complete = {manifest.epoch: manifest for manifest in recovered.manifests}
    pending = []
    for record in metadata.pending():
        manifest = complete.get(record.epoch)
        if manifest is not None:
            metadata.store_outcome(
                EpochOutcome(
                    epoch=record.epoch,
                    generation=manifest.generation,
                    started_ms=record.started_ms,
                    ended_ms=manifest.completed_ms,
                    outcome="completed",
                    reason="",
                    details={"duration_ms": manifest.completed_ms - manifest.started_ms},
                )
            )
            continue
        pending.append(
            StoredPending(
                epoch=record.epoch,
                started_ms=record.started_ms,
                alignment_limit_ms=record.alignment_limit_ms,
                is_resumable=all(
                    later.path == "resume" for later in generations if later.generation > record.generation
                ),
            )
        )
    return pending


def _open_sinks(flow: Flow, graph: FlowGraph, plans: Mapping[OperatorId, OperatorPlan]) -> None:
    """Open every sink: before the way back is chosen, because how far they have published decides it."""
    for node in graph.sinks:
        flow.sinks[node.sink].open(
            SinkContext(
                flow=graph.flow,
                operator=node.operator,
                sink=node.sink,
                output_mode=graph.output_modes[node.operator],
                schema_ipc=plans[node.operator].schema_ipc,
            )
        )


def _settle_sinks(flow: Flow, graph: FlowGraph, recovered: Recovered, metadata: MetadataStore) -> dict[SinkId, Epoch]:
    """Undo what sinks published of a history that was given up, and say how far each one is."""
    newest = recovered.manifests[-1].epoch if recovered.manifests else NO_EPOCH
    recorded = metadata.published()
    published: dict[SinkId, Epoch] = {}
    for node in graph.sinks:
        sink: Sink = flow.sinks[node.sink]
        ahead = sink.published() or NO_EPOCH
        if ahead > newest:
            log.warning("sink_rewound", flow=graph.flow, sink=node.sink, published=ahead, to=newest)
            sink.rewind(newest)
            ahead = newest
        published[node.sink] = min(max(ahead, recorded.get(node.sink, NO_EPOCH)), newest)
        metadata.store_published(node.sink, published[node.sink])
    for channel in recovered.channels.values():
        for entry in channel.invisible_entries():
            for name, staged in getattr(entry, "staged", {}).items():
                if name in flow.sinks:
                    flow.sinks[name].abort([staged])
        channel.sweep()
    return published
