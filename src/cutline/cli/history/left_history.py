"""Savepoints that have left the flow's history: why they cannot be restored, and what can be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cutline.cli.flows_here import FlowHere, storage_flag
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.protocol.history.known_checkpoints import given_up_for, of_present_history
from cutline.protocol.recovery.plan import Refusal, RestorePlan


def explained(
    decision: RestorePlan | Refusal,
    here: FlowHere,
    savepoint: str,
    manifest: Manifest,
    generations: Sequence[GenerationRecord],
) -> RestorePlan | Refusal:
    """The decision; if it refuses a savepoint of a history that was given up, with the reason and a way out.

    ``savepoint``: its name; empty: an epoch is restored. ``manifest``: of what is restored.
    """
    if isinstance(decision, RestorePlan) or not savepoint or of_present_history([manifest], generations):
        return decision
    restored = given_up_for(manifest, generations)
    when = f" when epoch {restored} was restored" if restored is not None else ""
    return replace(
        decision,
        what=f"savepoint {savepoint} cannot be restored: epoch {manifest.epoch} left the flow's history{when}",
        next_step=f"begin a second flow from it: cutline clone {here.flow} {savepoint} NEW_FLOW"
        f"{storage_flag(here.options)}",
    )
