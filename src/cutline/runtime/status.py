"""Builds the typed status of a running flow, and writes it for readers in other processes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from cutline.base import durable
from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan, PlannedSource
from cutline.model.status import (
    CoordinatorStatus,
    EpochOutcome,
    FlowStatus,
    MessageCounts,
    OperatorFate,
    OperatorStatus,
    RecoveryStatus,
    RemoteStatus,
    SinkDetails,
    SinkStatus,
    SourceStatus,
)
from cutline.ports.checkpoint_store import CheckpointStore
from cutline.ports.inspection import CoordinatorRecords
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.lineage import lineage_of
from cutline.protocol.publish.immediate import is_place
from cutline.runtime.lifecycle import Lifecycle
from cutline.runtime.parts import FlowParts
from cutline.worker.operator import OperatorService

log = get_logger(__name__)

_WRITE_SECONDS = 0.25
#: How many past checkpoints the status shows.
_HISTORY_SHOWN = 20
#: How many past checkpoints an ended flow still reports.
_HISTORY_KEPT = 10_000

Sources = Mapping[OperatorId, list[SourceStatus]]


class StatusBuilder:
    """Builds the status of a flow; after its end, returns the last status."""

    def __init__(self, parts: FlowParts, sources: Sources, lifecycle: Lifecycle) -> None:
        self._parts = parts
        self._graph = parts.definition.graph
        self._sources = sources
        self._lifecycle = lifecycle
        #: Set once, before the stores are closed.
        self._last: FlowStatus | None = None
        self._last_history: list[EpochOutcome] = []

    def freeze(self) -> None:
        """Keep the present status as the last one: the flow has ended and its stores are about to be closed."""
        self._last_history = self._parts.stores.metadata.history(_HISTORY_KEPT)
        self._last = self.status()

    def history(self, limit: int) -> list[EpochOutcome]:
        """How past checkpoints ended, newest first."""
        if self._last is not None:
            return self._last_history[:limit]
        return self._parts.stores.metadata.history(limit)

    def status(self) -> FlowStatus:
        if self._last is not None:
            return self._last
        parts, coordinator = self._parts, self._parts.coordinator.snapshot()
        replicator = parts.background.replicator
        return FlowStatus(
            flow=self._graph.flow,
            pid=os.getpid(),
            state=self._state(coordinator),
            generation=coordinator.generation,
            recovery=self._recovery(),
            operators={name: self._operator(name) for name in self._graph.names},
            sinks={
                node.sink: SinkStatus(operator=node.operator, published_epoch=parts.coordinator.published(node.sink))
                for node in self._graph.sinks
            },
            health=coordinator.health,
            checkpoints=coordinator.checkpoints,
            messages=MessageCounts(
                links=link_counts(coordinator, parts.workers.operators.values()),
                acknowledgements=coordinator.messages.acknowledgements,
            ),
            remote=msgspec.convert(replicator.view(), RemoteStatus) if replicator is not None else None,
            history=parts.stores.metadata.history(_HISTORY_SHOWN),
        )

    def _state(self, coordinator: CoordinatorStatus) -> str:
        if self._lifecycle.failure is not None:
            return "failed"
        if self._lifecycle.is_over.is_set():
            return "stopped"
        if self._parts.workers.pause.is_paused:
            return "paused"
        return "running" if coordinator.health.healthy else "unhealthy"

    def _recovery(self) -> RecoveryStatus:
        recovered = self._parts.settled.recovered
        return RecoveryStatus(
            path=recovered.path,
            epoch=recovered.restored_epoch,
            reason=recovered.reason,
            problems=list(recovered.problems),
            lost_input=[*recovered.record.lost_input, *self._parts.regions.lost_input],
            operators=operator_fates(recovered.evolution),
            counts=self._parts.stores.metadata.recoveries(),
        )

    def _operator(self, name: OperatorId) -> OperatorStatus:
        service, supervisor = self._parts.workers.operators[name], self._parts.workers.supervisors[name]
        query = supervisor.query
        return OperatorStatus(
            inputs=list(self._graph.node(name).inputs),
            sources=self._sources[name],
            active=query is not None and query.is_active(),
            batch=service.channel.last_batch,
            batches=service.batches_total,
            rows=service.rows_total,
            batch_ms=round(service.last_batch_ms, 1),
            backlog_rows={str(name): rows for name, rows in service.credits.backlog().items()},
            waiting_for_room=service.credits.is_waiting(),
            aligning={epoch: list(inputs) for epoch, inputs in service.aligning().items()},
            restarts=supervisor.restarts,
        )


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
        while not self._is_over.wait(_WRITE_SECONDS):
            try:
                self._write()
            except Exception:  # writing the status must never disturb the flow
                log.debug("status_not_written", exc_info=True)

    def _write(self) -> None:
        durable.replace(self._path, msgspec.json.encode(self._builder.status()), sync=False)


# ---------------------------------------------------------------------- sources


def source_status(
    plans: Mapping[OperatorId, OperatorPlan], why_not_guarded: Callable[[PlannedSource], str | None]
) -> Sources:
    """What each operator reads from outside of the flow, and why the replay guard does not check it, if it does not."""
    found: dict[OperatorId, list[SourceStatus]] = {}
    for name, plan in plans.items():
        notes = [(source, why_not_guarded(source)) for source in plan.sources]
        found[name] = [SourceStatus(source=one.format, guarded=note is None, note=note or "") for one, note in notes]
    return found


def report_unguarded(flow: FlowName, sources: Sources) -> None:
    """Log unguarded sources once at the start: a restore that loses their rows would not report it."""
    for operator, read in sources.items():
        for one in read:
            if not one.guarded:
                log.warning("source_not_guarded", flow=flow, operator=operator, source=one.source, note=one.note)


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
