"""Builds a running flow from its parts, top to bottom: the one place that knows the adapter of each port.

Each step returns what the later steps need, and refers to nothing that is not built yet. Where parts need each other,
one of them registers with a router that exists from the start: ``InProcessRouter`` for messages, ``FailureSink`` for
errors, ``CoordinatorFigures`` for the replicator's queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cutline.base import durable, records
from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.base.outages import Outages
from cutline.channels.segment_store import remove_former_places
from cutline.connectors.replay_guard import ReplayGuard
from cutline.coordinator.factory import CoordinatorStart, coordinator_core
from cutline.coordinator.loop import CoordinatorService
from cutline.coordinator.ports import CoordinatorPorts
from cutline.errors import OtherHistoryError
from cutline.model.ids import Epoch, OperatorId
from cutline.model.layout import Layout
from cutline.model.restore_request import RestoreRequest, epoch_in
from cutline.ports.executors import Executors
from cutline.ports.progress import NoProgress, Progress, Step
from cutline.protocol.history.evolution import Changes
from cutline.protocol.history.histories import identity_of
from cutline.protocol.history.known_checkpoints import batch_in, highest_epoch, of_present_history
from cutline.protocol.messages.coordinator import ReleaseEpochs
from cutline.protocol.recovery.facts import RestoreTo
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.logs import gather_segments
from cutline.recovery.pending import settle_pending
from cutline.recovery.region import Parts, RegionRecovery
from cutline.recovery.retired_operators import collect_spark_dirs
from cutline.recovery.sinks import open_sinks, settle_sinks
from cutline.recovery.start import Recovered, Recovery, settle_put_back
from cutline.runtime.background import CoordinatorFigures, build_background, saved_epochs
from cutline.runtime.draining import SourcePause
from cutline.runtime.handle import RunningFlow
from cutline.runtime.lifecycle import FailureSink
from cutline.runtime.metrics import Metrics
from cutline.runtime.parts import Background, Definition, FlowParts, Settled, Stores, Workers
from cutline.runtime.status import link_counts
from cutline.runtime.stores import open_stores
from cutline.runtime.workers import WorkerFactory
from cutline.savepoints.automatic import AutomaticSavepoints, resolved
from cutline.savepoints.set_aside import finish, readable, set_aside
from cutline.storage.detached import DetachedLogs
from cutline.storage.restore_requests import requested_savepoints, waiting_request, withdraw_request
from cutline.transport.in_process import COORDINATOR, InProcessRouter
from cutline.transport.mailbox import LinkSettings
from cutline.worker.operator_spec import OperatorStart

log = get_logger(__name__)

#: How deep the folders are that Cutline itself makes in the flow's folder: channels/<operator>, spark/<operator>.
_OWN_FOLDERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowAssembly:
    """Recovers a flow and starts it; the caller holds the flow's lock."""

    definition: Definition
    #: Transfer large files between the tiers; None: threads of this process transfer all files.
    executors: Executors | None
    request: RestoreRequest | None
    #: If another storage has the newest history: set the state of this one aside and continue from the remote tier.
    rejoin: bool = False
    progress: Progress = field(default_factory=NoProgress)

    def start(self, release_lock: Callable[[], None]) -> RunningFlow:
        self.progress.begin(Step.RECOVERY)
        stores = self.open_stores()
        automatic = self._automatic(stores)
        try:
            recovered = self.recover(stores, automatic)
        except OtherHistoryError as error:
            if not error.can_rejoin or (error.has_run and not self.rejoin):
                raise
            stores = self._set_aside(stores, has_run=error.has_run)
            automatic = self._automatic(stores)
            recovered = self.recover(stores, automatic)
        settled = self.settle(stores, recovered)
        for name, generation in recovered.spark_dirs.items():
            folder = self.definition.layout.spark_checkpoint_dir(name, generation)
            stores.query_dirs.record_sources(name, folder)

        flow = self.definition.graph.flow
        router, failures, metrics, outages = InProcessRouter(), FailureSink(), Metrics(flow), Outages(flow)
        metrics.input_lost(recovered.record.lost_input)
        figures = CoordinatorFigures(self.definition, stores)
        factory = WorkerFactory(
            definition=self.definition,
            query_dirs=stores.query_dirs,
            checkpoints=stores.checkpoints,
            router=router,
            failures=failures,
            metrics=metrics,
            channels=recovered.channels,
            check_fence=stores.metadata.check_fence,
            outages=outages,
        )
        background = build_background(self.definition, stores, recovered, figures, failures=failures, outages=outages)
        workers = self.build_workers(settled, factory)
        coordinator = self.build_coordinator(stores, settled, factory, background, workers)
        router.register(COORDINATOR, coordinator.deliver)
        figures.register(coordinator)
        _follow_messages(metrics, coordinator, workers)
        regions = self.build_regions(
            stores, settled, factory=factory, workers=workers, background=background, coordinator=coordinator
        )
        parts = FlowParts(
            definition=self.definition,
            stores=stores,
            settled=settled,
            workers=workers,
            coordinator=coordinator,
            regions=regions,
            background=background,
            metrics=metrics,
            outages=outages,
            automatic=automatic,
        )
        run = RunningFlow(parts, ReplayGuard(), release_lock)
        failures.register(on_fatal=run.fail, on_operator_failed=regions.operator_failed)
        self._begin(run, parts)
        return run

    # ------------------------------------------------------------------ the state to run from

    def open_stores(self) -> Stores:
        what = self.definition
        finish(what.layout)
        durable.settle_dir(what.layout.root, depth=_OWN_FOLDERS)
        if not what.layout.identity.exists():  # records the folder's owner; written once
            identity = {"name": what.graph.flow, "created_ms": now_ms()}
            durable.create(what.layout.identity, records.encode("flow", identity))
        records.load("flow", what.layout.identity, dict)
        return open_stores(what, self.executors)

    def _set_aside(self, stores: Stores, *, has_run: bool) -> Stores:
        """``has_run``: if not, the storage holds nothing of its own to keep."""
        layout = self.definition.layout
        generations = stores.generations.load_all()
        manifests = of_present_history(readable(stores.checkpoints), generations) if has_run else []
        stores.metadata.close()
        made = set_aside(layout, manifests, stores.savepoints, now_ms=now_ms())
        log.warning("set_aside", flow=layout.flow, savepoint=made.name if made is not None else None)
        return self.open_stores()

    def _automatic(self, stores: Stores) -> AutomaticSavepoints:
        what = self.definition
        return AutomaticSavepoints(
            flow=what.graph.flow,
            savepoints=stores.savepoints,
            checkpoints=stores.checkpoints,
            code=what.code,
            keep=what.options.auto_savepoints,
            is_per_operator=what.options.is_per_operator,
            spared=partial(requested_savepoints, what.layout),
        )

    def recover(self, stores: Stores, automatic: AutomaticSavepoints) -> Recovered:
        what, request = self.definition, self.request
        restore_to = None
        # First: what a savepoint needs is put into the logs, and what a killed start has put there is not taken for it.
        settle_put_back(what.layout, stores.generations)
        if request is not None:
            restore_to = RestoreTo(epoch=_target(request, stores, automatic), changes=_changes(request))

        recovery = Recovery(
            self._at_rest(stores),
            restore_to=restore_to,
            may_lose_input=self._may_lose_input,
            before_entering=automatic.save,
        )
        recovery.check_definition()
        open_sinks(what.graph, what.sinks, what.plans)
        return recovery.recover()

    def _at_rest(self, stores: Stores) -> FlowAtRest:
        what = self.definition
        return FlowAtRest(
            graph=what.graph,
            plans=what.plans,
            layout=what.layout,
            query_dirs=stores.query_dirs,
            checkpoints=stores.checkpoints,
            generations=stores.generations,
            metadata=stores.metadata,
            sinks=what.sinks,
            remote=stores.remote_at_start,
            is_per_operator=what.options.is_per_operator,
            code=what.code,
            progress=self.progress,
        )

    @property
    def _may_lose_input(self) -> bool:
        return self.definition.options.missing_input == "continue"

    def settle(self, stores: Stores, recovered: Recovered) -> Settled:
        """Bring the logs, sinks and pending epochs in line with what was recovered."""
        what = self.definition
        gather_segments(what.layout.channels)
        remove_former_places(what.layout.channels)
        published = settle_sinks(what.graph, what.sinks, recovered, stores.metadata, what.layout)
        stores.metadata.note_run()
        last_epoch = highest_epoch(
            stores.metadata.last_epoch(),
            [
                *(barrier.epoch for channel in recovered.channels.values() for barrier in channel.barriers()),
                *stores.checkpoints.epochs(),
                *(what.sinks[node.sink].highest() for node in what.graph.sinks),
                *(stores.remote_at_start.epochs() if stores.remote_at_start is not None else ()),
            ],
        )
        return Settled(
            recovered=recovered,
            published=published,
            last_epoch=last_epoch,
            pending=settle_pending(recovered, stores.metadata, stores.checkpoints),
            pins=stores.metadata.pins(),
        )

    # ------------------------------------------------------------------ the parts that run

    def build_workers(self, settled: Settled, factory: WorkerFactory) -> Workers:
        graph = self.definition.graph
        operators = {name: factory.build(self._start_of(name, settled)) for name in graph.names}
        return Workers(
            operators=operators,
            supervisors={name: factory.supervise(service) for name, service in operators.items()},
            pause=SourcePause(graph, operators),
        )

    def _start_of(self, operator: OperatorId, settled: Settled) -> OperatorStart:
        recovered = settled.recovered
        resumable = (one for one in settled.pending if one.is_resumable)
        return OperatorStart(
            operator=operator,
            generation=recovered.generation,
            channel=recovered.channels[operator],
            spark_dir=recovered.spark_dirs[operator],
            last_epoch=settled.last_epoch,
            open_epochs=frozenset(one.epoch for one in resumable if one.terms.alone in (None, operator)),
            completed_batch=batch_in(recovered.manifests, operator),
        )

    def build_coordinator(
        self, stores: Stores, settled: Settled, factory: WorkerFactory, background: Background, workers: Workers
    ) -> CoordinatorService:
        what, replicator, recovered = self.definition, background.replicator, settled.recovered
        core = coordinator_core(
            graph=what.graph,
            plans=what.plans,
            options=what.options,
            start=CoordinatorStart(
                generation=recovered.generation,
                manifests=recovered.manifests,
                last_epoch=settled.last_epoch,
                published=settled.published,
                pins=settled.pins,
                only_records=_only_records(recovered, what.layout),
            ),
        )
        return CoordinatorService(
            what.graph.flow,
            core,
            CoordinatorPorts(
                metadata=stores.metadata,
                checkpoints=stores.checkpoints,
                wire=factory.router.wire_of(COORDINATOR),
                link=LinkSettings(retry_ms=what.options.message_retry_ms, retry_limit=what.options.message_retry_limit),
                metrics=factory.metrics,
                release=background.janitor.release,
                on_fatal=factory.failures.fatal,
                outages=factory.outages,
                upload_first=replicator.first if replicator and what.options.durable == "remote" else None,
                history=identity_of(recovered.record),
                code=what.code.hash,
                saved_epochs=lambda: saved_epochs(what.options, stores.savepoints, replicator),
                on_complete=replicator.completed if replicator else lambda _: None,
                # The service of an operator is replaced when its region is restored.
                rows_between=lambda name, after, last: workers.operators[name].channel.rows_between(after, last),
            ),
            lineages={name: channel.lineage for name, channel in recovered.channels.items()},
            touched_by={name: {name, *what.graph.consumers(name)} for name in what.graph.names},
        )

    def build_regions(
        self,
        stores: Stores,
        settled: Settled,
        *,
        factory: WorkerFactory,
        workers: Workers,
        background: Background,
        coordinator: CoordinatorService,
    ) -> RegionRecovery:
        recovered = settled.recovered
        return RegionRecovery(
            self._at_rest(stores),
            Parts(
                flow=self.definition.graph,
                operators=workers.operators,
                supervisors=workers.supervisors,
                channels=recovered.channels,
                spark_dirs=recovered.spark_dirs,
                collection_at_rest=background.janitor.at_rest,
                settle_pause=workers.pause.settle,
                build=factory.build,
                supervise=factory.supervise,
            ),
            coordinator,
            entered=recovered.record,
            on_fatal=factory.failures.fatal,
            metrics=factory.metrics,
            outages=factory.outages,
            may_lose_input=self._may_lose_input,
        )

    # ------------------------------------------------------------------ start

    def _begin(self, run: RunningFlow, parts: FlowParts) -> None:
        try:
            self._clean_up(parts)
            run.begin(self.progress)
        except BaseException:
            run.stop()  # a half-started flow must not continue after the error
            raise

    def _clean_up(self, parts: FlowParts) -> None:
        """Remove what the recovered flow no longer refers to."""
        layout, checkpoints = self.definition.layout, parts.stores.checkpoints
        recovered, janitor = parts.settled.recovered, parts.background.janitor
        if self.request is not None:
            withdraw_request(layout, self.request)
        if (waiting := waiting_request(layout)) is not None:  # stored during this start: it is for the next one
            log.warning("restore_request_waits", flow=layout.flow, to=waiting.to)
        parts.automatic.collect()
        collect_spark_dirs(layout, recovered.spark_dirs, is_all=True)
        live_dirs = self.definition.engine.live_dirs()
        if live_dirs is not None:
            live_dirs.keep(recovered.spark_dirs)
        kept: set[Epoch] = {manifest.epoch for manifest in recovered.manifests} | parts.settled.pins
        abandoned = tuple(epoch for epoch in checkpoints.epochs() if epoch not in kept)
        janitor.start(abandoned)
        if recovered.path == "remote" or (self.request is not None and parts.stores.remote is not None and abandoned):
            # Only the records of these epochs were downloaded: readers of the local tier would report damage.
            retained = tuple(epoch for epoch in checkpoints.epochs() if epoch in kept)
            janitor.release(ReleaseEpochs(drop=abandoned, retained=retained, open_from=retained[-1]))


