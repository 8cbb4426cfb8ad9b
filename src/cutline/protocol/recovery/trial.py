"""What a plan that could not be built says about its checkpoint."""

from __future__ import annotations

from cutline.errors import CutlineError, MissingObject, RecoveryError, StoreError
from cutline.model.ids import Epoch, FlowName, OperatorId
from cutline.protocol.recovery.facts import Trial
from cutline.protocol.recovery.plan import RestorePlan


def trial_of(
    plan: RestorePlan,
    epoch: Epoch,
    error: CutlineError | OSError,
    *,
    flow: FlowName,
    operator: OperatorId | None = None,
) -> Trial:
    """The fact from which the decision is made again. ``operator``: the one that was restored alone.

    Raises RecoveryError if the error says nothing about the checkpoint: another one must not be restored instead.
    """
    if isinstance(error, RecoveryError):
        raise error
    if isinstance(error, StoreError) and not isinstance(error, MissingObject):
        raise RecoveryError(
            f"whether epoch {epoch} can be restored is unknown: {error.what}",
            next_step=error.next_step or "make the store reachable; nothing has been changed",
            **{"flow": flow, "operator": operator, **error.where},
        ) from error
    is_damage = not isinstance(error, OSError)
    return Trial(
        path=plan.path, tier=plan.tier, epoch=epoch, problem=str(error), operator=operator, is_damage=is_damage
    )
