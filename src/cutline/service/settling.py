"""What is settled between the way back and the first batch: sinks, epochs that were left open, epoch numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cutline.channels.log import ChannelLog
from cutline.graph import FlowGraph
from cutline.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.logs import get_logger
from cutline.ports import EpochOutcome, MetadataStore, OperatorPlan, PendingRecord, Sink, SinkContext, SnapshotStore
from cutline.protocol.coordinator import StoredPending
from cutline.protocol.recovery import is_resumable
from cutline.service.clock import now_ms
from cutline.service.manifests import epoch_in, statistics
from cutline.service.recovery import Recovered

log = get_logger(__name__)

#: More epochs than a host begins between two copies to the remote tier.
_LOST_WITH_A_HOST = 1_000


def open_sinks(graph: FlowGraph, sinks: Mapping[SinkId, Sink], plans: Mapping[OperatorId, OperatorPlan]) -> None:
    """Open every sink: before the way back is chosen, because how far they have published decides it."""
    for node in graph.sinks:
        sinks[node.sink].open(
            SinkContext(
                flow=graph.flow,
                operator=node.operator,
                sink=node.sink,
                output_mode=graph.output_modes[node.operator],
                schema_ipc=plans[node.operator].schema_ipc,
            )
        )


def settle_sinks(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], recovered: Recovered, metadata: MetadataStore
) -> dict[SinkId, Epoch]:
    """Undo what sinks published of a history that was given up, and say how far each one is."""
    recorded = metadata.published()
    published: dict[SinkId, Epoch] = {}
    for node in graph.sinks:
        sink = sinks[node.sink]
        newest = epoch_in(recovered.manifests, node.operator)
        ahead = sink.published() or NO_EPOCH
        if ahead > newest and node.on_rollback == "keep":
            log.warning("sink_keeps_what_was_given_up", flow=graph.flow, sink=node.sink, published=ahead, at=newest)
            ahead = newest
        elif ahead > newest:
            log.warning("sink_rewound", flow=graph.flow, sink=node.sink, published=ahead, to=newest)
            sink.rewind(newest)
            ahead = newest
        published[node.sink] = min(max(ahead, recorded.get(node.sink, NO_EPOCH)), newest)
        metadata.store_published(node.sink, published[node.sink])
    for channel in recovered.channels.values():
        abort_invisible(channel, sinks)
        channel.sweep()
    return published


def abort_invisible(channel: ChannelLog, sinks: Mapping[SinkId, Sink]) -> None:
    """Throw away what was staged by batches that are no part of the flow's history."""
    for entry in channel.invisible_entries():
        for name, staged in getattr(entry, "staged", {}).items():
            if name in sinks:
                sinks[name].abort([staged])


def settle_pending(recovered: Recovered, metadata: MetadataStore, snapshots: SnapshotStore) -> list[StoredPending]:
    """Epochs an earlier incarnation left open; those whose end is known already get their outcome here.

    One whose manifest exists is complete, whatever the coordinator's records say. If the manifest is of no use, because
    it cannot be read or the flow went back behind it, the epoch must not be taken up again either.
    """
    complete = {manifest.epoch: manifest for manifest in recovered.manifests}
    stored = set(snapshots.epochs())
    pending = []
    for record in recovered.pending:
        manifest = complete.get(record.epoch)
        if manifest is not None:
            metadata.store_outcome(
                EpochOutcome(
                    epoch=record.epoch,
                    generation=manifest.generation,
                    started_ms=manifest.started_ms,
                    ended_ms=manifest.completed_ms,
                    outcome="completed",
                    reason="",
                    details=statistics(manifest),
                )
            )
        elif record.epoch in stored:
            metadata.store_outcome(_given_up(record))
        else:
            resumable = is_resumable(record.generation, recovered.incarnations)
            pending.append(StoredPending(epoch=record.epoch, terms=record.terms, is_resumable=resumable))
    return pending


def _given_up(record: PendingRecord) -> EpochOutcome:
    return EpochOutcome(
        epoch=record.epoch,
        generation=record.generation,
        started_ms=record.terms.started_ms,
        ended_ms=max(now_ms(), record.terms.started_ms),
        outcome="aborted",
        reason="complete, but the flow could not use it or went back behind it",
        details={},
    )


def highest_epoch(metadata: MetadataStore, recovered: Recovered, stored: Iterable[Epoch]) -> Epoch:
    """The highest epoch anybody has ever seen, wherever: a number is never used twice."""
    in_logs = [barrier.epoch for channel in recovered.channels.values() for barrier in channel.barriers()]
    highest = max([metadata.last_epoch(), *stored, *in_logs], default=NO_EPOCH)
    # The lost host may have begun epochs that nobody else has heard of. Its records went with it: ours are empty.
    are_records_lost = metadata.last_epoch() == NO_EPOCH and highest > NO_EPOCH
    return Epoch(highest + _LOST_WITH_A_HOST) if are_records_lost else highest
