"""Per-operator mode: the checkpoint from which one operator catches up with its own log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cutline.errors import RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, OperatorId
from cutline.protocol.recovery.facts import Trial


def epoch_alone(
    operator: OperatorId,
    manifests: Sequence[Manifest],
    trials: Iterable[Trial],
    *,
    flow: FlowName,
    note: Callable[[str], None],
) -> Epoch:
    """The newest of its epochs that has not failed in a trial; NO_EPOCH: without state, from the beginning of its log.

    Raises RecoveryError if that has failed too.
    """
    failed = {one.epoch: one.problem for one in trials if one.operator == operator}
    for manifest in reversed([one for one in manifests if operator in one.operators]):
        if manifest.epoch not in failed:
            return manifest.epoch
        note(f"epoch {manifest.epoch} of {operator} cannot be used: {failed[manifest.epoch]}")
    if NO_EPOCH not in failed:
        return NO_EPOCH
    raise RecoveryError(
        f"none of its checkpoints can be used, and its log does not reach back to the beginning: {failed[NO_EPOCH]}",
        next_step="restore the storage folder from a backup, or start over under a new flow name",
        flow=flow,
        operator=operator,
    )
