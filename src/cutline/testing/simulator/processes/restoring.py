"""What a restore builds on a disk: directories from snapshots, forked logs, and the record of the generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_BATCH, Epoch, Generation, OperatorId
from cutline.protocol.history.lineage import Lineage, spans_of
from cutline.testing.simulator.storage.checkpoints import Checkpoint
from cutline.testing.simulator.storage.disk import Disk
from cutline.testing.simulator.storage.spark_dir import SparkDir
from cutline.testing.simulator.world import Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow


def place_snapshot(disk: Disk, checkpoint: Checkpoint | None, operator: OperatorId, generation: Generation) -> None:
    """A fresh directory from a snapshot; without one, from nothing."""
    spark = disk.spark[operator, generation] = SparkDir()
    if checkpoint is None:
        return
    record = disk.record_of(checkpoint, operator)
    if record is None or any(blob not in disk.blobs for blob in record.blobs):
        raise Violation(f"epoch {checkpoint.manifest.epoch} cannot be restored: content of {operator} is gone")
    if record.batch != NO_BATCH:
        spark.planned[record.batch] = (record.positions, 0)
        spark.committed = record.batch
        spark.states = {record.batch: record.counts()}


def gone_on(disk: Disk, operator: OperatorId, lineage: Lineage, generation: Generation) -> Lineage:
    """The lineage of a log that goes on at its end, which is synced first: the generation's record will rest on it."""
    disk.logs[operator].sync_end(lineage)
    return lineage.fork(generation, disk.logs[operator].view(lineage).end)


def record_of(
    flow: SimulatedFlow,
    generation: Generation,
    *,
    path: str,
    epoch: Epoch | None,
    lineage: Mapping[OperatorId, Lineage],
    spark_dirs: Mapping[OperatorId, Generation],
    reason: str = "",
) -> GenerationRecord:
    return GenerationRecord(
        generation=generation,
        started_ms=flow.world.now_ms,
        path=path,
        restored_epoch=epoch,
        reason=reason,
        lineage={name: spans_of(one) for name, one in lineage.items()},
        spark_dirs=dict(spark_dirs),
        inputs={name: list(inputs) for name, inputs in flow.graph.inputs.items()},
        schemas=dict.fromkeys(flow.graph.operators, ""),
        is_per_operator=flow.settings.is_per_operator,
        identity=flow.site.new_identity(),
        host=flow.disk.name,
    )
