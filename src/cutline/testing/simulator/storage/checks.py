"""What must hold of a disk whenever something is stored there or deleted. The simulator trusts no one here."""

from __future__ import annotations

from cutline.model.entries import BarrierEntry
from cutline.model.generation import GenerationRecord
from cutline.model.ids import Epoch, OperatorId, Position
from cutline.protocol.history.lineage import lineage_of
from cutline.testing.simulator.storage.checkpoints import Blob, Checkpoint
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.storage.log import Data
from cutline.testing.simulator.storage.sinks import SinkTarget
from cutline.testing.simulator.storage.spark_dir import Counts
from cutline.testing.simulator.world import Violation


def is_live(disk: Disk, checkpoint: Checkpoint) -> bool:
    """Whether the flow goes on from it. Said anew here, and not by the protocol's rule."""
    manifest, newest = checkpoint.manifest, disk.newest_generation()
    if newest is not None:
        for name, cut in manifest.channels.items():
            barrier = cut.barrier
            if lineage_of(newest.lineage[name]).owner(barrier) != checkpoint.lineages[name].owner(barrier):
                return False  # completed by an old process, in logs that are no longer read
    return not any(
        one.generation > manifest.generation and _gives_up(one, manifest.epoch) for one in disk.generations.values()
    )


def _gives_up(record: GenerationRecord, epoch: Epoch) -> bool:
    return record.path == "fresh" or (record.restored_epoch is not None and record.restored_epoch < epoch)


def check_completed(disk: Disk, checkpoint: Checkpoint) -> None:
    """A manifest was created: every part is there, and the cut is consistent."""
    epoch = checkpoint.manifest.epoch
    if not is_live(disk, checkpoint):
        return
    if disk.outcomes.get(epoch) == "aborted":
        raise Violation(f"epoch {epoch} was aborted and is completed now")
    check_reachable(disk, checkpoint)
    check_acknowledged(disk, checkpoint)
    if len(checkpoint.manifest.operators) == len(disk.graph.operators):
        _check_cut(disk, checkpoint)


def check_reachable(disk: Disk, checkpoint: Checkpoint) -> None:
    """Everything that a restore to this epoch needs is there."""
    manifest = checkpoint.manifest
    for operator in manifest.operators:
        record = disk.record_of(checkpoint, operator)
        if record is None:
            raise Violation(f"epoch {manifest.epoch} is complete without the snapshot of {operator}")
        if len(record.blobs) != disk.graph.subtasks[operator]:
            raise Violation(f"epoch {manifest.epoch} is complete without all subtasks of {operator}")
        missing = [blob for blob in record.blobs if blob not in disk.blobs]
        if missing:
            raise Violation(f"epoch {manifest.epoch} lacks content of {operator}: {missing[0]}")
    if manifest.epoch in disk.detached:
        return  # all that it had in flight is stored with it
    for channel, cut in manifest.channels.items():
        first, view = checkpoint.needs.channels[channel], disk.logs[channel].view(checkpoint.lineages[channel])
        for seq in range(first, cut.barrier + 1):
            if view.find(Position(seq)) is None:
                raise Violation(f"epoch {manifest.epoch} needs entry {seq} of {channel}, which is gone")
    for channel, first in checkpoint.needs.channels.items():
        if disk.logs[channel].start > first:
            raise Violation(f"epoch {manifest.epoch} needs entry {first} of {channel}, which is gone")


def check_acknowledged(disk: Disk, checkpoint: Checkpoint) -> None:
    """What the manifest says of a cut is what the log says, and an aligned cut is aligned."""
    manifest = checkpoint.manifest
    for name, cut in manifest.operators.items():
        barrier = disk.logs[name].view(checkpoint.lineages[name]).find(cut.barrier)
        if not isinstance(barrier, BarrierEntry) or (barrier.epoch, barrier.batch) != (manifest.epoch, cut.batch):
            raise Violation(f"epoch {manifest.epoch}: {name} has no barrier of it at {cut.barrier}")
        if cut.mode == "aligned" and checkpoint.alone is None:
            for channel, position in cut.positions.items():
                rows = _in_flight(disk, checkpoint, channel, position)
                if rows:
                    raise Violation(f"epoch {manifest.epoch}: {name} says aligned, and {channel} had {rows} in flight")
        elif cut.positions and barrier.is_binding and barrier.alignment_limit_ms is None and barrier.alone is None:
            raise Violation(f"epoch {manifest.epoch}: {name} was told to wait for alignment, and did not")


