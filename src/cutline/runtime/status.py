"""Builds the typed status of a running flow, and writes it for readers in other processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.base.outages import Waiting, outage_of
from cutline.base.redaction import without_secrets
from cutline.channels.log import ChannelLog
from cutline.errors import StoreError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.model.status import (
    CodeStatus,
    CoordinatorStatus,
    EpochOutcome,
    FlowStatus,
    HealthStatus,
    MessageCounts,
    OperatorFate,
    OperatorStatus,
    RecoveryStatus,
    RemoteStatus,
    SinkDetails,
    SinkStatus,
    SourceStatus,
    WaitingStatus,
)
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.inspection import CoordinatorRecords
from cutline.ports.source_guard import SourceGuard
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.publish.immediate import is_place
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.measures.rates import Rates
from cutline.runtime.measures.sources import SourceWatch
from cutline.runtime.measures.state_sizes import StateSizes
from cutline.runtime.parts import FlowParts
from cutline.worker.operator import OperatorService

log = get_logger(__name__)

_WRITE_SECONDS = 0.25
#: The status file is padded to a multiple of this, so that it can grow a little on a full disk.
_SLACK_BYTES = 8192
#: How many past checkpoints the status shows.
_HISTORY_SHOWN = 20
#: How many past checkpoints an ended flow still reports.
_HISTORY_KEPT = 10_000
#: Failures of a query or a sink in a row that do not make the flow unhealthy: a restart usually helps.
_TOLERATED = 1
#: The part that may wait while the flow goes on: its checkpoints are complete without it, or fail.
_REMOTE_TIER = "remote tier"

Sources = Mapping[OperatorId, list[SourceStatus]]


class StatusBuilder:
    """Builds the status of a flow; after its end, returns the last status."""

    def __init__(self, parts: FlowParts, sources: Sources, lifecycle: Lifecycle, watch: SourceWatch) -> None:
        self._parts = parts
        self._watch = watch
        self.metrics = parts.metrics
        self._graph = parts.definition.graph
        self._sources = sources
        self._lifecycle = lifecycle
        #: Set once, before the stores are closed.
        self._last: FlowStatus | None = None
        self._is_frozen = False
        self._started_ms = now_ms()
        self._rates = Rates()
        self._states = StateSizes()
        #: As they were read last.
        self._history: list[EpochOutcome] = []
        self._recoveries: dict[str, int] = {}

    def freeze(self) -> None:
        """Keep the present status as the last one: the flow has ended and its stores are about to be closed."""
        try:
            self._read_records(_HISTORY_KEPT)
        finally:
            self._is_frozen = True
        self._last = self.status()

    def history(self, limit: int) -> list[EpochOutcome]:
        """How past checkpoints ended, newest first."""
        return self._history[:limit] if self._is_frozen else self._parts.stores.metadata.history(limit)

    def _read_records(self, limit: int) -> None:
        """While the records are away, which the status says, those that were read last count."""
        metadata = self._parts.stores.metadata
        try:
            self._history, self._recoveries = metadata.history(limit), metadata.recoveries()
        except StoreError:
            log.debug("records_not_read", flow=self._graph.flow, exc_info=True)

    def status(self) -> FlowStatus:
        if self._last is not None:
            return self._last
        if not self._is_frozen:
            self._read_records(_HISTORY_SHOWN)
        parts, coordinator = self._parts, self._parts.coordinator.snapshot()
        replicator = parts.background.replicator
        rates = self._rates.per_second({name: one.rows_total for name, one in parts.workers.operators.items()})
        operators = {str(name): self._operator(name, rates) for name in self._graph.names}
        sinks = {str(one.sink): parts.coordinator.sink_status(one.sink, one.operator) for one in self._graph.sinks}
        waiting = [_waiting_status(one) for one in parts.outages.waiting()]
        health = health_of(coordinator.health, operators, sinks, waiting)
        failure = self._lifecycle.failure
        return FlowStatus(
            flow=self._graph.flow,
            pid=os.getpid(),
            state=self._state(health, waiting),
            generation=coordinator.generation,
            recovery=self._recovery(),
            operators=operators,
            sinks=sinks,
            health=health,
            checkpoints=msgspec.structs.replace(
                coordinator.checkpoints, interval_ms=parts.definition.options.checkpoint_interval_ms
            ),
            messages=MessageCounts(
                links=link_counts(coordinator, parts.workers.operators.values()),
                acknowledgements=coordinator.messages.acknowledgements,
            ),
            remote=msgspec.convert(replicator.view(), RemoteStatus) if replicator is not None else None,
            history=self._history[:_HISTORY_SHOWN],
            waiting=waiting,
            failure="" if failure is None else without_secrets(str(failure)),
            code=self._code(),
            started_ms=self._started_ms,
            at_ms=now_ms(),
        )

    def _code(self) -> CodeStatus:
        code, automatic = self._parts.definition.code, self._parts.automatic
        return CodeStatus(
            hash=code.hash,
            since_ms=self._parts.settled.recovered.record.code_since_ms,
            python=code.python,
            pyspark=code.pyspark,
            cutline=code.cutline,
            change=automatic.change,
            savepoint=next((one for one in automatic.saved if one != automatic.given_up), ""),
            restored=automatic.requested,
            given_up=automatic.given_up,
        )

    def _state(self, health: HealthStatus, waiting: Sequence[WaitingStatus]) -> str:
        if self._lifecycle.failure is not None:
            return "failed"
        if self._lifecycle.is_over.is_set():
            return "stopped"
        if any(one.part != _REMOTE_TIER for one in waiting):
            return "waiting"
        if self._parts.workers.pause.is_paused:
            return "paused"
        return "running" if health.healthy else "unhealthy"

    def _recovery(self) -> RecoveryStatus:
        recovered = self._parts.settled.recovered
        return RecoveryStatus(
            path=recovered.path,
            epoch=recovered.restored_epoch,
            reason=recovered.reason,
            problems=list(recovered.problems),
            lost_input=[*recovered.record.lost_input, *self._parts.regions.lost_input],
            operators=operator_fates(recovered.evolution),
            counts=self._recoveries,
        )

    def _operator(self, name: OperatorId, rates: Mapping[str, float]) -> OperatorStatus:
        service, supervisor = self._parts.workers.operators[name], self._parts.workers.supervisors[name]
        query, is_stateful = supervisor.query, self._parts.definition.plans[name].is_stateful
        return OperatorStatus(
            inputs=list(self._graph.node(name).inputs),
            sources=self._sources[name],
            active=query is not None and query.is_active(),
            batch=service.channel.last_batch,
            batches=service.batches_total,
            rows=service.rows_total,
            rows_per_second=round(rates[name], 1),
            batch_ms=round(service.last_batch_ms, 1),
            busy_ms=round(service.busy_ms, 1),
            backlog_rows={str(name): rows for name, rows in service.credits.backlog().items()},
            backlog_ms={str(name): waited_ms for name, waited_ms in service.credits.backlog_ms().items()},
            waiting_for_room=service.credits.is_waiting(),
            aligning={epoch: list(inputs) for epoch, inputs in service.aligning().items()},
            restarts=supervisor.restarts,
            failures=supervisor.failures(),
            problem=supervisor.problem,
            trace=supervisor.trace,
            state_bytes=self._states.of(name, service.batches_total, query) if is_stateful else None,
            source_lag=self._watch.of(name),
        )


def _waiting_status(one: Waiting) -> WaitingStatus:
    return WaitingStatus(
        resource=one.outage.resource,
        part=one.part,
        problem=one.outage.problem,
        since_ms=one.since_ms,
        attempts=one.attempts,
        next_try_ms=one.next_try_ms,
    )


def health_of(
    checkpoints: HealthStatus,
    operators: Mapping[str, OperatorStatus],
    sinks: Mapping[str, SinkStatus],
    waiting: Sequence[WaitingStatus],
) -> HealthStatus:
    """The flow is healthy if checkpoints complete, operators finish batches, and sinks publish."""
    reasons = [f"waits for {one.resource} ({one.part}): {one.problem}" for one in waiting if one.part != _REMOTE_TIER]
    reasons += [
        f"{name} has failed {one.failures} times without finishing a batch: {one.problem}"
        for name, one in operators.items()
        if one.failures > _TOLERATED
    ]
    reasons += [
        f"{name} has failed to publish {one.failures} times: {one.problem}"
        for name, one in sinks.items()
        if one.failures > _TOLERATED
    ]
    if not reasons:
        return checkpoints
    return HealthStatus(healthy=False, failures=checkpoints.failures, reason=reasons[0])


def link_counts(coordinator: CoordinatorStatus, operators: Iterable[OperatorService]) -> dict[str, int]:
    """Link faults, counted at both ends of every link."""
    return dict(sum((service.mailbox.counts() for service in operators), Counter(coordinator.messages.links)))


def operator_fates(evolution: Evolution) -> list[OperatorFate]:
    return [OperatorFate(fate=one.fate, was=one.was, now=one.now, note=one.note) for one in evolution.operators]


class StatusWriter:
    """Writes the status to the flow's folder a few times a second, and once more at the end."""

    def __init__(self, builder: StatusBuilder, layout: Layout, lifecycle: Lifecycle) -> None:
        self._builder = builder
        self._path = layout.status
        self._is_over = lifecycle.is_over
        self._thread = threading.Thread(target=self._run, name="cutline-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._builder.freeze()
        self._write()

    def _run(self) -> None:
        while True:
            try:
                self._write()
            except Exception:  # writing the status must never disturb the flow
                log.debug("status_not_written", exc_info=True)
            if self._is_over.wait(_WRITE_SECONDS):
                return

    def _write(self) -> None:
        status = self._builder.status()
        self._builder.metrics.health_changed(is_healthy=status.health.healthy)
        content = msgspec.json.encode(status)
        content += b" " * (-(len(content) + _SLACK_BYTES) % _SLACK_BYTES + _SLACK_BYTES)
        try:
            durable.replace(self._path, content, sync=False)
        except OSError as error:
            if outage_of(error) is None:
                raise
            _write_over(self._path, content)  # a status that says what the flow waits for needs no room then


def _write_over(path: Path, content: bytes) -> None:
    """Replace the content in the place that the file has on the disk, if it fits, with one write of the same length."""
    handle = os.open(path, os.O_WRONLY)
    try:
        size_bytes, content = os.fstat(handle).st_size, content.rstrip()
        if len(content) <= size_bytes:
            os.pwrite(handle, content.ljust(size_bytes), 0)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------- sources


def source_status(plans: Mapping[OperatorId, OperatorPlan], guard: SourceGuard) -> Sources:
    """What each operator reads from outside of the flow, and why the replay guard does not check it, if it does not."""
    found: dict[OperatorId, list[SourceStatus]] = {}
    for name, plan in plans.items():
        notes = [(source, guard.why_not_guarded(source)) for source in plan.sources]
        found[name] = [
            SourceStatus(source=one.format, guarded=note is None, note=guard.warning(one) if note is None else note)
            for one, note in notes
        ]
    return found


def report_unguarded(flow: FlowName, sources: Sources) -> None:
    """Log unguarded sources once at the start: a restore that loses their rows would not report it."""
    for operator, read in sources.items():
        for one in read:
            if not one.guarded:
                log.warning("source_not_guarded", flow=flow, operator=operator, source=one.source, note=one.note)
            elif one.note:
                log.warning("source_may_lose_input", flow=flow, operator=operator, source=one.source, note=one.note)


# ---------------------------------------------------------------------- sinks, by stored records


def sink_details(
    layout: Layout,
    checkpoints: CheckpointStore,
    generations: Sequence[GenerationRecord],
    known: CoordinatorRecords,
    manifests: Sequence[Manifest],
) -> list[SinkDetails]:
    """``manifests``: the complete checkpoints of the present history, ascending. Raises DamagedRecordError."""
    if not generations:
        return []
    found = []
    for operator, spans in sorted(generations[-1].lineage.items()):
        own = [one for one in manifests if operator in one.operators]
        channel = ChannelLog.open(operator, layout.channel(operator), lineage_of(spans), is_reader=True)
        for sink in sorted(_sinks_of(checkpoints, own, channel, operator)):
            found.append(_details(sink, operator, own, channel, known))
    return found


def _sinks_of(
    checkpoints: CheckpointStore, manifests: Sequence[Manifest], channel: ChannelLog, operator: OperatorId
) -> set[SinkId]:
    """The sinks in the newest checkpoint, and those with output staged since."""
    found = set(checkpoints.load_record(manifests[-1], operator).sinks) if manifests else set()
    return found.union(*(entry.staged for entry in channel.data_entries()))


def _details(
    sink: SinkId, operator: OperatorId, manifests: Sequence[Manifest], channel: ChannelLog, known: CoordinatorRecords
) -> SinkDetails:
    published = known.published.get(sink, NO_EPOCH)
    waiting = [one for one in manifests if one.epoch > published]
    after = _published_batch(operator, manifests, published)
    staged = [entry.staged[sink] for entry in channel.data_entries() if entry.batch > after and sink in entry.staged]
    return SinkDetails(
        sink=sink,
        operator=operator,
        published=published,
        with_rows=NO_EPOCH if is_place(seen := known.seen.get(sink, NO_EPOCH)) else seen,
        waiting=[one.epoch for one in waiting],
        waiting_ms=max(now_ms() - waiting[0].completed_ms, 0) if waiting else 0,
        staged_batches=len(staged),
        staged_rows=sum(one.rows for one in staged),
    )


def _published_batch(operator: OperatorId, manifests: Sequence[Manifest], published: Epoch) -> BatchId:
    """The last batch whose rows are visible, according to the kept checkpoints."""
    before = [one.operators[operator].batch for one in manifests if one.epoch <= published]
    if before:
        return before[-1]
    return manifests[0].operators[operator].after_batch if manifests else NO_BATCH
