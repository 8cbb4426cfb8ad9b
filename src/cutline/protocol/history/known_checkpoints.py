"""Which stored checkpoints belong to the present history, and what they tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.ids import NO_BATCH, NO_EPOCH, BatchId, Epoch, Generation, OperatorId
from cutline.protocol.history import epochs as recovery
from cutline.protocol.history.histories import identities_of
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.publish.publishing import CompleteEpoch

#: More epochs than a host begins between two copies to the remote tier.
_LOST_WITH_A_HOST = 1_000


def newest_of(manifests: Sequence[Manifest], operator: OperatorId) -> Manifest | None:
    """The newest of these ascending manifests that holds a snapshot of this operator."""
    return next((manifest for manifest in reversed(manifests) if operator in manifest.operators), None)


def batch_in(manifests: Sequence[Manifest], operator: OperatorId) -> BatchId:
    """The operator's cut batch in its newest complete epoch."""
    newest = newest_of(manifests, operator)
    return newest.operators[operator].batch if newest else NO_BATCH


def epoch_in(manifests: Sequence[Manifest], operator: OperatorId) -> Epoch:
    """The operator's newest complete epoch."""
    newest = newest_of(manifests, operator)
    return newest.epoch if newest else NO_EPOCH


def not_held(manifests: Iterable[Manifest], operator: OperatorId) -> Epoch:
    """The newest checkpoint of the whole flow without this operator: the operator's sinks publish nothing of it."""
    return max((one.epoch for one in manifests if operator not in one.operators), default=NO_EPOCH)


def is_of_history(
    manifest: Manifest, lineages: Mapping[OperatorId, Lineage], begun: Mapping[OperatorId, Generation] | None = None
) -> bool:
    """Whether a checkpoint belongs to the logs as they are read now; see ``cutline.protocol.history.epochs``.

    ``begun``: operators whose log was begun anew, and since when. What an older checkpoint says about an operator of
    that name concerns another log.
    """
    since = begun or {}
    same = {name: cut for name, cut in manifest.channels.items() if since.get(name, 0) <= manifest.generation}
    return recovery.is_of_history(
        {name: cut.barrier for name, cut in same.items()},
        {name: lineage_of(cut.lineage) for name, cut in same.items()},
        lineages,
    )


def generation_starts_of(generations: Iterable[GenerationRecord]) -> list[recovery.GenerationStart]:
    return [
        recovery.GenerationStart(
            generation=one.generation, restored_epoch=one.restored_epoch, is_fresh=one.path == "fresh"
        )
        for one in generations
    ]


def live_in(complete: Iterable[tuple[Epoch, Generation]], generations: Iterable[GenerationRecord]) -> list[Epoch]:
    """Of complete epochs, with the generations that completed them: those that no generation has given up."""
    return recovery.live_epochs(complete, generation_starts_of(generations))


def of_present_history(manifests: Iterable[Manifest], generations: Sequence[GenerationRecord]) -> list[Manifest]:
    """The checkpoints of the present history, ascending: none given up by a restore, none of a replaced process."""
    by_epoch = {manifest.epoch: manifest for manifest in manifests}
    stored = [(epoch, manifest.generation) for epoch, manifest in by_epoch.items()]
    live = [by_epoch[epoch] for epoch in live_in(stored, generations)]
    if not generations:
        return live
    newest, known, identities = generations[-1], {one.generation for one in generations}, identities_of(generations)
    lineages = {name: lineage_of(spans) for name, spans in newest.lineage.items()}
    return [
        manifest
        for manifest in live
        if is_of_history(manifest, lineages, newest.begun)
        and (manifest.carried_from is None or manifest.generation in known)
        # Former versions did not record it.
        and manifest.history in ("", *identities)
    ]


def given_up_for(manifest: Manifest, generations: Iterable[GenerationRecord]) -> Epoch | None:
    """The epoch whose restore gave this checkpoint up; None: none did, as far as the records tell."""
    for one in generations:
        if one.generation > manifest.generation and (one.restored_epoch or manifest.epoch) < manifest.epoch:
            return one.restored_epoch
    return None


def rewind_target(manifests: Iterable[Manifest], published: Epoch) -> Epoch | None:
    """The epoch to rewind a sink to, if a restore with an evolution gave up its ``published`` epoch; None if not.

    A checkpoint made by an evolution has a higher number than those that were given up for it.
    """
    for manifest in manifests:
        if manifest.carried_from is not None and manifest.carried_from < published < manifest.epoch:
            return manifest.carried_from
    return None


def complete_epoch(manifest: Manifest) -> CompleteEpoch:
    """What the coordinator needs to know about a checkpoint that was complete before its start."""
    return CompleteEpoch(
        epoch=manifest.epoch,
        generation=manifest.generation,
        previous_epoch=manifest.previous_epoch,
        batches={name: cut.batch for name, cut in manifest.operators.items()},
        completed_ms=manifest.completed_ms,
        flow_ms=manifest.flow_ms,
        after_batches={name: cut.after_batch for name, cut in manifest.operators.items()},
    )


def highest_epoch(recorded: Epoch, seen: Iterable[Epoch]) -> Epoch:
    """The highest epoch known from any record, tier or sink: a number is never used twice.

    ``recorded``: the highest in the coordinator's own records.
    """
    highest = max([recorded, *seen])
    # A lost host may have begun epochs that no other record names. Its records are lost with it: these are empty.
    are_records_lost = recorded == NO_EPOCH and highest > NO_EPOCH
    return Epoch(highest + _LOST_WITH_A_HOST) if are_records_lost else highest