def _in_flight(disk: Disk, checkpoint: Checkpoint, channel: OperatorId, position: Position) -> Counts:
    flight: Counts = {}
    view = disk.logs[channel].view(checkpoint.lineages[channel])
    for entry in view.between(position, checkpoint.manifest.channels[channel].barrier):
        for path, _, count in entry.content if isinstance(entry, Data) else ():
            flight[path] = flight.get(path, 0) + count
    return flight


def _check_cut(disk: Disk, checkpoint: Checkpoint) -> None:
    """Per channel: what the producer had sent is what the consumer had taken in, plus what was in flight."""
    manifest, graph = checkpoint.manifest, disk.graph
    counts: dict[OperatorId, Counts] = {}
    for operator in graph.operators:
        record = disk.record_of(checkpoint, operator)
        if record is None:
            raise Violation(f"epoch {manifest.epoch} is complete without the snapshot of {operator}")
        counts[operator] = record.counts()
    for reader, cut in manifest.operators.items():
        for channel, position in cut.positions.items():
            if position > manifest.channels[channel].barrier:
                raise Violation(f"epoch {manifest.epoch}: {reader} had read {channel} past its barrier")
            flight = _in_flight(disk, checkpoint, channel, position)
            for path in graph.paths[channel].values():
                sent = counts[channel].get(path, 0)
                taken = counts[reader].get(graph.paths[reader][channel, path], 0)
                if sent != taken + flight.get(path, 0):
                    raise Violation(
                        f"epoch {manifest.epoch} is no consistent cut: {channel} had sent {sent} rows "
                        f"of path {path}, {reader} had taken {taken}, {flight.get(path, 0)} were in flight"
                    )


# ------------------------------------------------------------------------------------------------- collecting


def check_released(disk: Disk, checkpoint: Checkpoint, sinks: list[SinkTarget]) -> None:
    """A manifest was deleted: nothing may need it."""
    manifest = checkpoint.manifest
    if not is_live(disk, checkpoint):
        return
    if manifest.epoch in disk.pins:
        raise Violation(f"epoch {manifest.epoch} is pinned and was deleted")
    behind = [one.sink for one in sinks if is_unpublished(disk, one, checkpoint)]
    if behind:
        raise Violation(f"epoch {manifest.epoch} was deleted before {behind[0]} had published it")
    later = [one for one in disk.complete() if one.manifest.epoch > manifest.epoch]
    if not any(one.alone == checkpoint.alone for one in later):
        raise Violation(f"epoch {manifest.epoch} was deleted, and there is no later one")


def is_unpublished(disk: Disk, target: SinkTarget, checkpoint: Checkpoint) -> bool:
    """Whether a sink needs what it has staged for the epoch."""
    record = disk.record_of(checkpoint, target.operator)
    epoch = checkpoint.manifest.epoch
    if record is None or epoch <= disk.published.get(target.sink, 0):
        return False
    return not target.is_immediate and epoch > target.ledger.published


def check_unneeded(disk: Disk, blob: Blob) -> None:
    for checkpoint in disk.complete():
        record = disk.record_of(checkpoint, blob[0])
        if record is not None and blob in record.blobs and is_live(disk, checkpoint):
            raise Violation(f"epoch {checkpoint.manifest.epoch} needs content that was deleted: {blob}")


def check_truncation(disk: Disk, channel: OperatorId, seq: Position) -> None:
    """Entries up to this one are about to go: no checkpoint may need them."""
    for checkpoint in disk.complete():
        needed = checkpoint.needs.channels.get(channel)
        is_detached = checkpoint.manifest.epoch in disk.detached
        if needed is not None and seq >= needed and is_live(disk, checkpoint) and not is_detached:
            raise Violation(f"entry {seq} of {channel} was deleted, epoch {checkpoint.manifest.epoch} needs it")
