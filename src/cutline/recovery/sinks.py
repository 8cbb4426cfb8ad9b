"""Sinks at a start: opened before the recovery path is chosen; claimed, rewound and cleaned after the recovery."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, OtherHistoryError
from cutline.model.graph import FlowGraph
from cutline.model.history import Takeover
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.model.plan import OperatorPlan
from cutline.ports.metadata import MetadataStore
from cutline.ports.sinks import Claimable, RewindsTogether, Sink, SinkContext
from cutline.protocol.history.histories import continued_epoch, history_in, identity_of, with_takeover
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.publish.immediate import check_numbering
from cutline.protocol.recovery.facts import SinkFacts
from cutline.protocol.recovery.sink_rules import SinkSettlement, settle
from cutline.recovery.pending import completed
from cutline.recovery.retired_operators import held_files
from cutline.recovery.start import Recovered
from cutline.worker.immediate_publishing import ImmediateSink
from cutline.worker.reach import record_reach

log = get_logger(__name__)


def open_sinks(graph: FlowGraph, sinks: Mapping[SinkId, Sink], plans: Mapping[OperatorId, OperatorPlan]) -> None:
    """Open every sink before the recovery: what they have published decides which epochs the flow may restore."""
    for node in graph.sinks:
        sink = sinks[node.sink]
        context = SinkContext(
            flow=graph.flow,
            operator=node.operator,
            sink=node.sink,
            output_mode=graph.output_modes[node.operator],
            schema_ipc=plans[node.operator].schema_ipc,
        )
        try:
            sink.open(context)
        except CutlineError as error:
            error.add_where(flow=graph.flow, operator=node.operator, sink=node.sink)
            raise
        if not isinstance(sink, ImmediateSink):
            check_numbering(sink.highest(), node.publish, flow=graph.flow, sink=node.sink)


def settle_sinks(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], recovered: Recovered, metadata: MetadataStore, layout: Layout
) -> dict[SinkId, Epoch]:
    """Rewind what sinks published of a history that was given up; returns the newest epoch of each."""
    _claim_all(graph, sinks, recovered, layout)
    seen = metadata.seen()
    for node in graph.sinks:
        if isinstance(sink := sinks[node.sink], ImmediateSink):
            sink.remember(seen.get(node.sink, NO_EPOCH), partial(metadata.store_seen, node.sink))
            sink.rewind_given_up(recovered.channels[node.operator])
    settled = _rewound(graph, sinks, recovered, metadata)
    for name, one in settled.items():
        # Epochs that it does not publish itself are not recorded: a restore may give them to another sink.
        metadata.store_published(name, one.reached)
        sink = sinks[name]
        if not isinstance(sink, ImmediateSink):
            metadata.store_seen(name, sink.published() or NO_EPOCH)
            record_reach(sink, name, one.reached, is_per_operator=recovered.record.is_per_operator, at_start=True)
        else:  # it records its own position
            sink.begin(behind=one.newest if one.published < one.newest else NO_EPOCH)
    for manifest in recovered.manifests:
        # Only now: on a host that has lost its records, an older record must not make them look complete.
        if manifest.carried_from is not None and manifest.generation == recovered.generation:
            metadata.store_outcome(completed(manifest, f"epoch {manifest.carried_from}, under other names"))
    _abort_given_up(recovered, sinks, layout)
    return {name: one.published for name, one in settled.items()}


def _claim_all(graph: FlowGraph, sinks: Mapping[SinkId, Sink], recovered: Recovered, layout: Layout) -> None:
    """Claim the sinks before their ledgers are read: a process that was thought dead may have published until now.

    Each claim replaces the one that the recovery path was chosen by: of two starts from two storages, one fails. In the
    order of the graph, so that the loser has claimed nothing.
    """
    record, own = recovered.record, recovered.known
    claimed: list[tuple[Claimable, str]] = []
    for node in graph.sinks:
        if not isinstance(sink := sinks[node.sink], Claimable):
            continue
        takeover = Takeover(
            generation=record.generation,
            identity=identity_of(record),
            epoch=continued_epoch(
                recovered.restored_epoch, recovered.manifests, node.operator, is_per_operator=record.is_per_operator
            ),
            started_ms=record.started_ms,
            host=record.host,
            # Any bytes may name a folder, but not every text can be stored.
            storage=os.fsencode(layout.root).decode(errors="replace"),
        )
        before = recovered.claims.get(node.sink, "")
        sink.claim(with_takeover(before, takeover, own), expected=before)
        claimed.append((sink, before))
        published, newest = sinks[node.sink].published() or NO_EPOCH, recovered.newest_to_find
        if newest is not None and published > newest:
            for one, former in reversed(claimed):
                one.claim(history_in(former), expected=one.claimed())
            raise OtherHistoryError(
                f"this storage is older than the flow: sink {node.sink} has published epoch {published} meanwhile",
                next_step="start the flow from its newest storage; this start has rewound nothing",
                flow=graph.flow,
            )


def _rewound(
    graph: FlowGraph, sinks: Mapping[SinkId, Sink], recovered: Recovered, metadata: MetadataStore
) -> dict[SinkId, SinkSettlement]:
    """Rewind the sinks that are ahead of the history; returns the newest epoch of each in it."""
    recorded = metadata.published()
    settled: dict[SinkId, SinkSettlement] = {}
    rewinds: list[tuple[Sink, Epoch]] = []
    for node in graph.sinks:
        name, sink = node.sink, sinks[node.sink]
        facts = SinkFacts(
            sink=name,
            operator=node.operator,
            published=sink.published() or NO_EPOCH,
            recorded=recorded.get(name, NO_EPOCH),
            on_rollback=node.on_rollback,
        )
        one = settle(facts, recovered.manifests, is_per_operator=recovered.record.is_per_operator)
        settled[name] = one
        where = {"flow": graph.flow, "sink": name, "published": facts.published}
        if one.keeps:
            log.warning("sink_keeps_what_was_given_up", **where, at=one.newest)
        elif one.rewind_to is not None:
            log.warning("sink_rewound", **where, to=one.rewind_to)
            # First: killed in between, the sink must not look as if another program had rewound it.
            metadata.store_seen(name, NO_EPOCH)
            rewinds.append((sink, one.rewind_to))
    rewind_all(rewinds)
    return settled


def rewind_all(targets: Sequence[tuple[Sink, Epoch]]) -> None:
    """Rewind each sink to its epoch; sinks with equal keys are rewound in one transaction."""
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


def _abort_given_up(recovered: Recovered, sinks: Mapping[SinkId, Sink], layout: Layout) -> None:
    """Remove staged output, entries and segments of batches that do not belong to the history, under any name."""
    record = recovered.record
    left = {name: lineage_of(spans) for name, spans in record.left.items()}
    held = held_files(recovered.manifests, record.begun, layout)
    for name, channel in recovered.channels.items():
        abort_invisible(channel, sinks, left.pop(name, None))
        channel.collect(held)
    for name, lineage in left.items():
        # Its entries are collected when no checkpoint needs any of them.
        abort_invisible(ChannelLog(name, layout.channel(name), lineage), sinks)


def abort_invisible(channel: ChannelLog, sinks: Mapping[SinkId, Sink], left: Lineage | None = None) -> None:
    """Discard the staged output of batches that do not belong to the flow's history.

    ``left``: which entries of an older log of the same name are.
    """
    for entry in channel.invisible_entries():
        if left is not None and left.shows(entry.generation, entry.seq):
            continue
        for name, staged in getattr(entry, "staged", {}).items():
            if name in sinks:
                sinks[name].abort([staged])
