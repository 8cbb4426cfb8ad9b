"""Builds the manifest of a checkpoint from the acknowledgements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cutline.model.checkpoint import ChannelCut, Manifest, OperatorCut, SubtaskCut
from cutline.model.cut import InFlight, OperatorAck
from cutline.model.history import Identity
from cutline.model.ids import NO_BATCH, NO_CODE, BatchId, CodeHash, FlowName, Generation, OperatorId, Position
from cutline.protocol.history.lineage import Lineage, spans_of
from cutline.protocol.history.retention import flow_time_ms
from cutline.protocol.messages.coordinator import FoundManifest, StoreManifest
from cutline.protocol.publish.publishing import CompleteEpoch


def build_manifest(
    flow: FlowName,
    generation: Generation,
    action: StoreManifest,
    lineages: Mapping[OperatorId, Lineage],
    *,
    before: CompleteEpoch | None,
    completed_ms: int,
    history: Identity = "",
    code: CodeHash = NO_CODE,
) -> Manifest:
    """The record of a checkpoint that all operators have acknowledged; ``before``: the newest complete one.

    ``history``: the identity of the generation in which this process has started; ``code``: what it runs.
    """
    after = before.batches if before else {}
    in_flight: dict[OperatorId, dict[OperatorId, InFlight]] = {name: {} for name in action.acks}
    for consumer, channel, position in _read(action):
        end = action.acks[channel].cut.barrier
        # A consumer that acknowledged before it saw the barrier has not measured the amounts.
        measured = action.acks[consumer].in_flight.get(channel)
        in_flight[channel][consumer] = measured or InFlight(first=position, end=end)
    return Manifest(
        flow=flow,
        epoch=action.epoch,
        generation=generation,
        previous_epoch=action.previous_epoch,
        started_ms=action.started_ms,
        completed_ms=completed_ms,
        flow_ms=flow_time_ms(before, completed_ms, action.pause_ms),
        published=dict(action.published),
        is_inherited=action.is_inherited,
        history=history,
        code=code,
        operators={name: operator_cut(ack, after.get(name, NO_BATCH)) for name, ack in action.acks.items()},
        channels={
            name: ChannelCut(barrier=ack.cut.barrier, lineage=spans_of(lineages[name]), in_flight=in_flight[name])
            for name, ack in action.acks.items()
        },
    )


def _read(action: StoreManifest) -> Iterator[tuple[OperatorId, OperatorId, Position]]:
    """Each consumer, channel, and the position it had read up to. In a per-operator checkpoint nothing is in flight."""
    for consumer, ack in action.acks.items():
        for channel, position in ack.cut.positions.items():
            if channel in action.acks:
                yield consumer, channel, position


def why_not_stored(action: StoreManifest, lineages: Mapping[OperatorId, Lineage]) -> str | None:
    """Why the acknowledged cuts are inconsistent and must not be stored; None if they are consistent."""
    for name, ack in action.acks.items():
        if lineages[name].generation != ack.generation:
            return f"{name} has cut in generation {ack.generation}, but its log is of {lineages[name].generation}"
    for consumer, channel, position in _read(action):
        barrier = action.acks[channel].cut.barrier
        if position > barrier:
            return f"{consumer} had read {channel} up to {position}, past the barrier at {barrier}"
        seen = action.acks[consumer].in_flight.get(channel)
        if seen is not None and (seen.first, seen.end) != (position, barrier):
            return f"{consumer} has seen the barrier of {channel} at {seen.end}, but it is at {barrier}"
    return None


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


def found_manifest(manifest: Manifest) -> FoundManifest:
    return FoundManifest(
        generation=manifest.generation,
        previous_epoch=manifest.previous_epoch,
        batches={name: cut.batch for name, cut in manifest.operators.items()},
    )
