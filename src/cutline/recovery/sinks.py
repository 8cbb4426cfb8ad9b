"""What is settled between the way back and the first batch: sinks, epochs that were left open, epoch numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from cutline.base.clock import now_ms
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import epoch_in, gone_back_to, lineage_of, not_held, statistics
from cutline.model.graph import FlowGraph
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.ports import (
    Claimable,
    EpochOutcome,
    Manifest,
    MetadataStore,
    OperatorPlan,
    PendingRecord,
    RewindsTogether,
    Sink,
    SinkContext,
    SnapshotStore,
)
from cutline.protocol.checkpoint.coordinator import StoredPending
from cutline.protocol.history.epochs import is_resumable
from cutline.protocol.history.lineage import Lineage
from cutline.recovery.retired_operators import held_files
from cutline.recovery.start import Recovered
from cutline.worker.immediate_publishing import AtOnce, check_numbering

log = get_logger(__name__)


def open_sinks(graph: FlowGraph, sinks: Mapping[SinkId, Sink], plans: Mapping[OperatorId, OperatorPlan]) -> None:
    """Open every sink: before the way back is chosen, because how far they have published decides it."""
    for node in graph.sinks:
        sink = sinks[node.sink]
        sink.open(
            SinkContext(
                flow=graph.flow,
                operator=node.operator,
                sink=node.sink,
                output_mode=graph.output_modes[node.operator],
                schema_ipc=plans[node.operator].schema_ipc,
            )
        )
        if not isinstance(sink, AtOnce):
            check_numbering(sink, node, graph.flow)


def settle_sinks(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], recovered: Recovered, metadata: MetadataStore, layout: Layout
) -> dict[SinkId, Epoch]:
    """Undo what sinks published of a history that was given up, and say how far each one is."""
    for sink in sinks.values():
        # Before it is asked how far it is: whoever was thought dead may have published until now, and does no more.
        if isinstance(sink, Claimable):
            sink.claim()
    recorded, seen = metadata.published(), metadata.seen()
    published: dict[SinkId, Epoch] = {}
    for node in graph.sinks:
        if isinstance(sink := sinks[node.sink], AtOnce):
            sink.remember(seen.get(node.sink, NO_EPOCH), partial(metadata.store_seen, node.sink))
            sink.take_back(recovered.channels[node.operator])
    ahead = {node.sink: sinks[node.sink].published() or NO_EPOCH for node in graph.sinks}
    newest = {
        node.sink: gone_back_to(recovered.manifests, ahead[node.sink]) or epoch_in(recovered.manifests, node.operator)
        for node in graph.sinks
    }
    rewinds: list[tuple[Sink, Epoch]] = []
    for node in graph.sinks:
        name, at = node.sink, newest[node.sink]
        if ahead[name] > at and node.on_rollback == "keep":
            log.warning("sink_keeps_what_was_given_up", flow=graph.flow, sink=name, published=ahead[name], at=at)
        elif ahead[name] > at:
            log.warning("sink_rewound", flow=graph.flow, sink=name, published=ahead[name], to=at)
            # First: killed in between, it must not look as if somebody else had taken the sink back.
            metadata.store_seen(name, NO_EPOCH)
            rewinds.append((sinks[name], at))
    rewind_all(rewinds)
    for node in graph.sinks:
        reached = min(max(ahead[node.sink], recorded.get(node.sink, NO_EPOCH)), newest[node.sink])
        floor = NO_EPOCH if recovered.record.is_per_operator else not_held(recovered.manifests, node.operator)
        # What is not its own to publish is written down nowhere: the flow may go back to where it was another's.
        metadata.store_published(node.sink, reached)
        published[node.sink] = max(reached, floor)
        sink = sinks[node.sink]
        if not isinstance(sink, AtOnce):
            metadata.store_seen(node.sink, sink.published() or NO_EPOCH)
        else:  # it remembers by itself what it has
            complete = newest[node.sink]
            sink.begin(behind=complete if published[node.sink] < complete else NO_EPOCH)
    for manifest in recovered.manifests:
        # Only now: on a host that has lost its records an older one must not make them look complete.
        if manifest.carried_from is not None and manifest.generation == recovered.generation:
            metadata.store_outcome(_completed(manifest, f"epoch {manifest.carried_from}, under other names"))
    _throw_away_what_was_left(recovered, sinks, layout)
    return published


def rewind_all(targets: Sequence[tuple[Sink, Epoch]]) -> None:
    """Take each sink back to its epoch; those that can go together do."""
    groups: dict[object, list[tuple[Sink, Epoch]]] = {}
    for sink, epoch in targets:
        if isinstance(sink, RewindsTogether):
            groups.setdefault(sink.rewind_group(), []).append((sink, epoch))
        else:
            sink.rewind(epoch)
    for members in groups.values():
        first = members[0][0]
        if isinstance(first, RewindsTogether):
            first.rewind_together(members)


def _throw_away_what_was_left(recovered: Recovered, sinks: Mapping[SinkId, Sink], layout: Layout) -> None:
    """Staged output, entries and segments of batches that are no part of the history, under whatever name they ran."""
    record = recovered.record
    left = {name: lineage_of(spans) for name, spans in record.left.items()}
    held = held_files(recovered.manifests, record.begun, layout)
    for name, channel in recovered.channels.items():
        abort_invisible(channel, sinks, left.pop(name, None))
        channel.sweep(held)
    for name, lineage in left.items():
        # Its entries go when no checkpoint needs any of them.
        abort_invisible(ChannelLog(name, layout.channel(name), lineage), sinks)


def abort_invisible(channel: ChannelLog, sinks: Mapping[SinkId, Sink], left: Lineage | None = None) -> None:
    """Throw away what was staged by batches that are no part of the flow's history.

    ``left``: which entries of an older log of the same name are.
    """
    for entry in channel.invisible_entries():
        if left is not None and left.shows(entry.generation, entry.seq):
            continue
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
            metadata.store_outcome(_completed(manifest))
        elif record.epoch in stored:
            metadata.store_outcome(_given_up(record))
        else:
            # An operator that has joined has never heard of it.
            resumable = is_resumable(record.generation, recovered.incarnations) and not recovered.matching.added
            pending.append(StoredPending(epoch=record.epoch, terms=record.terms, is_resumable=resumable))
    return pending


def _completed(manifest: Manifest, reason: str = "") -> EpochOutcome:
    return EpochOutcome(
        epoch=manifest.epoch,
        generation=manifest.generation,
        started_ms=manifest.started_ms,
        ended_ms=manifest.completed_ms,
        outcome="completed",
        reason=reason,
        details=statistics(manifest),
    )


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
