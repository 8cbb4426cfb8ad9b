"""Restoring the whole flow: the checkpoint that is asked for, or the newest that can be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from cutline.errors import FlowDefinitionError, LostInputError, RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.history.evolution import Changes, Evolution, since_checkpoint
from cutline.protocol.history.known_checkpoints import highest_epoch
from cutline.protocol.recovery import history_rules, sink_rules
from cutline.protocol.recovery.facts import (
    MissingFacts,
    NeedContent,
    NeedPublishedBefore,
    NeedRemote,
    NeedRemoteEpochs,
    NeedSinkLimits,
    RemoteRecords,
    RestoreTo,
    StoredFacts,
)
from cutline.protocol.recovery.inquiry import Inquiry
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.present_history import History, to_publish

Chain = tuple[Manifest, ...]
Tier = Literal["local", "remote"]


class _Candidate(NamedTuple):
    """A checkpoint with those before it that sinks may have yet to publish; it is the last of the chain."""

    tier: Tier
    chain: Chain
    evolution: Evolution
    stored: StoredFacts
    has_generations: bool


def as_requested(inquiry: Inquiry, request: RestoreTo, stored: StoredFacts, history: History) -> RestorePlan:
    """The requested epoch, from the local tier or else from the remote one. Raises RecoveryError."""
    flow, epoch = inquiry.definition.flow, request.epoch
    chain = tuple(one for one in history.manifests if one.epoch <= epoch)
    if not chain or chain[-1].epoch != epoch:
        kept = ", ".join(str(one.epoch) for one in history.manifests) or "none"
        raise RecoveryError(
            f"epoch {epoch} is not a checkpoint that the flow can restore",
            next_step=f"available checkpoints: {kept}",
            flow=flow,
        )
    evolution = since_checkpoint(inquiry.definition, chain[-1], history.generations, request.changes)
    reason = f"a restore to epoch {epoch} was requested"
    here = _Candidate("local", chain, evolution, stored, bool(history.generations))
    planned = _planned(inquiry, here, reason, is_request=True)
    if isinstance(planned, str) and inquiry.facts.has_remote:
        inquiry.note(f"epoch {epoch} is downloaded from the remote tier: {planned}")
        there = here._replace(tier="remote", chain=_with_content(inquiry, chain, history))
        planned = _content_problem(inquiry, chain[-1]) or _planned(inquiry, there, reason, is_request=True)
    if isinstance(planned, str):
        raise RecoveryError(
            f"epoch {epoch} cannot be restored: {planned}",
            next_step="choose another checkpoint; nothing has been changed",
            flow=flow,
        )
    return planned


def from_checkpoint(inquiry: Inquiry, stored: StoredFacts, history: History) -> RestorePlan | None:
    """The newest checkpoint that can be used; None if there has never been one. Raises RecoveryError."""
    reason = reason_of(inquiry)
    forbidden: RecoveryError | None = None
    for tier, chain, known, latest in _candidates(inquiry, stored, history):
        try:
            evolution = since_checkpoint(inquiry.definition, chain[-1], known.generations, Changes())
        except (RecoveryError, FlowDefinitionError) as error:
            planned: RestorePlan | str = str(error)
        else:
            candidate = _Candidate(tier, chain, evolution, latest, bool(known.generations))
            try:
                planned = _planned(inquiry, candidate, reason)
            except LostInputError:
                raise  # an older checkpoint would need even more of it
            except RecoveryError as error:
                # A sink forbids it, perhaps before anything has shown that it could not be restored anyway. The other
                # tier may have the epoch that the sink shows.
                forbidden, planned = forbidden or error, error.what
        if isinstance(planned, RestorePlan):
            return planned
        inquiry.note(f"epoch {chain[-1].epoch} of the {tier} tier cannot be used: {planned}")
    if forbidden is not None:
        raise forbidden
    remote = _remote_records(inquiry)
    if inquiry.had_any(inquiry.history(remote.stored) if remote is not None and not remote.problem else history):
        raise RecoveryError(
            f"no checkpoint can be used, and the live state is damaged: {'; '.join(inquiry.problems)}",
            next_step="restore the storage folder from a backup, or start over under a new flow name",
            flow=inquiry.definition.flow,
        )
    return None


def reason_of(inquiry: Inquiry) -> str:
    """Why the flow does not resume."""
    return "; ".join(inquiry.problems) or "no generation record"


def _planned(inquiry: Inquiry, candidate: _Candidate, reason: str, *, is_request: bool = False) -> RestorePlan | str:
    """The plan that restores a checkpoint, or why it cannot. Raises LostInputError, RecoveryError."""
    manifest, evolution = candidate.chain[-1], candidate.evolution
    path: Tier = "local" if is_request else candidate.tier
    history_rules.refuse_beyond_common(
        inquiry.facts.sinks, candidate.stored, manifest.epoch, flow=inquiry.definition.flow
    )
    sink_rules.refuse_to_rewind(inquiry.facts.sinks, manifest.epoch, flow=inquiry.definition.flow)
    problem = inquiry.trial(path, candidate.tier, manifest.epoch)
    if problem is not None:
        return problem
    lost = (
        inquiry.lost_since(manifest, frozenset(manifest.operators), tier=candidate.tier, renaming=evolution.renaming)
        if candidate.has_generations
        else ()
    )
    if isinstance(lost, str):
        return lost
    evolved = None if evolution.is_unchanged else _free_epoch(inquiry, candidate.stored)
    return RestorePlan(
        path=path,
        tier=candidate.tier,
        reason=reason,
        epoch=manifest.epoch,
        manifests=candidate.chain,
        region=frozenset(inquiry.definition.names),
        evolution=evolution,
        evolved_epoch=evolved,
        lost_input=lost,
        problems=tuple(inquiry.problems),
    )


def _free_epoch(inquiry: Inquiry, stored: StoredFacts) -> Epoch:
    """A number that no checkpoint has had, in any tier or sink."""
    facts = inquiry.facts
    there = inquiry.known(facts.remote_epochs, NeedRemoteEpochs()) if facts.has_remote else frozenset()
    highest = (inquiry.known(one.highest, NeedSinkLimits()) for one in facts.sinks)
    seen = [*(one.epoch for one in stored.epochs), *highest, *there]
    return Epoch(highest_epoch(facts.last_epoch, seen) + 1)


# ---------------------------------------------------------------------- candidates


def _candidates(
    inquiry: Inquiry, stored: StoredFacts, history: History
) -> Iterator[tuple[Tier, Chain, History, StoredFacts]]:
    """Newest first, and each epoch from the local tier before the remote one."""
    manifests = history.manifests
    only_records = _only_records(inquiry)
    here = {one.epoch: manifests[: i + 1] for i, one in enumerate(manifests) if one.epoch not in only_records}
    newest = max(here, default=NO_EPOCH)
    if here:
        yield "local", here[newest], history, stored
    # Only now: a flow that can use the local tier does not wait for the remote tier.
    remote = _remote_records(inquiry)
    there: frozenset[Epoch] = frozenset()
    known, latest = history, stored
    if remote is not None and remote.problem:
        inquiry.note(f"the remote tier cannot be asked: {remote.problem}")
    elif remote is not None:
        there, latest = remote.epochs, remote.stored
        known = inquiry.history(latest)
    for manifest in reversed(known.manifests or manifests):
        if manifest.epoch in here and manifest.epoch != newest:
            yield "local", here[manifest.epoch], known, latest
        if manifest.epoch in there:
            chain = _chain_of(inquiry, manifest, known)
            if chain is not None:
                yield "remote", chain, known, latest


def _remote_records(inquiry: Inquiry) -> RemoteRecords | None:
    facts = inquiry.facts
    if not facts.has_remote:
        return None
    if facts.first_remote is not None and not facts.first_remote.problem:
        return facts.first_remote
    return inquiry.known(facts.remote, NeedRemote())


def _chain_of(inquiry: Inquiry, manifest: Manifest, known: History) -> Chain | None:
    """A checkpoint of the remote tier with those before it that sinks have yet to publish; None if it is of no use."""
    facts = inquiry.facts
    noted = inquiry.known(facts.published_before.get(manifest.epoch), NeedPublishedBefore(epoch=manifest.epoch))
    if noted.problem:
        inquiry.note(f"epoch {manifest.epoch} of the remote tier cannot be used: {noted.problem}")
        return None
    if all(one.seen is None for one in facts.sinks):
        # A host that restored it may have rewound what was published after it.
        seen = {sink: epoch for sink, epoch in noted.seen.items() if epoch <= manifest.epoch}
        sink_rules.refuse_behind(facts.sinks, seen, None, flow=inquiry.definition.flow)
    slowest = sink_rules.slowest(facts.sinks, manifest, known.manifests)
    published = max(slowest, min(noted.everywhere, manifest.epoch))
    chain = to_publish(manifest, known.manifests, published=published, note=inquiry.note)
    if chain is None:
        return None
    problem = _content_problem(inquiry, manifest)
    if problem:
        inquiry.note(f"epoch {manifest.epoch} of the remote tier cannot be used: {problem}")
        return None
    return chain


def _with_content(inquiry: Inquiry, chain: Chain, history: History) -> Chain:
    """A requested checkpoint with those before it that this host can restore, or sinks have yet to publish.

    A host that had no checkpoint has only the records of the others: kept, they would look like damaged ones.
    """
    only_records, manifest = _only_records(inquiry), chain[-1]
    if manifest.epoch not in only_records:
        return chain
    noted = inquiry.known(inquiry.facts.published_before.get(manifest.epoch), NeedPublishedBefore(epoch=manifest.epoch))
    slowest = sink_rules.slowest(inquiry.facts.sinks, manifest, history.manifests)
    published = max(slowest, min(noted.everywhere, manifest.epoch))
    return to_publish(manifest, history.manifests, published=published, note=inquiry.note) or chain


def _only_records(inquiry: Inquiry) -> set[Epoch]:
    """The local tier had no checkpoint: of those it has now, only the records were downloaded."""
    first = inquiry.facts.first_remote
    return {one.epoch for one in first.stored.epochs} if first is not None else set()


def _content_problem(inquiry: Inquiry, manifest: Manifest) -> str:
    """Why a checkpoint's content could not be downloaded; empty: it is here."""
    if manifest.epoch not in inquiry.facts.contents:
        raise MissingFacts(NeedContent(manifest=manifest))
    return inquiry.facts.contents[manifest.epoch]
