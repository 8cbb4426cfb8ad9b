"""How far each sink of a flow is, by the flow's own records: also of a flow that runs, or has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutline.base.clock import now_ms
from cutline.channels.log import ChannelLog
from cutline.coordinator.manifests import lineage_of
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.ports import Manifest, SnapshotStore
from cutline.ports.inspection import CoordinatorRecords
from cutline.worker.immediate_publishing import is_place


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkView:
    """For people."""

    sink: SinkId
    operator: OperatorId
    #: The newest epoch that it has published, be it without rows; and the newest that had rows for it (not known of
    #: a sink that publishes at once).
    published: Epoch
    with_rows: Epoch
    #: Complete checkpoints that it has yet to publish, and since when the oldest of them waits.
    waiting: list[Epoch]
    waiting_ms: int
    #: What executors have written for it and nobody can see yet.
    staged_batches: int
    staged_rows: int


def sink_views(
    layout: Layout, snapshots: SnapshotStore, known: CoordinatorRecords, manifests: Sequence[Manifest]
) -> list[SinkView]:
    """``manifests``: the complete checkpoints of the present history, ascending. Raises DamagedRecordError."""
    generations = snapshots.generations()
    if not generations:
        return []
    views = []
    for operator, spans in sorted(generations[-1].lineage.items()):
        own = [one for one in manifests if operator in one.operators]
        log = ChannelLog.open(operator, layout.channel(operator), lineage_of(spans), is_reader=True)
        for sink in sorted(_sinks_of(snapshots, own, log, operator)):
            views.append(_view(sink, operator, own, log, known))
    return views


def _sinks_of(
    snapshots: SnapshotStore, manifests: Sequence[Manifest], log: ChannelLog, operator: OperatorId
) -> set[SinkId]:
    """By the newest checkpoint, and by what was staged since."""
    found = set(snapshots.load_record(manifests[-1], operator).sinks) if manifests else set()
    return found.union(*(entry.staged for entry in log.data_entries()))


def _view(
    sink: SinkId, operator: OperatorId, manifests: Sequence[Manifest], log: ChannelLog, known: CoordinatorRecords
) -> SinkView:
    published = known.published.get(sink, NO_EPOCH)
    waiting = [one for one in manifests if one.epoch > published]
    after = _published_batch(operator, manifests, published)
    staged = [entry.staged[sink] for entry in log.data_entries() if entry.batch > after and sink in entry.staged]
    return SinkView(
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
    """The last batch whose rows can be seen, as far as the checkpoints that are kept tell it."""
    before = [one.operators[operator].batch for one in manifests if one.epoch <= published]
    if before:
        return before[-1]
    return manifests[0].operators[operator].after_batch if manifests else NO_BATCH
