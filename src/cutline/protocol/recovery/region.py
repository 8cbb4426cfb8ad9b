"""What is restored while the flow runs, when an operator has failed for good."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.errors import RecoveryError
from cutline.model.checkpoint import Manifest
from cutline.model.ids import NO_BATCH, BatchId, OperatorId
from cutline.protocol.history.evolution import Definition
from cutline.protocol.history.regions import LastRestore, next_restore, region_of
from cutline.protocol.recovery.alone import epoch_alone
from cutline.protocol.recovery.facts import InputSince, MissingFacts, NeedFacts, RecoveryFacts, StoredFacts, Trial
from cutline.protocol.recovery.inquiry import Inquiry
from cutline.protocol.recovery.plan import Refusal, RestorePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFacts:
    """What is known about an operator that has failed for good. It has no pending epoch."""

    definition: Definition
    failed: OperatorId
    #: Why it failed.
    reason: str
    #: Its complete epochs, ascending, as far as they can be read; outside of per-operator mode only the newest.
    manifests: tuple[Manifest, ...]
    #: The last batch in its log.
    reached: BatchId
    has_caught_up: bool
    #: When it was last restored; None: never.
    last: LastRestore | None = None
    may_lose_input: bool = False
    input_since: tuple[InputSince, ...] = ()
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hopeless:
    """Another restore would not help: the flow fails with the operator's own error."""


def region_to_stop(definition: Definition, failed: OperatorId) -> frozenset[OperatorId]:
    """The operators to stop before the restore; in per-operator mode nothing downstream is affected."""
    return frozenset({failed}) if definition.is_per_operator else region_of([failed], definition.consumers())


def remembered(facts: RegionFacts) -> LastRestore | None:
    """The record of this restore; None if it is futile."""
    batch = facts.manifests[-1].operators[facts.failed].batch if facts.manifests else NO_BATCH
    return next_restore(facts.last, batch=batch, reached=facts.reached, has_caught_up=facts.has_caught_up)


def choose_region(facts: RegionFacts) -> RestorePlan | Refusal | Hopeless | NeedFacts:
    """Restore the operator and everything downstream to the newest complete epoch; alone in per-operator mode."""
    if remembered(facts) is None:
        return Hopeless()
    inquiry = Inquiry(
        RecoveryFacts(
            definition=facts.definition,
            stored=StoredFacts(),
            may_lose_input=facts.may_lose_input,
            input_since=facts.input_since,
            trials=facts.trials,
        )
    )
    try:
        return _alone(inquiry, facts) if facts.definition.is_per_operator else _regional(inquiry, facts)
    except MissingFacts as missing:
        return missing.need
    except RecoveryError as error:
        return Refusal.of(error, tuple(inquiry.problems))


def _alone(inquiry: Inquiry, facts: RegionFacts) -> RestorePlan:
    epoch = epoch_alone(facts.failed, facts.manifests, facts.trials, flow=facts.definition.flow, note=inquiry.note)
    return RestorePlan(
        path="alone",
        tier="local",
        reason=facts.reason,
        manifests=facts.manifests,
        alone={facts.failed: epoch},
        problems=tuple(inquiry.problems),
    )


def _regional(inquiry: Inquiry, facts: RegionFacts) -> RestorePlan:
    flow = facts.definition.flow
    if not facts.manifests:
        raise RecoveryError("there is no checkpoint to restore", flow=flow)
    manifest = facts.manifests[-1]
    region = region_to_stop(facts.definition, facts.failed)
    problem = inquiry.trial("regional", "local", manifest.epoch)
    lost = problem or inquiry.lost_since(manifest, region)
    if isinstance(lost, str):
        raise RecoveryError(f"epoch {manifest.epoch} cannot be used: {lost}", flow=flow)
    return RestorePlan(
        path="regional",
        tier="local",
        reason=facts.reason,
        epoch=manifest.epoch,
        manifests=facts.manifests,
        region=region,
        lost_input=lost,
        problems=tuple(inquiry.problems),
    )
