"""May this epoch be published to this target? The ledger of a sink, and every decision made from it.

Each sink keeps its ledger in its own way (a row, a message, a folder's names) and shows it as a ``SinkLedger``. All
sinks call ``judge`` before they publish and ``judge_rewind`` before they rewind, so the rules exist only here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cutline.errors import CutlineError, FencedError, InvariantViolation, SinkError
from cutline.model.ids import NO_EPOCH, Epoch, FlowName, Generation, SinkId
from cutline.protocol.publish.commit import CommitPermit
from cutline.protocol.publish.rewind_points import Gap, gap_at

#: How many published epochs a sink remembers the digest of, by default. A repeat is one of the newest.
EPOCHS_REMEMBERED = 100

_NO_GENERATION = Generation(0)
_TAKEN_OVER = "stop this process: another one runs the flow. If there is none, restart the flow"


class Verdict(enum.Enum):
    """The decision about a commit."""

    PUBLISH = "publish"
    #: The same content is published already: do nothing.
    ALREADY = "already"
    #: A rewind removed the epoch; the commit comes from a history that was given up.
    REWOUND = "rewound"
    #: The target has an epoch with this number, or a later one, that this flow does not know.
    OTHER_HISTORY = "other history"
    #: Another process has taken the sink over.
    FENCED = "fenced"


class RewindVerdict(enum.Enum):
    """The decision about a rewind."""

    REWIND = "rewind"
    #: Nothing above the epoch is published: do nothing.
    ALREADY = "already"
    #: The target no longer has what it showed at that epoch.
    TOO_FAR = "too far"
    #: It has what it showed before and after.
    IN_GAP = "in a gap"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLedger:
    """What the target itself records about one sink."""

    flow: FlowName
    sink: SinkId
    #: Newest epoch whose rows readers see.
    published: Epoch = NO_EPOCH
    #: The highest epoch that a rewind removed. Neither it nor an unpublished epoch below it is ever published.
    rewound: Epoch = NO_EPOCH
    #: The remembered published epochs with the digests of their content; a sink may show only the epoch in question.
    #: None: the target has the epoch, but no longer its digest.
    digests: Mapping[Epoch, str | None] = field(default_factory=dict)
    #: The oldest epoch that a rewind reaches, and the epochs above it that it does not.
    reach: Epoch = NO_EPOCH
    gaps: tuple[Gap, ...] = ()
    #: Names the instance of the sink that may publish; empty: the sink was never claimed.
    claim: str = ""
    #: Highest generation that has published, where the target records it.
    generation: Generation = _NO_GENERATION
    #: Another process has published since this one opened the sink, without a claim.
    is_overtaken: bool = False

    @property
    def highest(self) -> Epoch:
        """The highest epoch the target has ever seen. New ones must be above it."""
        return max(self.published, self.rewound)

    def is_held_by(self, claim: str) -> bool:
        """Whether the holder of this claim may change the target. Without any claim every process may."""
        return self.claim in ("", claim) and not self.is_overtaken


def judge(ledger: SinkLedger, permit: CommitPermit, digest: str, *, claim: str = "") -> Verdict:
    """``digest`` identifies the content to be published; ``claim`` is that of the calling instance.

    ALREADY comes first: a repeat does no harm, from any instance. Of the refusals the claim comes first: a replaced
    process must learn that it was replaced, not what its successor has done to the target.
    """
    if (permit.flow, permit.sink) != (ledger.flow, ledger.sink):
        raise InvariantViolation(
            "commit with another sink's permit", flow=permit.flow, sink=permit.sink, expected=ledger.sink
        )
    is_listed = permit.epoch in ledger.digests
    if is_listed and ledger.digests[permit.epoch] in (None, digest):
        return Verdict.ALREADY
    if not ledger.is_held_by(claim):
        return Verdict.FENCED
    if is_listed:
        return Verdict.OTHER_HISTORY
    if permit.epoch <= ledger.rewound:
        return Verdict.REWOUND
    if permit.epoch <= ledger.published:
        return Verdict.OTHER_HISTORY
    # The holder of the claim may publish what an older generation completed while it took over.
    if not ledger.claim and permit.generation < ledger.generation:
        return Verdict.FENCED
    return Verdict.PUBLISH


def judge_rewind(ledger: SinkLedger, epoch: Epoch, *, claim: str = "") -> RewindVerdict:
    """Whether the target may, and can, be rewound to what it showed when ``epoch`` was newest."""
    if ledger.published <= epoch:
        return RewindVerdict.ALREADY
    if not ledger.is_held_by(claim):
        return RewindVerdict.FENCED
    if epoch < ledger.reach:
        return RewindVerdict.TOO_FAR
    if gap_at(ledger.gaps, epoch) is not None:
        return RewindVerdict.IN_GAP
    return RewindVerdict.REWIND


# ------------------------------------------------------------------------------------------------- what it becomes


def claimed(ledger: SinkLedger, claim: str) -> SinkLedger:
    """The ledger after a claim. The newest claim holds, so instances with earlier claims are fenced."""
    return replace(ledger, claim=claim, is_overtaken=False)


def published(
    ledger: SinkLedger, permit: CommitPermit, digest: str, *, remember: int = EPOCHS_REMEMBERED
) -> SinkLedger:
    """The ledger after the epoch became visible; the digests of the last ``remember`` epochs stay."""
    kept = sorted({**ledger.digests, permit.epoch: digest}.items())[-remember:]
    return replace(
        ledger,
        published=permit.epoch,
        digests=dict(kept),
        generation=max(ledger.generation, permit.generation),
    )


def rewind(ledger: SinkLedger, epoch: Epoch) -> SinkLedger:
    """The ledger after a rewind to ``epoch``: everything above it is removed, and its numbers are used up."""
    if ledger.published <= epoch:
        return ledger
    left = {number: digest for number, digest in ledger.digests.items() if number <= epoch}
    return replace(
        ledger,
        # Below the remembered epochs, only the epoch itself is known.
        published=max(left, default=min(epoch, ledger.reach)),
        rewound=ledger.highest,
        digests=left,
    )


# ------------------------------------------------------------------------------------------------- refusals


def refusal(
    verdict: Verdict, ledger: SinkLedger, permit: CommitPermit, *, target: str = "the target", **where: object
) -> CutlineError:
    """The error for a refused commit. ``target``: what to call the target, ``where``: how to find it."""
    place = {"flow": ledger.flow, "sink": ledger.sink, "epoch": permit.epoch, **where}
    match verdict:
        case Verdict.FENCED:
            return fenced(ledger, **{**place, "generation": ledger.generation or None})
        case Verdict.REWOUND:
            return FencedError(
                f"{target} was rewound below this epoch: the commit comes from a history that was given up",
                next_step=f"{_TAKEN_OVER}; if its storage was deleted, give the sink another target",
                **place,
            )
        case Verdict.OTHER_HISTORY:
            return SinkError(
                f"{target} is at epoch {ledger.published} of another history of this flow",
                next_step="was the flow's storage deleted? Give the sink another target, or another name",
                **place,
            )
        case Verdict.PUBLISH | Verdict.ALREADY:
            raise InvariantViolation(f"{verdict.value} is no refusal", sink=ledger.sink)


def rewind_refusal(
    verdict: RewindVerdict, ledger: SinkLedger, epoch: Epoch, *, keep_more: str = "", **where: object
) -> CutlineError:
    """The error for a refused rewind. ``keep_more``: how to make older epochs reachable in future."""
    place = {"flow": ledger.flow, "sink": ledger.sink, "epoch": epoch, **where}
    match verdict:
        case RewindVerdict.FENCED:
            return fenced(ledger, **place)
        case RewindVerdict.TOO_FAR:
            return SinkError(
                f"the sink can be rewound to epoch {ledger.reach} at the earliest",
                next_step="; ".join(filter(None, ("restore the flow to a later checkpoint", keep_more))),
                **place,
            )
        case RewindVerdict.IN_GAP:
            nearest = gap_at(ledger.gaps, epoch) or (epoch, epoch)
            return SinkError(
                f"the sink keeps no state between the epochs before {nearest[0]} and epoch {nearest[1]}",
                next_step=f"restore the flow to epoch {nearest[1]}, or to a checkpoint before epoch {nearest[0]}",
                **place,
            )
        case RewindVerdict.REWIND | RewindVerdict.ALREADY:
            raise InvariantViolation(f"{verdict.value} is no refusal", sink=ledger.sink)


def fenced(ledger: SinkLedger, **where: object) -> FencedError:
    """The error for an instance that was replaced."""
    place = {"flow": ledger.flow, "sink": ledger.sink, **where}
    return FencedError("another process has taken the sink over", next_step=_TAKEN_OVER, **place)
