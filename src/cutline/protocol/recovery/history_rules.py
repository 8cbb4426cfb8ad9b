"""A storage starts the flow only if no other one has gone on with it: histories are compared, not numbers.

The remote tier and the targets of the sinks know which generations have run the flow. A storage that has run it before
and does not know the newest of them is *behind* or has *diverged*: it was copied, restored from a backup, or belongs to
a host that was replaced. It must not start, because it would rewind rows that readers have seen, or publish rows again.
A storage that has never run the flow takes over what the remote tier has; that is what the remote tier is for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cutline.errors import OtherHistoryError, RecoveryError
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity, Takeover, utc_text
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, Generation, OperatorId
from cutline.protocol.history.histories import (
    common_epoch,
    history_in,
    identities_of,
    identity_of,
    others_after,
    others_in,
)
from cutline.protocol.history.known_checkpoints import live_in
from cutline.protocol.publish.immediate import generation_of
from cutline.protocol.recovery.facts import (
    LiveOperator,
    NeedRemoteHistory,
    RecoveryFacts,
    RemoteHistory,
    SinkFacts,
    StoredFacts,
)
from cutline.protocol.recovery.inquiry import Inquiry

_HARM = "starting from this storage would remove rows that readers have seen, or publish rows twice"


def refuse_other_histories(inquiry: Inquiry) -> None:
    """Refuse a storage that is not of the newest history that the remote tier or any sink knows.

    A restore request is a person's decision to give up what others did: ``refuse_beyond_common`` limits it.
    """
    facts = inquiry.facts
    if not facts.stored.generations:
        return
    for one in facts.sinks:
        if history_in(one.claim) and one.takeovers is None:
            raise RecoveryError(
                f"the claim of sink {one.sink} cannot be read: which storage took it over last is unknown",
                next_step="restore the sink's ledger from a backup, or give the sink another target",
                flow=inquiry.definition.flow,
            )
    known = _known_identities(inquiry)
    remote = _remote_history(inquiry, known)
    if facts.restore_to is not None:
        return
    others = others_in(remote.generations, known)
    if not facts.has_run:
        if others or remote.newest_epoch > max(known_epoch(facts), facts.last_epoch):
            raise _out_of_date(inquiry)
        return
    if others:
        raise _taken_over(inquiry, _story_of(others[-1]), f"the remote tier has its {_count(others)}", remote=remote)
    for one in facts.sinks:
        after = others_after(one.takeovers or (), known)
        if after:
            raise _taken_over(inquiry, _story_of(after[-1]), f"sink {one.sink} records it", remote=remote, sink=one)
    reached = known_epoch(facts)
    # With durable="remote" an epoch is sealed there first, and then it is known here as begun.
    if remote.newest_epoch > max(reached, facts.last_epoch):
        raise _behind(inquiry, f"the remote tier has epoch {remote.newest_epoch}", reached, remote=remote)
    for one in facts.sinks:
        if one.published > reached:
            raise _behind(inquiry, f"sink {one.sink} has published epoch {one.published}", reached, remote=remote)


def newest_to_find(facts: RecoveryFacts) -> Epoch | None:
    """The newest epoch that a sink may show when it is claimed; None: whatever it shows.

    If it shows more, the storage that runs the flow has published since the decision was made. What was begun counts
    here: an earlier process of this storage may complete and publish it until the sinks are claimed.
    """
    return max(known_epoch(facts), facts.last_epoch) if facts.has_run and facts.restore_to is None else None


def refuse_beyond_common(sinks: Iterable[SinkFacts], stored: StoredFacts, epoch: Epoch, *, flow: FlowName) -> None:
    """Refuse to restore an epoch that a sink does not share: another storage took the sink over before it.

    The sink has rewound what was published since, or has never seen it, and nothing could publish it again.
    """
    known = identities_of(stored.generations)
    for one in sinks:
        others = others_after(one.takeovers or (), known)
        common = common_epoch(others)
        if common is not None and epoch > common:
            raise OtherHistoryError(
                f"sink {one.sink} shares this history only up to epoch {common}, where "
                f"{_story_of(others[0])} took it over: epoch {epoch} cannot be restored with it",
                next_step=f"restore epoch {common} or an earlier one, or give the sink another target",
                flow=flow,
            )


def refuse_older_log(inquiry: Inquiry, live: Mapping[OperatorId, LiveOperator]) -> None:
    """Refuse a storage whose log lacks batches that an immediately publishing sink shows: it is an older copy.

    A batch is in the log before it is published. Only a restore gives batches up, and the storage knows of that.
    """
    facts = inquiry.facts
    if not facts.has_run or facts.restore_to is not None:
        return
    for one in facts.sinks:
        log = live[one.operator].log if one.operator in live else None
        if log is None or log.place is None or one.newest_batch <= log.place:
            continue
        published_in = generation_of(one.newest_batch)
        if _was_restored_after(facts.stored.generations, published_in):
            continue
        remote = facts.remote_history or RemoteHistory()
        what = f"sink {one.sink} shows a batch of generation {published_in} that the log of {one.operator} lacks"
        raise _behind(inquiry, what, known_epoch(facts), remote=remote)


# ---------------------------------------------------------------------- what is known


def _remote_history(inquiry: Inquiry, known: Collection[Identity]) -> RemoteHistory:
    """What the remote tier tells; empty without one, and if sinks can tell instead while it is unavailable."""
    facts = inquiry.facts
    if not facts.has_remote:
        return RemoteHistory()
    # A start claims every sink before it publishes anything: claims of this storage rule another start out.
    is_confirmed = all(
        one.takeovers is not None and bool(one.takeovers) and one.takeovers[-1].identity in known for one in facts.sinks
    )
    remote = inquiry.known(facts.remote_history, NeedRemoteHistory(is_required=not is_confirmed))
    if not remote.problem:
        return remote
    if not is_confirmed and facts.restore_to is None:
        raise RecoveryError(
            f"whether another host has taken the flow over is unknown: {remote.problem}",
            next_step="make the remote tier reachable; nothing has been changed",
            flow=inquiry.definition.flow,
        )
    inquiry.note(f"the remote tier cannot be asked who runs the flow: {remote.problem}")
    return RemoteHistory()


def _known_identities(inquiry: Inquiry) -> frozenset[Identity]:
    """A generation that this storage announced in the remote tier may never have been entered here."""
    return identities_of(inquiry.facts.stored.generations) | inquiry.facts.announced


def known_epoch(facts: RecoveryFacts) -> Epoch:
    """The highest epoch that completed, by any record of this storage, readable or not.

    One that was only begun does not count: it may have completed in the storage that this one is a copy of.
    """
    noted = [max(one.recorded, one.seen or NO_EPOCH) for one in facts.sinks if one.publish != "at_once"]
    return max([facts.last_completed, *(one.epoch for one in facts.stored.epochs), *noted])


def _was_restored_after(generations: Iterable[GenerationRecord], generation: Generation) -> bool:
    return any(one.generation > generation and one.restored_epoch is not None for one in generations)


def _has_newest(inquiry: Inquiry, remote: RemoteHistory) -> bool:
    """Whether the remote tier has a checkpoint of the newest history: a host may have restored an older one since."""
    return bool(live_in(remote.epochs, [*inquiry.facts.stored.generations, *remote.generations]))


# ---------------------------------------------------------------------- the story


def _taken_over(
    inquiry: Inquiry, who: str, evidence: str, *, remote: RemoteHistory, sink: SinkFacts | None = None
) -> OtherHistoryError:
    facts = inquiry.facts
    known = _known_identities(inquiry)
    shared = (common_epoch(others_after(one.takeovers or (), known)) for one in facts.sinks)
    return _error(
        inquiry,
        f"another storage has taken this flow over: {who} ({evidence}). This storage stopped in "
        f"{_story_of(facts.stored.generations[-1])}, at epoch {known_epoch(facts)}; {_HARM}",
        start_there=f"start the flow there{_place(sink)}",
        can_rejoin=_has_newest(inquiry, remote),
        up_to=min((one for one in shared if one is not None), default=None),
    )


def _behind(inquiry: Inquiry, evidence: str, reached: Epoch, *, remote: RemoteHistory) -> OtherHistoryError:
    facts = inquiry.facts
    return _error(
        inquiry,
        f"this storage is older than the flow: {evidence}, and the newest epoch that this storage knows is {reached}. "
        f"It was copied or restored from a backup of {_story_of(facts.stored.generations[-1])}; {_HARM}",
        start_there="start the flow from its newest storage",
        can_rejoin=_has_newest(inquiry, remote),
        up_to=None,
    )


def _out_of_date(inquiry: Inquiry) -> OtherHistoryError:
    """A takeover was interrupted, and the flow went on elsewhere meanwhile: what was downloaded is of no use."""
    error = OtherHistoryError(
        "what this host has downloaded from the remote tier is out of date",
        next_step="start the flow with --rejoin, to download it again",
        flow=inquiry.definition.flow,
    )
    error.can_rejoin, error.has_run = True, False
    return error


def _error(
    inquiry: Inquiry, what: str, *, start_there: str, can_rejoin: bool, up_to: Epoch | None
) -> OtherHistoryError:
    """``up_to``: the newest epoch that all sinks share with this storage; None: whatever it has."""
    ways = [start_there]
    if can_rejoin:
        ways.append(
            "or here with --rejoin: what this storage did alone is kept as a savepoint, and the flow continues from "
            "the newest checkpoint of the remote tier"
        )
    epochs = (one.epoch for one in inquiry.history(inquiry.facts.stored).manifests)
    restorable = max((one for one in epochs if up_to is None or one <= up_to), default=None)
    if inquiry.definition.is_per_operator:
        restorable = None  # no checkpoint covers the whole flow
    if restorable is not None:
        ways.append(f"or here, giving up what was published since: cutline restore --to {restorable}")
    ways.append("or continue under another name: cutline clone")
    error = OtherHistoryError(what, next_step="; ".join(ways), flow=inquiry.definition.flow)
    error.can_rejoin, error.restorable = can_rejoin, restorable
    return error


def _story_of(one: GenerationRecord | Takeover) -> str:
    identity = one.identity if isinstance(one, Takeover) else identity_of(one)
    where = _where(one)
    return f"generation {one.generation} ({identity[:8]}{where}, started {utc_text(one.started_ms)})"


def _where(one: GenerationRecord | Takeover) -> str:
    host = f" on host {one.host}" if one.host else ""
    return f"{host}, storage {one.storage}" if isinstance(one, Takeover) and one.storage else host


def _place(sink: SinkFacts | None) -> str:
    return f" ({_where(sink.takeovers[-1]).strip(', ')})" if sink is not None and sink.takeovers else ""


def _count(others: Collection[GenerationRecord]) -> str:
    return "generation" if len(others) == 1 else f"{len(others)} generations"
