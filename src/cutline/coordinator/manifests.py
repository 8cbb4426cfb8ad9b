"""What is written down of a checkpoint: the manifest from the acknowledgements, and figures for the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cutline.channels.log import ChannelLog
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, FlowName, Generation, OperatorId, Position
from cutline.ports import ChannelCut, GenerationRecord, InFlight, Manifest, OperatorCut, Spans, SubtaskCut
from cutline.protocol.checkpoint.pending_epoch import PendingEpoch
from cutline.protocol.history import epochs as recovery
from cutline.protocol.history.lineage import Lineage, Span
from cutline.protocol.messages.coordinator import FoundManifest, OperatorAck, StoreManifest
from cutline.protocol.publish.publishing import CompleteEpoch

#: More epochs than a host begins between two copies to the remote tier.
_LOST_WITH_A_HOST = 1_000


def build_manifest(
    flow: FlowName,
    generation: Generation,
    action: StoreManifest,
    channels: Mapping[OperatorId, ChannelLog],
    *,
    before: CompleteEpoch | None,
    completed_ms: int,
) -> Manifest:
    """The record of a checkpoint that everybody has acknowledged; ``before``: the newest complete one."""
    after = before.batches if before else {}
    read: dict[OperatorId, dict[OperatorId, Position]] = {name: {} for name in action.acks}
    for consumer, ack in action.acks.items():
        for channel, position in ack.cut.positions.items():
            if channel in read:  # no operator of a per-operator checkpoint has anything in flight
                read[channel][consumer] = position
    return Manifest(
        flow=flow,
        epoch=action.epoch,
        generation=generation,
        previous_epoch=action.previous_epoch,
        started_ms=action.started_ms,
        completed_ms=completed_ms,
        is_inherited=action.is_inherited,
        operators={name: operator_cut(ack, after.get(name, NO_BATCH)) for name, ack in action.acks.items()},
        channels={name: channel_cut(channels[name], ack.cut.barrier, read[name]) for name, ack in action.acks.items()},
    )


def operator_cut(ack: OperatorAck, after_batch: BatchId = NO_BATCH) -> OperatorCut:
    timings = ack.timings
    return OperatorCut(
        generation=ack.generation,
        batch=ack.cut.batch,
        after_batch=after_batch,
        barrier=ack.cut.barrier,
        positions=dict(ack.cut.positions),
        mode="aligned" if ack.cut.aligned else "unaligned",
        watermark_ms=ack.watermark_ms,
        record_sha256=ack.record_sha256,
        files=sum(subtask.files for subtask in ack.subtasks),
        size_bytes=sum(subtask.size_bytes for subtask in ack.subtasks),
        new_bytes=sum(subtask.new_bytes for subtask in ack.subtasks),
        start_delay_ms=timings.start_delay_ms,
        alignment_ms=timings.alignment_ms,
        sync_ms=timings.sync_ms,
        async_ms=timings.async_ms,
        total_ms=round(timings.start_delay_ms + timings.alignment_ms + timings.sync_ms + timings.async_ms, 3),
        subtasks=[
            SubtaskCut(
                subtask=subtask.subtask,
                files=subtask.files,
                size_bytes=subtask.size_bytes,
                new_bytes=subtask.new_bytes,
                async_ms=subtask.async_ms,
            )
            for subtask in sorted(ack.subtasks, key=lambda one: one.subtask)
        ],
    )


def channel_cut(channel: ChannelLog, barrier: Position, read: Mapping[OperatorId, Position]) -> ChannelCut:
    """The channel's state is what lies between each consumer's position (``read``) and the barrier."""
    in_flight = {}
    for consumer, first in read.items():
        amount = channel.amount(first, barrier)
        in_flight[consumer] = InFlight(
            first=first, end=barrier, entries=amount.entries, rows=amount.rows, size_bytes=amount.size_bytes
        )
    return ChannelCut(
        barrier=barrier,
        lineage=spans_of(channel.lineage),
        in_flight=in_flight,
    )


def read_past_barrier(manifest: Manifest) -> str | None:
    """Why a cut must not become a checkpoint: never seen, and never to be stored."""
    for name, cut in manifest.channels.items():
        for consumer, flight in cut.in_flight.items():
            if flight.first > cut.barrier:
                return f"{consumer} had read {name} up to {flight.first}, past the barrier at {cut.barrier}"
    return None


def newest_of(manifests: Sequence[Manifest], operator: OperatorId) -> Manifest | None:
    """The newest one that holds a snapshot of this operator, of manifests in ascending order."""
    return next((manifest for manifest in reversed(manifests) if operator in manifest.operators), None)


def batch_in(manifests: Sequence[Manifest], operator: OperatorId) -> BatchId:
    """The operator's cut batch in its newest complete epoch."""
    newest = newest_of(manifests, operator)
    return newest.operators[operator].batch if newest else NO_BATCH


def epoch_in(manifests: Sequence[Manifest], operator: OperatorId) -> Epoch:
    """The operator's newest complete epoch."""
    newest = newest_of(manifests, operator)
    return newest.epoch if newest else NO_EPOCH


def not_held(manifests: Iterable[Manifest], operator: OperatorId) -> Epoch:
    """The newest checkpoint of the whole flow that has nothing of an operator: its sinks publish nothing of that."""
    return max((one.epoch for one in manifests if operator not in one.operators), default=NO_EPOCH)


def lineage_of(spans: Spans) -> Lineage:
    return Lineage(spans=tuple(Span(generation, start) for generation, start in spans))


