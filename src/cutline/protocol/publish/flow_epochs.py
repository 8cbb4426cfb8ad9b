"""At which epoch can all tables of a flow be read together? Decided from what each target says about itself.

Tables in different systems cannot be published in one transaction, so at any moment some are ahead of others. Every
epoch that all of them have reached is one cut of the flow, and readers get that one from each table.

An epoch without rows leaves no trace in a ledger. So a sink also stores its *reach*: up to which epoch nothing is
missing. It is valid only for the ledger that it was stored for: a publication or a rewind makes it void, and a later
claim limits it to what the later start continued from. A reach that was lost, or came late from a process that was
thought dead, makes readers see an older epoch, never a wrong one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cutline.model.history import Identity, Takeover
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.history.histories import others_after, takeovers_in
from cutline.protocol.publish.immediate import is_place


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Stored beside a ledger: while the ledger is as described, the sink has everything up to ``epoch``."""

    epoch: Epoch
    #: The ledger for which this is true: its newest epochs and the token of its claim.
    published: Epoch
    rewound: Epoch
    token: str
    #: The newest two starts that the claim names: the next start may have taken the place of the newest.
    starts: tuple[Identity, ...] = ()
    #: The flow takes checkpoints operator by operator: its epochs are not cuts of the whole flow.
    is_per_operator: bool = False


def token_in(claim: str) -> str:
    """The part of a claim that names the instance."""
    return claim.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the target of one sink says about itself."""

    flow: str
    sink: str
    #: Newest epoch with rows, and the highest that a rewind removed.
    published: Epoch
    rewound: Epoch = NO_EPOCH
    claim: str = ""
    #: As stored; it may be void.
    reach: Reach | None = None
    #: The oldest epoch that the table can be read as of; None: a read tells, before it reads rows.
    oldest: Epoch | None = None

    @property
    def token(self) -> str:
        return token_in(self.claim)

    @property
    def reached(self) -> Epoch:
        """Up to this epoch nothing is missing. A reach below the newest epoch: the sink keeps rows given up since."""
        reach = self.reach
        if reach is None or (reach.published, reach.rewound) != (self.published, self.rewound):
            return self.published
        if reach.token == self.token:
            return reach.epoch
        takeovers = takeovers_in(self.claim) or ()
        if _identities(takeovers).isdisjoint(reach.starts):
            return self.published
        later = [one.epoch for one in others_after(takeovers, reach.starts)]
        return max(self.published, min([reach.epoch, *later]))

    @property
    def is_per_operator(self) -> bool:
        return self.reach is not None and self.reach.token == self.token and self.reach.is_per_operator

    @property
    def is_immediate(self) -> bool:
        """Its numbers are those of batches."""
        return is_place(max(self.published, self.rewound))


def reach_to_store(standing: Standing, epoch: Epoch, *, is_per_operator: bool, at_start: bool) -> Reach | None:
    """What a sink stores when ``epoch`` is complete for it without rows of its own; None: nothing.

    ``at_start``: the epoch is the newest of the history that the flow continues, whatever the target has beyond it.
    """
    if standing.published > epoch and not at_start:
        return None  # another sink on the same database has published a later epoch for this one
    return Reach(
        epoch=epoch,
        published=standing.published,
        rewound=standing.rewound,
        token=standing.token,
        starts=tuple(one.identity for one in (takeovers_in(standing.claim) or ())[-2:]),
        is_per_operator=is_per_operator,
    )


def common_epoch(standings: Sequence[Standing]) -> Epoch:
    """The newest epoch that every sink has reached, in one history; NO_EPOCH: there is none yet."""
    return min([*(one.reached for one in standings), *_continued_apart(standings)], default=NO_EPOCH)


def _continued_apart(standings: Sequence[Standing]) -> list[Epoch]:
    """The epochs from which starts continued that have taken over only some of the sinks.

    A start claims one sink after the other, and may fail in between. Up to the epoch that it continues from, the
    sinks that it has taken over and those that it has not have the same history.
    """
    known = [found for one in standings if (found := takeovers_in(one.claim)) is not None]
    if not known:
        return []
    shared = frozenset.intersection(*(_identities(one) for one in known))
    return [takeover.epoch for one in known for takeover in others_after(one, shared)]


def _identities(takeovers: Sequence[Takeover]) -> frozenset[str]:
    return frozenset(one.identity for one in takeovers)


class Answer(enum.Enum):
    """Whether all sinks can be read as of an epoch."""

    YES = "yes"
    #: A sink, or the flow, has not come so far.
    NOT_YET = "not yet"
    #: The sinks do not have one history that goes so far: a start is taking them over.
    TAKEN_OVER = "taken over"
    #: A sink shows only its newest epoch, or no longer has this one.
    TOO_OLD = "too old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    answer: Answer
    #: The sink that decides.
    of: Standing | None = None


def judge_epoch(standings: Sequence[Standing], epoch: Epoch) -> Judgement:
    """Whether the targets, as they described themselves, can be read together as of ``epoch``."""
    slowest = min(standings, key=lambda one: one.reached)
    if slowest.reached < epoch:
        return Judgement(answer=Answer.NOT_YET, of=slowest)
    if common_epoch(standings) < epoch:
        return Judgement(answer=Answer.TAKEN_OVER)
    for one in standings:
        if one.oldest is not None and epoch < one.oldest:
            return Judgement(answer=Answer.TOO_OLD, of=one)
    return Judgement(answer=Answer.YES)


def is_unchanged(before: Sequence[Standing], after: Sequence[Standing]) -> bool:
    """Whether no sink was taken over or rewound in between; epochs that were published in between do not matter.

    A rewind needs a claim. It is compared as well, for targets that are changed by hand.
    """
    return all(
        (one.flow, one.sink, one.claim, one.rewound) == (two.flow, two.sink, two.claim, two.rewound)
        and one.published <= two.published
        for one, two in zip(before, after, strict=True)
    )


def may_be_rewound(standings: Sequence[Standing], epoch: Epoch, shown: Sequence[Epoch]) -> bool:
    """Whether the number may be that of an epoch which a rewind removed.

    ``shown``: the newest epoch with rows that each sink shows as of ``epoch``. Numbers are never used twice: an epoch
    that a sink still shows, or has reached, is of the present history. So is any above all that were rewound.
    """
    if epoch > max(one.rewound for one in standings):
        return False
    return not any(epoch in (found, one.reached) for one, found in zip(standings, shown, strict=True))
