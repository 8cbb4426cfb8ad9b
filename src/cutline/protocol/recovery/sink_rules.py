"""What sinks have published decides which epochs a flow may restore, and which sinks are rewound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cutline.errors import RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, OperatorId, SinkId
from cutline.protocol.history.known_checkpoints import epoch_in, newest_of, not_held, rewind_target
from cutline.protocol.publish.rewind_points import gap_at
from cutline.protocol.recovery.facts import MissingFacts, NeedSinkLimits, SinkFacts


def ahead_of(sinks: Iterable[SinkFacts], manifests: Sequence[Manifest]) -> list[str]:
    """Sinks that have published epochs without a checkpoint: continuing would leave a gap or repeat rows."""
    return [
        f"sink {one.sink} has published epoch {one.published}, the newest readable checkpoint is {newest}"
        for one in sinks
        # A sink that keeps its rows may be ahead.
        if one.published > (newest := epoch_in(manifests, one.operator)) and one.on_rollback != "keep"
    ]


def refuse_behind(
    sinks: Iterable[SinkFacts], seen: Mapping[SinkId, Epoch], restore_to: Epoch | None, *, flow: FlowName
) -> None:
    """Refuse a sink that no longer has what was published to it: the flow would continue with rows missing.

    ``seen``: the newest epoch with rows that each was told to publish. A restore to the epoch that it still has
    publishes the rest again.
    """
    for one in sinks:
        if one.publish == "at_once":
            continue  # its numbers are batches, and it checks them itself before it rewinds
        at_least = seen.get(one.sink, NO_EPOCH)
        if one.published >= at_least or (restore_to is not None and restore_to <= one.published):
            continue
        published = one.published
        has = f"holds output up to epoch {published}" if published else "holds nothing of this flow"
        way_out = f"restore the flow to that epoch: cutline restore --to {published}; or " if published else ""
        raise RecoveryError(
            f"sink {one.sink} {has}, but epoch {at_least} was published to it: "
            "it was restored from a backup, emptied, or is another target",
            next_step=f"{way_out}correct its target; to continue without the missing rows: "
            f"cutline sinks {flow} --accept {one.sink}",
            flow=flow,
        )


def refuse_to_empty(
    sinks: Iterable[SinkFacts],
    manifests: Sequence[Manifest],
    old_names: Mapping[OperatorId, OperatorId],
    *,
    flow: FlowName,
) -> None:
    """Refuse a storage folder that was wiped or mistyped: it must never empty a table.

    ``old_names``: of operators that the checkpoints know under another name.
    """
    for one in sinks:
        if one.published and newest_of(manifests, old_names.get(one.operator, one.operator)) is None:
            raise RecoveryError(
                f"sink {one.sink} holds output of this flow up to epoch {one.published}, "
                "but the storage has no readable checkpoint of it",
                next_step="check the storage option; to start over, empty the sink's target or name another",
                flow=flow,
            )


def refuse_to_begin_beside(sinks: Iterable[SinkFacts], *, flow: FlowName) -> None:
    """Refuse a storage without any record of the flow, if an immediately publishing sink has output of the flow."""
    for one in sinks:
        if one.newest_batch:
            raise RecoveryError(
                f"sink {one.sink} holds output of this flow, but the storage has no record of it",
                next_step="check the storage option; to start over, empty the sink's target or name another",
                flow=flow,
            )


def refuse_to_rewind(sinks: Iterable[SinkFacts], epoch: Epoch, *, flow: FlowName) -> None:
    """Refuse a restore to ``epoch`` if a sink has published more, and cannot or must not be rewound to it."""
    for one in sinks:
        why = why_not_restored(one, epoch)
        if why is None:
            continue
        raise RecoveryError(
            f"sink {one.sink} has published epoch {one.published}, the flow would be restored to epoch {epoch}, "
            f"and the sink {why}",
            next_step='empty its target, repair the later checkpoint, or give it on_rollback="keep"',
            flow=flow,
        )


def why_not_restored(sink: SinkFacts, epoch: Epoch) -> str | None:
    """Why the sink refuses a restore to ``epoch``; None: it does not."""
    if sink.published <= epoch or sink.on_rollback == "keep":
        return None
    if sink.on_rollback == "fail":
        return "must not be rewound"
    if sink.oldest_rewind is None:
        raise MissingFacts(NeedSinkLimits())
    if epoch < sink.oldest_rewind:
        return f"cannot be rewound further than epoch {sink.oldest_rewind}"
    if sink.can_rewind and (gap := gap_at(sink.rewind_gaps, epoch)) is not None:
        return f"cannot be rewound to epochs from {gap[0]} to {gap[1] - 1}"
    return None if sink.can_rewind else "cannot be rewound"


def slowest(sinks: Iterable[SinkFacts], manifest: Manifest, known: Sequence[Manifest]) -> Epoch:
    """The epoch that all sinks have published, among this checkpoint and the known ones before it that concern them."""
    before = [one for one in known if one.epoch < manifest.epoch]
    return min((max(one.published, not_held(before, one.operator)) for one in sinks), default=manifest.epoch)


def published_everywhere(sinks: Iterable[SinkFacts], epoch: Epoch) -> Epoch:
    """The epoch that every sink has published, by its ledger or the coordinator's records; at most ``epoch``."""
    return min([*(max(one.published, one.recorded) for one in sinks), epoch])


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettlement:
    """What happens to a sink once the flow has recovered."""

    #: The epoch that it is rewound to; None: it is not rewound.
    rewind_to: Epoch | None
    #: It keeps rows that the flow has given up, as ``on_rollback`` says.
    keeps: bool
    #: Its newest complete epoch; with a rewind, the one that it is rewound to.
    newest: Epoch
    #: What it has published of the present history: recorded.
    reached: Epoch
    #: The same, or a newer epoch without output for it: publishing continues after this.
    published: Epoch


def settle(sink: SinkFacts, manifests: Sequence[Manifest], *, is_per_operator: bool) -> SinkSettlement:
    """``manifests``: the complete epochs of the history that the flow now has, ascending."""
    newest = rewind_target(manifests, sink.published) or epoch_in(manifests, sink.operator)
    is_ahead = sink.published > newest
    keeps = is_ahead and sink.on_rollback == "keep"
    # What is missing before an epoch was released when every sink had published it. A host without records learns it
    # here, and from nothing else: an epoch without rows, or a sink that publishes batches, leaves no trace of epochs.
    released = NO_EPOCH if is_per_operator else _released_before(manifests)
    reached = min(max(sink.published, sink.recorded, released), newest)
    floor = NO_EPOCH if is_per_operator else not_held(manifests, sink.operator)
    return SinkSettlement(
        rewind_to=newest if is_ahead and not keeps else None,
        keeps=keeps,
        newest=newest,
        reached=reached,
        published=max(reached, floor),
    )


def _released_before(manifests: Sequence[Manifest]) -> Epoch:
    """The newest epoch that retention has released, as far as the epochs that are left show it."""
    before = [NO_EPOCH, *(one.epoch for one in manifests)]
    gaps = [one.previous_epoch for one, epoch in zip(manifests, before, strict=False) if one.previous_epoch > epoch]
    return max(gaps, default=NO_EPOCH)
