"""Continuing where the flow was: all of it, or all that is not damaged."""

from __future__ import annotations

from typing import NoReturn

from cutline.errors import RecoveryError
from cutline.model.generation import GenerationRecord, LostInput
from cutline.model.ids import OperatorId
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.known_checkpoints import batch_in, epoch_in
from cutline.protocol.history.regions import region_of
from cutline.protocol.recovery import history_rules, sink_rules
from cutline.protocol.recovery.alone import epoch_alone
from cutline.protocol.recovery.facts import NeedInputAhead, NeedLive, NeedSegments
from cutline.protocol.recovery.inquiry import Inquiry
from cutline.protocol.recovery.live_state import damage_of, unread_from
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.present_history import History


def continuing(inquiry: Inquiry, history: History, evolution: Evolution) -> RestorePlan | None:
    """Continue as much of the flow as possible; None if nothing can continue."""
    damaged = _damaged(inquiry, history.generations[-1], history, evolution)
    # Sinks may have published an epoch that cannot be read: continuing past it would publish its batches again.
    if history.is_unreadable_at_end or _are_sinks_ahead(inquiry, history) or damaged is None:
        return None
    if not damaged:
        return _resume(inquiry, history, evolution)
    there = frozenset(inquiry.definition.names) - frozenset(evolution.added)
    region = region_of(damaged, inquiry.definition.consumers()) & there
    if not history.manifests or region == there:
        return None
    return _regional(inquiry, region, history, evolution)


def each_alone(inquiry: Inquiry, history: History, evolution: Evolution) -> RestorePlan:
    """Per-operator mode: everything continues; an operator whose directory is damaged is restored alone.

    It catches up with its own log. Raises RecoveryError if more than directories is damaged.
    """
    for epoch in history.unreadable:
        # An operator's newest epoch must be readable: its sinks may have published it.
        owners = history.owners.get(epoch) or frozenset(inquiry.definition.names)
        if any(epoch > epoch_in(history.manifests, owner) for owner in owners):
            refuse_beyond_repair(inquiry, "; ".join(inquiry.problems))
    damaged = _damaged(inquiry, history.generations[-1], history, evolution)
    if damaged is None or _are_sinks_ahead(inquiry, history):
        refuse_beyond_repair(inquiry, "; ".join(inquiry.problems))
    if not damaged:
        return _resume(inquiry, history, evolution)
    reason, facts = "; ".join(inquiry.problems), inquiry.facts
    flow = inquiry.definition.flow
    alone = {
        name: epoch_alone(name, history.manifests, facts.trials, flow=flow, note=inquiry.note)
        for name in sorted(damaged)
    }
    return RestorePlan(
        path="alone",
        tier="local",
        reason=reason,
        manifests=history.manifests,
        alone=alone,
        evolution=evolution,
        problems=tuple(inquiry.problems),
    )


def refuse_beyond_repair(inquiry: Inquiry, why: str) -> NoReturn:
    raise RecoveryError(
        f"in per-operator mode the logs and the newest checkpoints must be whole: {why}",
        next_step="restore the storage folder from a backup, or start over under a new flow name",
        flow=inquiry.definition.flow,
    )


def _damaged(
    inquiry: Inquiry, current: GenerationRecord, history: History, evolution: Evolution
) -> frozenset[OperatorId] | None:
    """Operators whose directory is damaged; None if a log is damaged, or lacks entries that will be read."""
    facts, definition = inquiry.facts, inquiry.definition
    names = [name for name in definition.names if name not in evolution.added]
    complete = {name: batch_in(history.manifests, name) for name in names}
    live = inquiry.known(facts.live, NeedLive(generation=current, complete=complete))
    history_rules.refuse_older_log(inquiry, live)
    first = unread_from(live, definition)
    missing = inquiry.known(facts.missing_segments, NeedSegments(first=first))
    found = damage_of(live, history.manifests, first, missing)
    for problem in found.problems:
        inquiry.note(problem)
    return found.damaged if found.are_logs_whole else None


def _are_sinks_ahead(inquiry: Inquiry, history: History) -> bool:
    problems = sink_rules.ahead_of(inquiry.facts.sinks, history.manifests)
    for problem in problems:
        inquiry.note(problem)
    return bool(problems)


def _resume(inquiry: Inquiry, history: History, evolution: Evolution) -> RestorePlan:
    lost = inquiry.lost_ahead(inquiry.known(inquiry.facts.input_ahead, NeedInputAhead()))
    return RestorePlan(
        path="resume",
        reason="live directories and logs are intact",
        manifests=history.manifests,
        joined=evolution.added,
        evolution=evolution,
        lost_input=lost,
        problems=tuple(inquiry.problems),
    )


def _regional(
    inquiry: Inquiry, region: frozenset[OperatorId], history: History, evolution: Evolution
) -> RestorePlan | None:
    """Restore only what is damaged and everything downstream; None if the newest checkpoint cannot be used."""
    manifest = history.manifests[-1]
    absent = sorted(region - set(manifest.operators))
    problem = f"it holds nothing of {', '.join(absent)}" if absent else None
    problem = problem or inquiry.trial("regional", "local", manifest.epoch)
    lost: tuple[LostInput, ...] | str = problem or inquiry.lost_since(manifest, region)
    if isinstance(lost, str):
        inquiry.note(f"{', '.join(sorted(region))} cannot be restored to epoch {manifest.epoch} alone: {lost}")
        return None
    return RestorePlan(
        path="regional",
        tier="local",
        reason="; ".join(inquiry.problems),
        epoch=manifest.epoch,
        manifests=history.manifests,
        region=region,
        joined=evolution.added,
        evolution=evolution,
        lost_input=lost,
        problems=tuple(inquiry.problems),
    )
