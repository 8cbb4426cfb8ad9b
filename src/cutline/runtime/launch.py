"""Puts the parts together: the one place that knows which adapter stands behind which port."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.base import durable, records
from cutline.base.clock import now_ms
from cutline.channels.segment_store import forget_former_places
from cutline.config.options import Options, build_options, environment_layer, file_layer
from cutline.connectors.replay_guard import why_not_guarded
from cutline.coordinator.factory import (
    cadence_of,
    check_operator_options,
    coordinator_core,
    own_options,
    trigger_settings,
)
from cutline.coordinator.loop import CoordinatorService
from cutline.coordinator.manifests import batch_in, highest_epoch
from cutline.coordinator.retention import Janitor, needs_behind_log
from cutline.errors import FlowFailedError
from cutline.flow import Flow
from cutline.model.graph import FlowGraph
from cutline.model.ids import Epoch, Generation, OperatorId
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreWish, current_wish, restore_target
from cutline.ports import Engine, Executors, LiveDirs
from cutline.protocol.checkpoint.coordinator import StoredPending
from cutline.protocol.history.retention import EpochNeeds
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.recovery.logs import gather_segments
from cutline.recovery.region import OperatorStart, Parts, RegionRecovery
from cutline.recovery.retired_operators import forget_left, sweep_spark_dirs
from cutline.recovery.sinks import open_sinks, settle_pending, settle_sinks
from cutline.recovery.start import Recovered, Recovery
from cutline.runtime.handle import RunningFlow
from cutline.runtime.lock import FlowLock
from cutline.runtime.metrics import Metrics
from cutline.runtime.source_views import source_views
from cutline.runtime.stores import open_replica, settle_segments, store_at
from cutline.savepoints.store import Savepoints
from cutline.storage.checkpoints import LocalSnapshotStore
from cutline.storage.metadata.sqlite import SqliteMetadata
from cutline.tiers.remote_at_start import RemoteTier
from cutline.tiers.replicator import Replicator
from cutline.tiers.upload import Published, Replica
from cutline.transport.mailbox import Letter, Wire
from cutline.worker.immediate_publishing import with_at_once
from cutline.worker.operator import OperatorService
from cutline.worker.query_supervisor import Supervisor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIG_FILE = "cutline.toml"


def load_options(settings: Mapping[str, Any], *, config_file: Path | None = None) -> Options:
    """Settings win over the environment, the environment over the file, the file over the defaults."""
    path = config_file or Path(CONFIG_FILE)
    from_file = file_layer(path) if config_file or path.exists() else {}
    return build_options(from_file, environment_layer(os.environ), settings)


def start_flow(
    flow: Flow,
    *,
    spark: SparkSession | None,
    settings: Mapping[str, Any],
    config_file: Path | None = None,
    restore_to: int | str | None = None,
    rename: Mapping[str, str] | None = None,
    allow_dropped: bool = False,
) -> RunningFlow:
    """Check, recover, run. ``restore_to``: the epoch or savepoint that the whole flow is taken back to first.

    ``rename`` (old name → new name) and ``allow_dropped`` say how its operators have changed since then.
    """
    begun = time.monotonic()
    graph = flow.graph()
    options = load_options(settings, config_file=config_file)
    check_operator_options(graph, options)
    layout = Layout(Path(options.storage).resolve(), flow.name)
    durable.make_dir(layout.root)
    lock = FlowLock(layout.lock, flow.name)
    lock.acquire()
    try:
        wish = current_wish(layout, restore_to, rename, allow_dropped=allow_dropped, flow=flow.name)
        # Spark is imported only here: checking a flow's graph or reading its records needs no JVM.
        from cutline.spark.engine import SparkEngine
        from cutline.spark.executor_jobs import SparkExecutors
        from cutline.spark.session import jvm_pid, open_session

        session = open_session(flow.name, spark)
        lock.note_jvm(jvm_pid(session))
        engine = SparkEngine(session, graph, flow.functions, layout, options)
        run = run_on(
            engine,
            flow,
            graph,
            options,
            layout,
            executors=SparkExecutors(session, flow.name),
            release_lock=lock.release,
            wish=wish,
        )
    except BaseException:
        lock.release()
        raise
    run.metrics.recovered(run.status()["recovery"]["path"], time.monotonic() - begun)
    return run


def run_on(
    engine: Engine,
    flow: Flow,
    graph: FlowGraph,
    options: Options,
    layout: Layout,
    *,
    executors: Executors | None = None,
    release_lock: Callable[[], None],
    wish: RestoreWish | None = None,
) -> RunningFlow:
    """Bring the flow back and start it on an engine; the caller holds the flow's lock.

    ``wish``: where a person wants it taken back to.
    ``executors``: who carries what is large between the tiers; None: threads of this process carry all.
    """
    sinks = with_at_once(graph, flow.sinks, renamed=wish.rename.values() if wish is not None else ())
    plans = engine.plan()
    _identify(layout, graph)
    metadata = SqliteMetadata(layout.metadata)
    snapshots = LocalSnapshotStore(
        layout, live_dirs=engine.live_dirs(), sources={name: plan.sources for name, plan in plans.items()}
    )
    replica = open_replica(graph, options, layout, executors)
    remote = RemoteTier(replica, graph.flow) if replica is not None else None
    settle_segments(options, layout, graph.flow)
    savepoints = Savepoints(layout, partial(store_at, remote_options=options.remote_options))
    recovery = Recovery(
        graph=graph,
        plans=plans,
        layout=layout,
        snapshots=snapshots,
        metadata=metadata,
        sinks=sinks,
        is_per_operator=options.is_per_operator,
        remote=remote,
        restore_to=restore_target(wish, savepoints) if wish is not None else None,
        changes=wish.changes if wish is not None else None,
        goes_on_without_input=options.missing_input == "continue",
    )
    recovery.check_definition()
    open_sinks(graph, sinks, plans)
    recovered = recovery.recover()
    gather_segments(layout.channels)
    forget_former_places(layout.channels)
    published = settle_sinks(graph, sinks, recovered, metadata, layout)

    last_epoch = highest_epoch(
        metadata.last_epoch(),
        [
            *(barrier.epoch for channel in recovered.channels.values() for barrier in channel.barriers()),
            *snapshots.epochs(),
            *(sinks[node.sink].highest() for node in graph.sinks),
            *(remote.epochs() if remote is not None else ()),
        ],
    )
    pending = settle_pending(recovered, metadata, snapshots)
    pins = metadata.pins()

    janitor = Janitor(
        snapshots=snapshots,
        channels=recovered.channels,
        touched_by={name: {name, *graph.consumers(name)} for name in graph.names},
        check_fence=metadata.check_fence,
        live_needs=partial(_needs_of_those_behind, recovered, snapshots, layout, options),
        forget_left=lambda: forget_left(layout, snapshots, graph.names),
    )
    metrics = Metrics(graph.flow)
    metrics.input_lost(recovered.record.lost_input)
    coordinators: list[CoordinatorService] = []
    running: list[RunningFlow] = []

    def wire_of(operator: OperatorId) -> Wire:
        def deliver(letter: Letter) -> None:
            coordinators[0].deliver(operator, letter)

        return deliver

    def on_fatal(error: BaseException) -> None:
        running[0].fail(error)

    def generation() -> Generation:
        return coordinators[0].generation()

    def published_so_far() -> Published:
        return Published(everywhere=coordinators[0].published_everywhere(sinks), seen=metadata.seen())

    operators: dict[OperatorId, OperatorService] = {}

    def build(start: OperatorStart) -> OperatorService:
        node = graph.node(start.operator)
        return OperatorService(
            flow=graph.flow,
            operator=node.operator,
            generation=start.generation,
            plan=plans[node.operator],
            channel=start.channel,
            inputs={name: operators[name] for name in node.inputs},
            consumers=graph.consumers(node.operator),
            sinks={name: sinks[name] for name in graph.sinks_of(node.operator)},
            spark_checkpoint_dir=layout.spark_checkpoint_dir(node.operator, start.spark_dir),
            snapshots=snapshots,
            engine=engine,
            options=options,
            own_options=own_options(graph, options, node.operator),
            reports_progress=trigger_settings(options).needs_progress(),
            wire=wire_of(node.operator),
            on_fatal=on_fatal,
            last_epoch=start.last_epoch,
            open_epochs=start.open_epochs,
            completed_batch=start.completed_batch,
        )

    for name in graph.names:
        operators[name] = build(
            OperatorStart(
                operator=name,
                generation=recovered.generation,
                channel=recovered.channels[name],
                spark_dir=recovered.spark_dirs[name],
                last_epoch=last_epoch,
                open_epochs=frozenset(
                    one.epoch for one in pending if one.is_resumable and one.terms.alone in (None, name)
                ),
                completed_batch=batch_in(recovered.manifests, name),
            )
        )
    replicator = _build_replicator(
        replica,
        graph=graph,
        options=options,
        snapshots=snapshots,
        metadata=metadata,
        janitor=janitor,
        recovered=recovered,
        generation=generation,
        published=published_so_far,
        on_fatal=on_fatal,
    )
    coordinator = CoordinatorService(
        flow=graph.flow,
        core=coordinator_core(
            graph=graph,
            plans=plans,
            options=options,
            recovered=recovered,
            last_epoch=last_epoch,
            published=published,
            pins=pins,
        ),
        metadata=metadata,
        snapshots=snapshots,
        operators=operators,
        release=janitor.release,
        on_fatal=on_fatal,
        metrics=metrics,
        retry_ms=options.message_retry_ms,
        retry_limit=options.message_retry_limit,
        bring_first=replicator.first if replicator and options.durable == "remote" else None,
        on_complete=replicator.completed if replicator else lambda _: None,
    )
    coordinators.append(coordinator)
    _follow_messages(metrics, coordinator)

    def on_given_up(service: OperatorService, error: FlowFailedError) -> None:
        regions.operator_failed(service, error)

    def settle_pause(service: OperatorService) -> None:
        running[0].settle_pause(service)

    def supervise(service: OperatorService) -> Supervisor:
        return Supervisor(
            flow=graph.flow,
            service=service,
            engine=engine,
            options=options,
            on_fatal=on_fatal,
            on_given_up=on_given_up,
            metrics=metrics,
        )

    supervisors = {name: supervise(service) for name, service in operators.items()}
    regions = RegionRecovery(
        graph=graph,
        plans=plans,
        layout=layout,
        snapshots=snapshots,
        metadata=metadata,
        sinks=sinks,
        coordinator=coordinator,
        parts=Parts(
            operators=operators,
            supervisors=supervisors,
            channels=recovered.channels,
            spark_dirs=recovered.spark_dirs,
            collection_at_rest=janitor.at_rest,
            settle_pause=settle_pause,
            build=build,
            supervise=supervise,
        ),
        on_fatal=on_fatal,
        metrics=metrics,
        entered=recovered.record,
        goes_on_without_input=options.missing_input == "continue",
    )
    run = RunningFlow(
        graph=graph,
        options=options,
        layout=layout,
        recovered=recovered,
        coordinator=coordinator,
        operators=operators,
        supervisors=supervisors,
        regions=regions,
        janitor=janitor,
        replicator=replicator,
        savepoints=savepoints,
        engine=engine,
        metadata=metadata,
        metrics=metrics,
        sources=source_views(plans, why_not_guarded),
        release_lock=release_lock,
    )
    running.append(run)
    _begin(
        run,
        janitor=janitor,
        layout=layout,
        recovered=recovered,
        snapshots=snapshots,
        live_dirs=engine.live_dirs(),
        pins=pins,
        pending=pending,
    )
    return run


def _needs_of_those_behind(
    recovered: Recovered, snapshots: LocalSnapshotStore, layout: Layout, options: Options
) -> list[EpochNeeds]:
    """``recovered`` holds the directories and logs as they are now; those that come back alone are put in."""
    if not options.is_per_operator:
        return []  # nobody is ever behind the newest checkpoint
    committed = {
        name: snapshots.last_committed(layout.spark_checkpoint_dir(name, spark_dir))
        for name, spark_dir in recovered.spark_dirs.items()
    }
    needs = (needs_behind_log(recovered.channels[name], batch) for name, batch in committed.items())
    return [one for one in needs if one is not None]


def _begin(
    run: RunningFlow,
    *,
    janitor: Janitor,
    layout: Layout,
    recovered: Recovered,
    snapshots: LocalSnapshotStore,
    live_dirs: LiveDirs | None,
    pins: frozenset[Epoch],
    pending: list[StoredPending],
) -> None:
    try:
        layout.restore_wish.unlink(missing_ok=True)
        sweep_spark_dirs(layout, recovered.spark_dirs, is_all=True)
        if live_dirs is not None:
            live_dirs.keep(recovered.spark_dirs)
        kept = {manifest.epoch for manifest in recovered.manifests} | pins
        abandoned = tuple(epoch for epoch in snapshots.epochs() if epoch not in kept)
        janitor.start(abandoned)
        if recovered.path == "remote":
            # Of these only the records were fetched. Whoever looks at the local tier now would take that for damage.
            retained = tuple(epoch for epoch in snapshots.epochs() if epoch in kept)
            janitor.release(ReleaseEpochs(drop=abandoned, retained=retained, open_from=retained[-1]))
        run.begin(pending)
    except BaseException:
        run.stop()  # half a flow must not go on behind the error
        raise


def _follow_messages(metrics: Metrics, coordinator: CoordinatorService) -> None:
    metrics.follow("messages", "Messages that went astray", "kind", lambda: coordinator.messages()["links"])
    metrics.follow(
        "acknowledgements", "By what became of them", "outcome", lambda: coordinator.messages()["acknowledgements"]
    )


def _build_replicator(
    replica: Replica | None,
    *,
    graph: FlowGraph,
    options: Options,
    snapshots: LocalSnapshotStore,
    metadata: SqliteMetadata,
    janitor: Janitor,
    recovered: Recovered,
    generation: Callable[[], Generation],
    published: Callable[[], Published],
    on_fatal: Callable[[BaseException], None],
) -> Replicator | None:
    if replica is None:
        return None
    return Replicator(
        flow=graph.flow,
        replica=replica,
        snapshots=snapshots,
        generation=generation,
        entered=recovered.record,
        hold=janitor.hold,
        let_go=janitor.let_go,
        check_fence=metadata.check_fence,
        pins=metadata.pins,
        published=published,
        cadence=cadence_of(graph, options),
        retain=options.retain_checkpoints,
        grace_ms=options.remote_grace_ms,
        on_fatal=on_fatal,
    )


def _identify(layout: Layout, graph: FlowGraph) -> None:
    """The folder says whose it is; written once."""
    if not layout.identity.exists():
        durable.create(layout.identity, records.encode("flow", {"name": graph.flow, "created_ms": now_ms()}))
    records.load("flow", layout.identity, dict)
