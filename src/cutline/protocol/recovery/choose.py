"""How a flow recovers: one decision, made from facts. Reads nothing, writes nothing.

    facts → choose → RestorePlan   build it; a candidate that turns out damaged becomes a ``Trial``: choose again
                   → Refusal       raise it
                   → Need…         find that out, add it to the facts: choose again

The order of preference: continue where everything is (``resume``); restore what is damaged and what is downstream of it
(``regional``, or ``alone`` in per-operator mode); restore the whole flow from the newest checkpoint that can be used,
from this host (``local``) or else from the remote tier (``remote``); begin at the beginning (``fresh``) only if no
checkpoint has ever completed. Before anything else, the history of a storage that has run the flow is compared with
those that the remote tier and the sinks know (``history_rules``). The content of the remote tier is needed only when
nothing in the local tier will do.
"""

from __future__ import annotations

from cutline.errors import FlowDefinitionError, RecoveryError
from cutline.protocol.history.evolution import (
    Definition,
    Evolution,
    check_mode,
    check_sink_names,
    refuse_returning_names,
    since_checkpoint,
    since_last_run,
)
from cutline.protocol.recovery import history_rules, sink_rules
from cutline.protocol.recovery.checkpoints import as_requested, from_checkpoint, reason_of
from cutline.protocol.recovery.continuing import continuing, each_alone, refuse_beyond_repair
from cutline.protocol.recovery.facts import (
    MissingFacts,
    NeedEntries,
    NeedFacts,
    NeedFirstRemote,
    RecoveryFacts,
    RestoreTo,
    StoredFacts,
)
from cutline.protocol.recovery.inquiry import Inquiry
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.present_history import History


def choose(facts: RecoveryFacts) -> RestorePlan | Refusal | NeedFacts:
    """The best recovery path that loses nothing. Equal facts give equal answers."""
    inquiry = Inquiry(facts)
    try:
        return _chosen(inquiry)
    except MissingFacts as missing:
        return missing.need
    except (RecoveryError, FlowDefinitionError) as error:
        return Refusal.of(error, tuple(inquiry.problems))


def check_histories(facts: RecoveryFacts) -> Refusal | NeedFacts | None:
    """The first rule of ``choose`` alone, asked before anything is written: a refused start must disturb nothing."""
    inquiry = Inquiry(facts)
    try:
        history_rules.refuse_other_histories(inquiry)
    except MissingFacts as missing:
        return missing.need
    except RecoveryError as error:
        return Refusal.of(error, tuple(inquiry.problems))
    return None


def evolution_at_start(definition: Definition, stored: StoredFacts, restore_to: RestoreTo | None) -> Evolution:
    """How the code differs from what is stored. Raises if the flow as declared cannot continue from it.

    Asked before sinks are opened, and again by ``choose``.
    """
    unchanged = Evolution(operators=())
    if not stored.generations:
        return unchanged
    check_mode(definition, stored.generations[-1])
    if restore_to is None:
        return since_last_run(definition, stored.generations[-1])
    found = next((one.manifest for one in stored.epochs if one.epoch == restore_to.epoch), None)
    if definition.is_per_operator or found is None:
        return unchanged  # it is reported as unreadable only when it is needed
    evolution = since_checkpoint(definition, found, stored.generations, restore_to.changes)
    for old, new in evolution.renaming.new_names.items():
        check_sink_names(definition, stored.requested_sinks.get(old, ()), old=old, new=new)
    return evolution


def _chosen(inquiry: Inquiry) -> RestorePlan:
    facts, definition = inquiry.facts, inquiry.definition
    history_rules.refuse_other_histories(inquiry)
    evolution_at_start(definition, facts.stored, facts.restore_to)
    stored = _stored(inquiry)
    evolution = evolution_at_start(definition, stored, facts.restore_to)
    history = inquiry.history(stored)
    _refuse_what_sinks_forbid(inquiry, history, evolution)
    if definition.is_per_operator:
        return _per_operator(inquiry, stored, history, evolution)
    if facts.restore_to is not None:
        return as_requested(inquiry, facts.restore_to, stored, history)
    refuse_returning_names(definition, evolution, history.manifests)
    if not history.generations and not inquiry.had_any(history):
        return _fresh(inquiry, "first start of this flow", history)
    plan = continuing(inquiry, history, evolution) if history.generations else None
    if plan is not None:
        return plan
    reason = reason_of(inquiry)
    restored = from_checkpoint(inquiry, stored, history)
    return restored or _fresh(inquiry, f"no checkpoint had ever completed, and {reason}", history)


def _stored(inquiry: Inquiry) -> StoredFacts:
    """A host without any checkpoint asks the remote tier: the flow must not start over if that has one."""
    facts = inquiry.facts
    if not facts.has_remote or facts.stored.epochs:
        return facts.stored
    is_known = bool(facts.stored.generations)
    remote = inquiry.known(facts.first_remote, NeedFirstRemote(is_required=not is_known))
    if remote.problem and not is_known:
        raise RecoveryError(
            f"this host has no state of the flow, and whether the remote tier has any is unknown: {remote.problem}",
            next_step="make the remote tier reachable, or omit the option remote",
            flow=inquiry.definition.flow,
        )
    if remote.problem:
        inquiry.note(f"there is no checkpoint here, and the remote tier cannot be asked: {remote.problem}")
        return facts.stored
    if remote.epochs:
        newest = max(remote.epochs)
        inquiry.note(f"this host has no checkpoint of the flow; the remote tier has epochs up to {newest}")
    return remote.stored


def _refuse_what_sinks_forbid(inquiry: Inquiry, history: History, evolution: Evolution) -> None:
    facts, flow = inquiry.facts, inquiry.definition.flow
    requested = facts.restore_to.epoch if facts.restore_to is not None else None
    seen = {one.sink: one.seen for one in facts.sinks if one.seen is not None}
    sink_rules.refuse_behind(facts.sinks, seen, requested, flow=flow)
    old_names = {new: old for old, new in evolution.renaming.new_names.items()}
    sink_rules.refuse_to_empty(facts.sinks, history.manifests, old_names, flow=flow)


def _per_operator(inquiry: Inquiry, stored: StoredFacts, history: History, evolution: Evolution) -> RestorePlan:
    if inquiry.facts.restore_to is not None:
        raise RecoveryError(
            "in per-operator mode no checkpoint covers the whole flow: there is none to restore",
            flow=inquiry.definition.flow,
        )
    if history.generations:
        return each_alone(inquiry, history, evolution)
    if inquiry.had_any(history):
        refuse_beyond_repair(inquiry, "all generation records are gone")
    return _fresh(inquiry, "first start of this flow", history)


def _fresh(inquiry: Inquiry, reason: str, history: History) -> RestorePlan:
    if not history.generations:
        # Before anything is claimed: the storage that runs the flow must not find that another one took its sinks over.
        sink_rules.refuse_to_begin_beside(inquiry.facts.sinks, flow=inquiry.definition.flow)
    if inquiry.known(inquiry.facts.has_entries, NeedEntries()):
        # Their batches would count as done although the sources begin anew.
        raise RecoveryError(
            "the channels hold data, but all records about it are gone",
            next_step="restore the storage folder from a backup, or start over under a new flow name",
            flow=inquiry.definition.flow,
        )
    return RestorePlan(path="fresh", reason=reason, problems=tuple(inquiry.problems))