def _only_records(recovered: Recovered, layout: Layout) -> frozenset[Epoch]:
    """Epochs that a host before this one completed, and that sinks have yet to publish: they were not downloaded."""
    if recovered.path != "remote":
        return frozenset()
    logs = DetachedLogs(layout)
    return frozenset(one.epoch for one in recovered.manifests if logs.why_not_whole(one))


def _target(request: RestoreRequest, stores: Stores, automatic: AutomaticSavepoints) -> Epoch:
    """The epoch to restore.

    The content of a savepoint is put into the flow's folder, in case the checkpoint itself was collected since.
    """
    epoch = epoch_in(request.to)
    if epoch is None:
        automatic.restored = resolved(request.to, stores.savepoints, stores.generations.load_all(), flow=automatic.flow)
        epoch = stores.savepoints.fetch(automatic.restored).epoch
    automatic.requested = epoch
    return epoch


def _changes(request: RestoreRequest) -> Changes:
    return Changes(rename=request.rename, allow_dropped=request.allow_dropped)


def _follow_messages(metrics: Metrics, coordinator: CoordinatorService, workers: Workers) -> None:
    def links() -> dict[str, int]:
        return link_counts(coordinator.snapshot(), workers.operators.values())

    def acknowledgements() -> dict[str, int]:
        return coordinator.snapshot().messages.acknowledgements

    metrics.follow("messages", "Message faults by kind", "kind", links)
    metrics.follow("acknowledgements", "Acknowledgements by outcome", "outcome", acknowledgements)
