"""Restores a failed operator and everything downstream; upstream continues, because channels keep the data.

The region is restored to the newest complete epoch, in a generation of its own (``cutline.recovery.enter``).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.base.outages import Outages, outage_of
from cutline.base.redaction import without_secrets
from cutline.channels.log import ChannelLog
from cutline.coordinator.loop import CoordinatorService
from cutline.errors import CutlineError, FlowFailedError, RecoveryError, StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord, LostInput
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, Generation, OperatorId
from cutline.ports.telemetry import Telemetry
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.history.regions import LastRestore
from cutline.protocol.recovery.facts import NeedInputSince
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.region import Hopeless, RegionFacts, choose_region, region_to_stop, remembered
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.directories import Restorer
from cutline.recovery.enter import Entry, enter, new_identity
from cutline.recovery.inputs import input_since
from cutline.recovery.repeating import build_each_alone
from cutline.recovery.retired_operators import collect_spark_dirs, held_files
from cutline.recovery.sinks import abort_invisible
from cutline.worker.immediate_publishing import ImmediateSink
from cutline.worker.operator import OperatorService
from cutline.worker.operator_spec import OperatorStart
from cutline.worker.query_supervisor import Supervisor

log = get_logger(__name__)

_LOOK_SECONDS = 0.02
#: How long running batches may take to end before their query is cancelled.
_BATCH_SECONDS = 10.0
#: How long to wait for the abort of pending epochs; each takes one record, so a longer wait means a fault.
#: After the same time, a region that waits for the deletion of released entries says so.
_SETTLE_SECONDS = 60.0
#: How long a stopping flow waits for a region that is being restored.
_STOP_SECONDS = 120.0


class _HopelessError(Exception):
    """Another restore of the operator would be futile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a running flow that a restore of a region replaces; their holders see the new ones."""

    flow: FlowGraph

    operators: dict[OperatorId, OperatorService]
    supervisors: dict[OperatorId, Supervisor]
    channels: dict[OperatorId, ChannelLog]
    spark_dirs: dict[OperatorId, Generation]
    #: Nothing is collected while it is held.
    collection_at_rest: threading.Lock
    settle_pause: Callable[[OperatorService], None]
    build: Callable[[OperatorStart], OperatorService]
    supervise: Callable[[OperatorService], Supervisor]

    def stop(self, region: frozenset[OperatorId]) -> None:
        """Stop the operators. Raises RecoveryError if one does not end."""
        services = [self.operators[name] for name in region]
        supervisors = [self.supervisors[name] for name in region]
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
                raise RecoveryError("it does not stop", flow=self.flow.flow, operator=service.operator)

    def start(
        self,
        region: frozenset[OperatorId],
        coordinator: CoordinatorService,
        generation: Generation,
        completed: Mapping[OperatorId, BatchId],
    ) -> None:
        """``completed``: per operator, output staged up to this batch is bound to a complete epoch."""
        in_order = [name for name in self.flow.names if name in region]
        for name in in_order:
            self.operators[name] = self.build(
                OperatorStart(
                    operator=name,
                    generation=generation,
                    channel=self.channels[name],
                    spark_dir=generation,
                    last_epoch=coordinator.last_epoch(),
                    open_epochs=frozenset(),
                    completed_batch=completed[name],
                )
            )
            self.settle_pause(self.operators[name])
        coordinator.region_restored(region, generation)
        for name in in_order:
            self.operators[name].start()
        for name in in_order:
            self.supervisors[name] = self.supervise(self.operators[name])
            self.supervisors[name].start()


class RegionRecovery:
    """Restores one region at a time, on a thread of its own."""

    def __init__(
        self,
        flow: FlowAtRest,
        parts: Parts,
        coordinator: CoordinatorService,
        *,
        entered: GenerationRecord,
        on_fatal: Callable[[BaseException], None],
        metrics: Telemetry,
        outages: Outages,
        may_lose_input: bool = False,
    ) -> None:
        """``entered``: the generation record of this start. The remote tier learns only of whole restores."""
        self._flow = replace(flow, remote=None)
        self._name = flow.graph.flow
        self._definition = flow.definition
        self._parts = parts
        self._coordinator = coordinator
        self._entered = entered
        self._on_fatal = on_fatal
        self._metrics = metrics
        self._outages = outages
        self._may_lose_input = may_lose_input
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        #: Failed operators whose region is not restored yet.
        self._failing: set[OperatorId] = set()
        self._last: dict[OperatorId, LastRestore] = {}
        #: Lost input that regions have continued without since the flow started.
        self.lost_input: list[LostInput] = []

    def stop(self) -> None:
        """Begin no further restore; one under way is finished, or given up before it starts an operator."""
        self._is_stopped.set()
        if self._lock.acquire(timeout=_STOP_SECONDS):
            self._lock.release()
        else:
            log.error("region_restore_not_finished", flow=self._name)

    def is_busy(self) -> bool:
        """Whether a region is being restored, or about to be."""
        return bool(self._failing)

    def operator_failed(self, service: OperatorService, error: FlowFailedError) -> None:
        """An operator has failed for good: restarts of its query have not helped."""
        self._failing.add(service.operator)
        threading.Thread(
            target=self._restored_or_failed,
            args=(service, error),
            name=f"cutline-region-{service.operator}",
            daemon=True,
        ).start()

    def _restored_or_failed(self, service: OperatorService, error: FlowFailedError) -> None:
        with self._lock:
            if self._is_stopped.is_set() or self._parts.operators[service.operator] is not service:
                self._failing.discard(service.operator)
                return  # the flow ends, or another operator's region included it
            try:
                self._restore(service, error)
                self._failing.discard(service.operator)
            except _HopelessError:
                self._on_fatal(error)
            except Exception as problem:
                why, next_step = f"{type(problem).__name__}: {problem}", ""
                if isinstance(problem, CutlineError):
                    why, next_step = problem.without_next_step(), problem.next_step
                why = without_secrets(" ".join(why.split()))
                log.error(
                    "region_not_restored",
                    flow=self._name,
                    operator=service.operator,
                    error=why,
                    exc_info=not isinstance(problem, CutlineError),
                )
                self._on_fatal(
                    FlowFailedError(
                        f"{error.what}\nIts region could not be restored either: {why}",
                        next_step=next_step or "fix the cause, then restart the flow",
                        flow=self._name,
                        operator=service.operator,
                    )
                )

    # ------------------------------------------------------------------ stop, choose, build, enter, start

    def _restore(self, service: OperatorService, error: FlowFailedError) -> None:
        begun, failed = time.monotonic(), service.operator
        region = region_to_stop(self._definition, failed)
        self._coordinator.lose_region(region, f"{failed} has failed for good")
        facts = self._facts(service, error)
        again, decision = remembered(facts), choose_region(facts)
        if isinstance(decision, Refusal):
            raise decision.error()
        if again is None:
            raise _HopelessError
        self._last[failed] = again
        self._parts.stop(region)
        while (entered := self._entered_region(facts, failed)) is None:
            pass
        plan, generation = entered
        self._metrics.input_lost(plan.lost_input)
        self.lost_input += plan.lost_input
        self._parts.start(region, self._coordinator, generation, self._completed(plan))
        self._collect_left(region, generation)
        self._count(plan.path)
        self._metrics.recovered(plan.path, time.monotonic() - begun)
        log.warning("region_restored", flow=self._name, operator=failed, path=plan.path)

    def _entered_region(self, facts: RegionFacts, failed: OperatorId) -> tuple[RestorePlan, Generation] | None:
        """Build the region in a new generation and enter it. None: after a pause, because a resource is away."""
        part, generation = f"restore of {failed}", None
        try:
            with self._parts.collection_at_rest:  # an entry deleted while a log is read would look like damage
                generation = self._flow.metadata.advance_generation()
                plan, channels = self._built(facts, generation)
                crashpoint("restore-dirs-built", failed)
                if self._is_stopped.is_set():
                    raise RecoveryError("the flow was stopped meanwhile", flow=self._name)
                self._enter(plan, channels, generation, failed)
        except Exception as error:
            if (outage := outage_of(error)) is None:
                self._outages.ended(part)
                raise
            if generation is not None:
                self._remove_try(region_to_stop(self._definition, failed), generation)
            if self._is_stopped.wait(self._outages.failed(part, outage)):
                self._outages.ended(part)
                raise
            return None
        self._outages.over(part)
        return plan, generation

    def _remove_try(self, region: frozenset[OperatorId], generation: Generation) -> None:
        """Every try builds directories of its own; on a full disk they would take the room that someone makes."""
        with contextlib.suppress(OSError, CutlineError):  # the next success, or the next start, deletes them
            if all(record.generation != generation for record in self._flow.generations.load_all()):
                for name in region:
                    shutil.rmtree(self._flow.layout.spark_checkpoint_dir(name, generation), ignore_errors=True)

    def _collect_left(self, region: frozenset[OperatorId], generation: Generation) -> None:
        try:
            collect_spark_dirs(self._flow.layout, dict.fromkeys(region, generation))
        except OSError:  # the next start deletes them
            log.warning("spark_dirs_left", flow=self._name, exc_info=True)

    def _count(self, path: str) -> None:
        """A figure that cannot be stored is no reason to end a flow that runs again."""
        try:
            self._flow.metadata.count_recovery(path)
        except StoreError as error:
            log.warning("recovery_not_counted", flow=self._name, path=path, error=error.what)

    def _facts(self, service: OperatorService, error: FlowFailedError) -> RegionFacts:
        failed = service.operator
        newest = self._newest_checkpoint(failed)
        manifests: list[Manifest | None] = []
        if self._definition.is_per_operator:
            # Only epochs that the coordinator knows: the disk may hold others, of a history that was given up.
            manifests = [self._readable(epoch) for epoch in self._coordinator.complete_epochs(failed)]
        elif newest != NO_EPOCH:
            manifests = [self._flow.checkpoints.load_manifest(newest)]
        return RegionFacts(
            definition=self._definition,
            failed=failed,
            reason=str(error).partition("\n")[0],
            manifests=tuple(one for one in manifests if one is not None),
            reached=service.channel.last_batch,
            has_caught_up=service.has_caught_up,
            last=self._last.get(failed),
            may_lose_input=self._may_lose_input,
        )

    def _newest_checkpoint(self, failed: OperatorId) -> Epoch:
        """The operator's newest complete epoch, once none of its epochs is pending and no entry is being deleted."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (epoch := self._coordinator.newest_complete(failed)) is None:
            self._wait_a_moment(failed, "its pending checkpoints were aborted")
            if time.monotonic() > deadline and not self._coordinator.is_waiting():
                raise RecoveryError(
                    f"its pending checkpoints were not aborted within {_SETTLE_SECONDS:g} s",
                    next_step="see the log for what the coordinator waits for, then restart the flow",
                    flow=self._name,
                    operator=failed,
                )
        # Without a limit: deleting many entries, or rows in an object store, takes its time, and is no failure.
        while self._coordinator.is_deleting_released():
            if deadline and time.monotonic() > deadline:
                deadline = 0.0
                log.warning("region_waits_for_deletion", flow=self._name, operator=failed)
            self._wait_a_moment(failed, "released entries were deleted")
        return epoch

    def _wait_a_moment(self, failed: OperatorId, what: str) -> None:
        if self._is_stopped.wait(_LOOK_SECONDS):
            raise RecoveryError(
                f"the flow was stopped before {what}",
                next_step="restart the flow: the start restores what is damaged",
                flow=self._name,
                operator=failed,
            )

    def _built(self, facts: RegionFacts, generation: Generation) -> tuple[RestorePlan, dict[OperatorId, ChannelLog]]:
        """Choose, find facts and build until a plan succeeds; returns it with the logs of the restored operators."""
        live = self._flow.layout.live_dirs(self._parts.spark_dirs)
        while True:
            decision = choose_region(facts)
            match decision:
                case Hopeless():
                    raise _HopelessError
                case Refusal():
                    raise decision.error()
                case NeedInputSince():
                    found = input_since(self._flow, decision, live)
                    facts = replace(facts, input_since=(*facts.input_since, found))
                case RestorePlan(path="alone"):
                    # Its log is unchanged, so nothing downstream is affected.
                    trial = build_each_alone(self._flow, decision, self._parts.channels, generation)
                    if trial is None:
                        return decision, {}
                    self._note(f"epoch {trial.epoch} of {trial.operator} cannot be used: {trial.problem}")
                    facts = replace(facts, trials=(*facts.trials, trial))
                case RestorePlan():
                    restorer = Restorer(
                        flow=self._flow,
                        generation=generation,
                        note=self._note,
                        may_lose_input=self._may_lose_input,
                        ran_in=live,
                    )
                    built = restorer.build_region(decision.manifests[-1], decision.region, self._parts.channels)
                    return decision, built
                case _:
                    raise LookupError(f"a running flow is not asked for {decision}")

    def _enter(
        self, plan: RestorePlan, restored: dict[OperatorId, ChannelLog], generation: Generation, failed: OperatorId
    ) -> None:
        """``restored``: the logs that are restored with their operators; logs of operators restored alone stay."""
        parts = self._parts
        forked: dict[OperatorId, Lineage] = {name: channel.lineage for name, channel in restored.items()}
        for name in plan.alone:
            parts.channels[name].sync_barriers()
            forked[name] = parts.channels[name].lineage.fork(generation, parts.channels[name].end)
        spark_dirs = {**parts.spark_dirs, **dict.fromkeys(forked, generation)}
        entry = Entry(
            generation=generation,
            identity=new_identity(),
            lineages={**{name: channel.lineage for name, channel in parts.channels.items()}, **forked},
            spark_dirs=spark_dirs,
            generations=[self._entered],
        )
        enter(plan, entry, self._flow, scope=failed)
        parts.spark_dirs.update(spark_dirs)
        self._flow.metadata.check_fence()
        for name in plan.alone:
            parts.channels[name].fork(generation)
        for channel in restored.values() if restored else (parts.channels[name] for name in plan.alone):
            self._abort_given_up(channel)
        parts.channels.update(restored)

    def _completed(self, plan: RestorePlan) -> dict[OperatorId, BatchId]:
        if plan.alone:
            epochs = {name: self._coordinator.complete_epochs(name) for name in plan.alone}
            return {name: max(batches.values(), default=NO_BATCH) for name, batches in epochs.items()}
        return {name: plan.manifests[-1].operators[name].batch for name in plan.region}

    def _abort_given_up(self, channel: ChannelLog) -> None:
        """Remove what the operator wrote after the restored position."""
        sinks, layout = self._flow.sinks, self._flow.layout
        left = self._entered.left.get(channel.operator)
        abort_invisible(channel, sinks, None if left is None else lineage_of(left))
        # After that: sinks upstream continue, and may publish for others in their database what is still staged.
        for name in self._flow.graph.sinks_of(channel.operator):
            if isinstance(sink := sinks[name], ImmediateSink):
                sink.rewind_given_up(channel)
        begun = {name: since for name, since in self._entered.begun.items() if name == channel.operator}
        kept = (self._readable(epoch) for epoch in self._flow.checkpoints.epochs()) if begun else ()
        channel.collect(held_files([one for one in kept if one is not None], begun, layout))

    def _readable(self, epoch: Epoch) -> Manifest | None:
        try:
            return self._flow.checkpoints.load_manifest(epoch)
        except CutlineError as error:
            self._note(f"epoch {epoch}: {error}")
            return None

    def _note(self, text: str) -> None:
        log.warning("recovery_problem", flow=self._name, problem=text)
