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
    failed = {one.epoch: one for one in trials if one.operator == operator}
    for manifest in reversed([one for one in manifests if operator in one.operators]):
        if manifest.epoch not in failed:
            return manifest.epoch
        note(f"epoch {manifest.epoch} of {operator} cannot be used: {failed[manifest.epoch].problem}")
    if NO_EPOCH not in failed:
        return NO_EPOCH
    last = failed[NO_EPOCH]
    why = "its log does not reach back to the beginning" if last.is_damage else "it cannot begin without state either"
    raise RecoveryError(
        f"none of its checkpoints can be used, and {why}: {last.problem}",
        next_step="restore the storage folder from a backup, or start over under a new flow name"
        if last.is_damage
        else "fix the cause, then restart the flow; nothing has been changed",
        flow=flow,
        operator=operator,
    )
