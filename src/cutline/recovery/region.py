"""Brings back what failed for good and everything downstream of it; upstream goes on, because channels keep the data.

The region goes back to the newest complete epoch, in a generation of its own. Creating the generation record is the
moment at which it has gone back: killed before it, the next start finds the old generation and the damage; killed after
it, the next start resumes from the new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.coordinator.loop import CoordinatorService
from cutline.coordinator.manifests import lineage_of
from cutline.errors import CutlineError, FencedError, FlowFailedError, RecoveryError
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_BATCH, NO_EPOCH, START, BatchId, Epoch, Generation, OperatorId, Position, SinkId
from cutline.model.layout import Layout
from cutline.ports import GenerationRecord, LostInput, Manifest, MetadataStore, OperatorPlan, Sink, SnapshotStore
from cutline.protocol.history.epochs import region_of
from cutline.protocol.history.lineage import Lineage
from cutline.recovery.directories import Restorer, generation_record
from cutline.recovery.retired_operators import held_files, sweep_spark_dirs
from cutline.recovery.sinks import abort_invisible
from cutline.runtime.metrics import Metrics
from cutline.worker.immediate_publishing import AtOnce
from cutline.worker.operator import OperatorService
from cutline.worker.query_supervisor import Supervisor

log = get_logger(__name__)

_LOOK_SECONDS = 0.02
#: Batches under way get so long to end before their query is cancelled.
_BATCH_SECONDS = 10.0
#: Aborting what is pending takes one record each; longer than this and something is very wrong.
_SETTLE_SECONDS = 60.0
#: So often an operator may go back alone, catch up with its log and not get any further.
_TIMES_IN_VAIN = 3
#: How long the end of the flow waits for a region that is on its way back.
_STOP_SECONDS = 120.0


class _NoHelpError(Exception):
    """Going back has not helped."""


@dataclass(frozen=True, slots=True)
class _Return:
    """When an operator last went back."""

    #: Where to, and the furthest batch it had reached before.
    epoch: Epoch
    reached: BatchId
    #: How often it has gone back there since, without having got any further.
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStart:
    """From where an operator's service begins."""

    operator: OperatorId
    generation: Generation
    channel: ChannelLog
    #: The generation whose spark_checkpoint_dir it runs on.
    spark_dir: Generation
    last_epoch: Epoch
    open_epochs: frozenset[Epoch]
    completed_batch: BatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a running flow that are replaced when a region goes back; whoever holds them sees the new ones."""

    operators: dict[OperatorId, OperatorService]
    supervisors: dict[OperatorId, Supervisor]
    channels: dict[OperatorId, ChannelLog]
    spark_dirs: dict[OperatorId, Generation]
    #: Held while nothing is collected.
    collection_at_rest: threading.Lock
    settle_pause: Callable[[OperatorService], None]
    build: Callable[[OperatorStart], OperatorService]
    supervise: Callable[[OperatorService], Supervisor]


class RegionRecovery:
    """One region at a time, on a thread of its own."""

    def __init__(
        self,
        *,
        graph: FlowGraph,
        plans: Mapping[OperatorId, OperatorPlan],
        layout: Layout,
        snapshots: SnapshotStore,
        metadata: MetadataStore,
        sinks: Mapping[SinkId, Sink],
        coordinator: CoordinatorService,
        parts: Parts,
        on_fatal: Callable[[BaseException], None],
        metrics: Metrics,
        entered: GenerationRecord,
        goes_on_without_input: bool = False,
    ) -> None:
        """``entered``: what was written down when the flow was started."""
        self._is_per_operator = entered.is_per_operator
        self._entered = entered
        self._graph = graph
        self._plans = plans
        self._layout = layout
        self._snapshots = snapshots
        self._metadata = metadata
        self._sinks = sinks
        self._coordinator = coordinator
        self._parts = parts
        self._on_fatal = on_fatal
        self._metrics = metrics
        self._restorer = Restorer(
            graph=graph,
            layout=layout,
            snapshots=snapshots,
            problem=self._problem,
            goes_on_without=goes_on_without_input,
        )
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        #: Operators that have failed and whose region is not back yet.
        self._failing: set[OperatorId] = set()
        self._last: dict[OperatorId, _Return] = {}
        #: What regions have given up of the input since the flow was started.
        self.lost_input: list[LostInput] = []

    def stop(self) -> None:
        """Bring nothing back any more; what is under way is finished first, or given up before it starts anything."""
        self._is_stopped.set()
        if self._lock.acquire(timeout=_STOP_SECONDS):
            self._lock.release()
        else:
            log.error("region_does_not_end", flow=self._graph.flow)

    def is_busy(self) -> bool:
        """Whether a region goes back, or is about to."""
        return bool(self._failing)

    def operator_failed(self, service: OperatorService, error: FlowFailedError) -> None:
        """An operator cannot go on where it was, however often it is started."""
        self._failing.add(service.operator)
        threading.Thread(
            target=self._bring_back, args=(service, error), name=f"cutline-region-{service.operator}", daemon=True
        ).start()

    def _bring_back(self, service: OperatorService, error: FlowFailedError) -> None:
        with self._lock:
            if self._is_stopped.is_set() or self._parts.operators[service.operator] is not service:
                self._failing.discard(service.operator)
                return  # the flow ends, or another one's region has brought it back already
            try:
                self._restore(service, error)
                self._failing.discard(service.operator)
            except _NoHelpError:
                self._on_fatal(error)
            except Exception as problem:
                log.error("region_not_restored", flow=self._graph.flow, operator=service.operator, exc_info=True)
                self._on_fatal(
                    FlowFailedError(
                        f"{error}\nits region could not be brought back either: {problem}",
                        next_step="mend the cause and start the flow again",
                        flow=self._graph.flow,
                        operator=service.operator,
                    )
                )

    def _restore(self, service: OperatorService, error: FlowFailedError) -> None:
        begun, failed = time.monotonic(), service.operator
        if self._is_per_operator:
            self._restore_alone(service, error)
            path = "alone"
        else:
            self._restore_region(service, error)
            path = "regional"
        self._metadata.count_recovery(path)
        self._metrics.recovered(path, time.monotonic() - begun)
        log.warning("came_back", flow=self._graph.flow, operator=failed, path=path)

    def _restore_region(self, service: OperatorService, error: FlowFailedError) -> None:
        failed = service.operator
        region = region_of([failed], {name: self._graph.consumers(name) for name in self._graph.names})
        self._coordinator.lose_region(region, f"{failed} has failed for good")
        epoch = self._newest_checkpoint(failed)
        if epoch == NO_EPOCH:
            raise RecoveryError("there is no checkpoint to go back to", flow=self._graph.flow)
        manifest = self._snapshots.load_manifest(epoch)
        self._refuse_to_go_in_circles(service, manifest.epoch)
        self._stop(region)
        with self._parts.collection_at_rest:  # what is deleted while a log is read anew looks like damage
            generation = self._metadata.advance_generation()
            self._restorer.check_inputs(manifest, region, self._parts.channels)
            live = self._layout.live_dirs(self._parts.spark_dirs)
            lost = self._restorer.refuse_lost_input(manifest, region, live)
            channels = self._restorer.build(manifest, region, generation)
            crashpoint("restore-dirs-built", failed)
            if self._is_stopped.is_set():
                raise RecoveryError("the flow was stopped meanwhile", flow=self._graph.flow)
            lineages = {name: channel.lineage for name, channel in channels.items()}
            self._enter(generation, "regional", manifest.epoch, lineages, error, lost=lost)
            self._metrics.input_lost(lost)
            for one in lost:
                log.warning("input_lost", flow=self._graph.flow, operator=one.operator, what=one.what, why=one.why)
            self.lost_input += lost
            crashpoint("restore-generation", failed)
            self._metadata.check_fence()
            for channel in channels.values():
                self._throw_away(channel)
            self._parts.channels.update(channels)
        self._start(region, generation, {name: manifest.operators[name].batch for name in region})
        sweep_spark_dirs(self._layout, dict.fromkeys(region, generation))

    def _restore_alone(self, service: OperatorService, error: FlowFailedError) -> None:
        """Per-operator mode: only it goes back, and its log goes on as it is; nobody downstream notices."""
        failed, flow = service.operator, self._graph.flow
        self._coordinator.lose_region(frozenset({failed}), f"{failed} has failed for good")
        newest = self._newest_checkpoint(failed)
        self._refuse_to_go_in_circles(service, newest)
        self._stop(frozenset({failed}))
        channel = self._parts.channels[failed]
        with self._parts.collection_at_rest:
            generation = self._metadata.advance_generation()
            folder = self._layout.spark_checkpoint_dir(failed, generation)
            # Those that the coordinator knows: on the disk may be others, of a history that was left.
            complete = self._coordinator.complete_epochs(failed)
            manifests = [manifest for epoch in complete if (manifest := self._readable(epoch)) is not None]
            is_stateful = self._plans[failed].is_stateful
            self._restorer.build_alone(failed, manifests, self._parts.channels, folder, is_stateful=is_stateful)
            crashpoint("restore-dirs-built", failed)
            if self._is_stopped.is_set():
                raise RecoveryError("the flow was stopped meanwhile", flow=flow)
            channel.sync_barriers()
            self._enter(generation, "alone", None, {failed: channel.lineage.fork(generation, channel.end)}, error)
            crashpoint("restore-generation", failed)
            self._metadata.check_fence()
            channel.fork(generation)
            self._throw_away(channel)
        self._start(frozenset({failed}), generation, {failed: max(complete.values(), default=NO_BATCH)})
        sweep_spark_dirs(self._layout, {failed: generation})

    def _throw_away(self, channel: ChannelLog) -> None:
        """What the operator wrote after the place it has gone back to."""
        left = self._entered.left.get(channel.operator)
        abort_invisible(channel, self._sinks, None if left is None else lineage_of(left))
        # After that: sinks upstream go on, and may publish for others in their database what is still staged.
        for name in self._graph.sinks_of(channel.operator):
            if isinstance(sink := self._sinks[name], AtOnce):
                sink.take_back(channel)
        begun = {name: since for name, since in self._entered.begun.items() if name == channel.operator}
        kept = (self._readable(epoch) for epoch in self._snapshots.epochs()) if begun else ()
        channel.sweep(held_files([one for one in kept if one is not None], begun, self._layout))

    def _readable(self, epoch: Epoch) -> Manifest | None:
        try:
            return self._snapshots.load_manifest(epoch)
        except CutlineError as error:
            self._problem(f"epoch {epoch}: {error}")
            return None

    def _refuse_to_go_in_circles(self, service: OperatorService, epoch: Epoch) -> None:
        """Going back a second time to the same place, without having got any further, would never end."""
        reached = service.channel.last_batch
        last = self._last.get(service.operator)
        times = 0
        if last is not None and last.epoch == epoch and reached <= last.reached:
            # Its log does not go back with it when it goes back alone: that it has caught up is something, a few times.
            times = last.times + 1
            if not service.has_caught_up or times > _TIMES_IN_VAIN:
                raise _NoHelpError
        self._last[service.operator] = _Return(epoch, reached, times)

    def _newest_checkpoint(self, failed: OperatorId) -> Epoch:
        """Once nothing is pending any more that would have to wait for it."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (epoch := self._coordinator.newest_complete(failed)) is None:
            if self._is_stopped.is_set() or time.monotonic() > deadline:
                raise RecoveryError("pending checkpoints were not aborted in time", flow=self._graph.flow)
            time.sleep(_LOOK_SECONDS)
        return epoch

    def _stop(self, region: frozenset[OperatorId]) -> None:
        services = [self._parts.operators[name] for name in region]
        supervisors = [self._parts.supervisors[name] for name in region]
        for supervisor in supervisors:
            supervisor.begin_stop()
        for service in services:
            service.abandon()
        deadline = time.monotonic() + _BATCH_SECONDS
        while any(service.credits.is_in_batch() for service in services) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        for supervisor in supervisors:
            supervisor.stop()
        for service in services:
            service.stop()
            if not service.has_ended():
                raise RecoveryError("it does not stop", flow=self._graph.flow, operator=service.operator)

    def _enter(
        self,
        generation: Generation,
        path: str,
        epoch: Epoch | None,
        forked: Mapping[OperatorId, Lineage],
        error: FlowFailedError,
        *,
        lost: Sequence[LostInput] = (),
    ) -> None:
        spark_dirs = {**self._parts.spark_dirs, **dict.fromkeys(forked, generation)}
        lineages = {**{name: channel.lineage for name, channel in self._parts.channels.items()}, **forked}
        record = generation_record(
            graph=self._graph,
            plans=self._plans,
            generation=generation,
            path=path,
            epoch=epoch,
            reason=str(error).partition("\n")[0],
            lineages=lineages,
            spark_dirs=spark_dirs,
            is_per_operator=self._is_per_operator,
            begun=self._entered.begun,
            left=self._entered.left,
            lost_input=lost,
        )
        if not self._snapshots.create_generation(record):
            raise FencedError("this generation was taken by another process", generation=generation)
        self._parts.spark_dirs.update(spark_dirs)

    def _start(
        self, region: frozenset[OperatorId], generation: Generation, completed: Mapping[OperatorId, BatchId]
    ) -> None:
        """``completed``: what each has staged up to this batch is bound to a complete epoch."""
        parts = self._parts
        in_order = [name for name in self._graph.names if name in region]
        for name in in_order:
            parts.operators[name] = parts.build(
                OperatorStart(
                    operator=name,
                    generation=generation,
                    channel=parts.channels[name],
                    spark_dir=generation,
                    last_epoch=self._coordinator.last_epoch(),
                    open_epochs=frozenset(),
                    completed_batch=completed[name],
                )
            )
            parts.settle_pause(parts.operators[name])
        for name in self._graph.names:
            positions = {one: self._position(one, name) for one in self._graph.consumers(name) if one in region}
            if positions and name not in region:
                parts.operators[name].credits.consumers_went_back(positions)
        for name in region:
            for consumer in self._graph.consumers(name):
                if consumer not in region:
                    parts.operators[consumer].replace_input(parts.operators[name])
        self._coordinator.region_restored(region, generation)
        for name in in_order:
            parts.operators[name].start()
        for name in in_order:
            parts.supervisors[name] = parts.supervise(parts.operators[name])
            parts.supervisors[name].start()

    def _position(self, consumer: OperatorId, channel: OperatorId) -> Position:
        return self._parts.channels[consumer].last_positions.get(channel, START)

    def _problem(self, text: str) -> None:
        log.warning("recovery_problem", flow=self._graph.flow, problem=text)
