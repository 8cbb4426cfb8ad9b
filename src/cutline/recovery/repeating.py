"""Per-operator mode: runs the batches in an operator's log again, exactly as they were planned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cutline.base import durable
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError, DamagedRecordError
from cutline.model.checkpoint import Manifest
from cutline.model.entries import DataEntry
from cutline.model.ids import NO_BATCH, START, BatchId, Generation, OperatorId, Position
from cutline.protocol.recovery.facts import Trial
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.trial import trial_of
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.directories import verified_record
from cutline.recovery.logs import check_segments

log = get_logger(__name__)

Logs = Mapping[OperatorId, ChannelLog]


def check_repeatable(flow: FlowAtRest, operator: OperatorId, committed: BatchId, logs: Logs) -> None:
    """Raise DamagedRecordError if its log does not say how to continue after the last committed batch."""
    own = logs[operator]
    if committed < own.last_batch:
        _to_repeat(flow, operator, committed, own.positions_after(committed), logs)


def build_alone(flow: FlowAtRest, operator: OperatorId, manifest: Manifest | None, logs: Logs, folder: Path) -> None:
    """A directory from which one operator catches up with its own log, which stays as it is.

    Built from its snapshot in this checkpoint; None: without state. Raises DamagedRecordError if that is impossible.
    """
    if manifest is None:
        repeated = _to_repeat(flow, operator, NO_BATCH, {}, logs)
        flow.query_dirs.begin_anew(folder)
    else:
        cut = manifest.operators[operator]
        repeated = _to_repeat(flow, operator, cut.batch, cut.positions, logs)
        flow.query_dirs.restore(verified_record(flow.checkpoints, manifest, operator), folder)
    # Without state there is nothing to rebuild: the query begins at the end of its log.
    for entry in repeated if not flow.plans[operator].is_stateful else ():
        flow.query_dirs.put_plan(folder, entry.batch, entry.plan)
        flow.query_dirs.commit_plan(folder, entry.batch)
    durable.sync_tree(folder)


def build_each_alone(flow: FlowAtRest, plan: RestorePlan, logs: Logs, generation: Generation) -> Trial | None:
    """Directories of the operators that the plan restores alone; their logs are unchanged. A trial: of one that failed.

    Raises RecoveryError if an error says nothing about the checkpoint.
    """
    manifests = {one.epoch: one for one in plan.manifests}
    for name, epoch in plan.alone.items():
        try:
            build_alone(flow, name, manifests.get(epoch), logs, flow.layout.spark_checkpoint_dir(name, generation))
        except (CutlineError, OSError) as error:
            return trial_of(plan, epoch, error, flow=flow.graph.flow, operator=name)
        log.warning("operator_restored_alone", flow=flow.graph.flow, operator=name, epoch=epoch)
    return None


def _to_repeat(
    flow: FlowAtRest, operator: OperatorId, after: BatchId, read: Mapping[OperatorId, Position], logs: Logs
) -> list[DataEntry]:
    """The batches in its log after ``after``, checked for all that is needed to run them again."""
    own = logs[operator]
    entries = [entry for entry in own.data_entries() if entry.batch > after]
    if [entry.batch for entry in entries] != list(range(after + 1, own.last_batch + 1)):
        raise DamagedRecordError(f"its log does not hold all batches after {after}", channel=operator)
    unplanned = [entry.batch for entry in entries if not entry.plan]
    if unplanned:
        raise DamagedRecordError(f"its log does not say how batch {unplanned[0]} was planned", channel=operator)
    # Without state no batch runs again, so no input is read again.
    for name in flow.graph.node(operator).inputs if flow.plans[operator].is_stateful else ():
        first = read.get(name, START)
        if logs[name].start > first:
            raise DamagedRecordError(f"log begins at {logs[name].start}, needed from {first}", channel=name)
        for entry in logs[name].data_entries(first):
            check_segments(logs[name], entry, flow=flow.graph.flow)
    return entries