def spans_of(lineage: Lineage) -> Spans:
    return [(span.generation, span.start) for span in lineage.spans]


def is_of_history(
    manifest: Manifest, lineages: Mapping[OperatorId, Lineage], begun: Mapping[OperatorId, Generation] | None = None
) -> bool:
    """Whether a checkpoint belongs to the logs as they are read now; see ``cutline.protocol.history.epochs``.

    ``begun``: operators whose log was begun anew, and since when. What an older checkpoint says of one of the same name
    is about another log.
    """
    since = begun or {}
    same = {name: cut for name, cut in manifest.channels.items() if since.get(name, 0) <= manifest.generation}
    return recovery.is_of_history(
        {name: cut.barrier for name, cut in same.items()},
        {name: lineage_of(cut.lineage) for name, cut in same.items()},
        lineages,
    )


def incarnations_of(generations: Iterable[GenerationRecord]) -> list[recovery.Incarnation]:
    return [
        recovery.Incarnation(generation=one.generation, restored_epoch=one.restored_epoch, is_fresh=one.path == "fresh")
        for one in generations
    ]


def of_present_history(manifests: Iterable[Manifest], generations: Sequence[GenerationRecord]) -> list[Manifest]:
    """Those that the flow goes on from, ascending: none that it went back behind, none that an old life completed."""
    by_epoch = {manifest.epoch: manifest for manifest in manifests}
    stored = ((epoch, manifest.generation) for epoch, manifest in by_epoch.items())
    live = [by_epoch[epoch] for epoch in recovery.live_epochs(stored, incarnations_of(generations))]
    if not generations:
        return live
    newest, known = generations[-1], {one.generation for one in generations}
    lineages = {name: lineage_of(spans) for name, spans in newest.lineage.items()}
    return [
        manifest
        for manifest in live
        if is_of_history(manifest, lineages, newest.begun)
        and (manifest.carried_from is None or manifest.generation in known)
    ]


def gone_back_to(manifests: Iterable[Manifest], published: Epoch) -> Epoch | None:
    """The epoch that a sink must be taken back to which has published an epoch that was given up; None if it has not.

    A checkpoint that was carried over has a higher number than those that were given up for it.
    """
    for manifest in manifests:
        if manifest.carried_from is not None and manifest.carried_from < published < manifest.epoch:
            return manifest.carried_from
    return None


def complete_epoch(manifest: Manifest) -> CompleteEpoch:
    """What the coordinator must know of a checkpoint that was complete before it came."""
    return CompleteEpoch(
        epoch=manifest.epoch,
        generation=manifest.generation,
        previous_epoch=manifest.previous_epoch,
        batches={name: cut.batch for name, cut in manifest.operators.items()},
        completed_ms=manifest.completed_ms,
        after_batches={name: cut.after_batch for name, cut in manifest.operators.items()},
    )


def found_manifest(manifest: Manifest) -> FoundManifest:
    return FoundManifest(
        generation=manifest.generation,
        previous_epoch=manifest.previous_epoch,
        batches={name: cut.batch for name, cut in manifest.operators.items()},
    )


def highest_epoch(recorded: Epoch, seen: Iterable[Epoch]) -> Epoch:
    """The highest epoch anybody has ever seen, wherever: a number is never used twice.

    ``recorded``: by the coordinator's own records.
    """
    highest = max([recorded, *seen])
    # The lost host may have begun epochs that nobody else has heard of. Its records went with it: ours are empty.
    are_records_lost = recorded == NO_EPOCH and highest > NO_EPOCH
    return Epoch(highest + _LOST_WITH_A_HOST) if are_records_lost else highest


# --------------------------------------------------------------------------- figures


def statistics(manifest: Manifest) -> dict[str, Any]:
    """Of a complete checkpoint, for people; the subtasks' figures are in the manifest only."""
    in_flight = [flight for cut in manifest.channels.values() for flight in cut.in_flight.values()]
    cuts = manifest.operators
    return {
        "duration_ms": manifest.completed_ms - manifest.started_ms,
        "size_bytes": sum(cut.size_bytes for cut in cuts.values()),
        "new_bytes": sum(cut.new_bytes for cut in cuts.values()),
        "in_flight_entries": sum(flight.entries for flight in in_flight),
        "in_flight_rows": sum(flight.rows for flight in in_flight),
        "in_flight_bytes": sum(flight.size_bytes for flight in in_flight),
        "unaligned_operators": sorted(name for name, cut in cuts.items() if cut.mode == "unaligned"),
        "operators": {name: _figures(cut) for name, cut in cuts.items()},
    }


def abort_details(pending: PendingEpoch, *, ended_ms: int) -> dict[str, Any]:
    """Of an aborted checkpoint, for people: who had acknowledged, and with what; who had not."""
    return {
        "duration_ms": max(ended_ms - pending.started_ms, 0),
        "operators": {name: _figures(operator_cut(ack)) for name, ack in pending.merged_acks().items()},
        "missing": {name: list(subtasks) for name, subtasks in pending.missing().items()},
    }


def _figures(cut: OperatorCut) -> dict[str, Any]:
    return {
        "generation": cut.generation,
        "batch": cut.batch,
        "mode": cut.mode,
        "subtasks": len(cut.subtasks),
        "files": cut.files,
        "size_bytes": cut.size_bytes,
        "new_bytes": cut.new_bytes,
        "start_delay_ms": cut.start_delay_ms,
        "alignment_ms": cut.alignment_ms,
        "sync_ms": cut.sync_ms,
        "async_ms": cut.async_ms,
        "total_ms": cut.total_ms,
    }
