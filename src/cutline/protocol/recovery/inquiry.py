"""One run through the rules of recovery: the facts, and the problems found so far."""

from __future__ import annotations

from typing import TypeVar

from cutline.errors import LostInputError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import LostInput
from cutline.model.ids import NO_EPOCH, Epoch, OperatorId
from cutline.protocol.history.evolution import Definition
from cutline.protocol.history.renaming import Renaming
from cutline.protocol.recovery.facts import (
    InputAhead,
    MissingFacts,
    NeedFacts,
    NeedInputSince,
    NeedPublishedBefore,
    RecoveryFacts,
    StoredFacts,
)
from cutline.protocol.recovery.plan import RecoveryPath, Tier
from cutline.protocol.recovery.present_history import History, present_history

T = TypeVar("T")


class Inquiry:
    """Facts, read in the order of the rules: the first one that is missing ends the run."""

    def __init__(self, facts: RecoveryFacts) -> None:
        self.facts = facts
        #: In the order in which they were found, each once.
        self.problems: list[str] = []

    @property
    def definition(self) -> Definition:
        return self.facts.definition

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def known(self, fact: T | None, need: NeedFacts) -> T:
        if fact is None:
            raise MissingFacts(need)
        return fact

    def history(self, stored: StoredFacts) -> History:
        facts = self.facts
        published = self._noted_everywhere(stored)
        return present_history(stored, facts.definition, facts.sinks, facts.pins, self.note, published=published)

    def _noted_everywhere(self, stored: StoredFacts) -> Epoch:
        """Up to where every sink had published when the newest checkpoint was sealed in the remote tier.

        Needed only if epochs seem to be lost: a host without records has no other evidence that they were published and
        then released, because an epoch without rows, or a sink that publishes batches, leaves no trace of epochs.
        """
        facts = self.facts
        remote = next(
            (one for one in (facts.remote, facts.first_remote) if one is not None and one.stored is stored), None
        )
        if remote is None or remote.problem:
            return NO_EPOCH
        found = present_history(stored, facts.definition, facts.sinks, facts.pins, lambda _: None)
        there = [epoch for epoch in found.live if epoch in remote.epochs]
        if set(found.live) <= {one.epoch for one in found.manifests} or not there:
            return NO_EPOCH
        noted = self.known(facts.published_before.get(there[-1]), NeedPublishedBefore(epoch=there[-1]))
        return NO_EPOCH if noted.problem else min(noted.everywhere, there[-1])

    def had_any(self, history: History) -> bool:
        """Whether any record names a complete epoch of this history, if only the coordinator's records.

        What a replaced process completed in its own logs is none: nothing was ever published of it.
        """
        return bool(history.live or history.unreadable) or self.facts.has_completed

    def trial(self, path: RecoveryPath, tier: Tier, epoch: Epoch) -> str | None:
        """Why a plan could not be built; None if it was not tried."""
        for one in self.facts.trials:
            if (one.path, one.tier, one.epoch, one.operator) == (path, tier, epoch, None):
                return one.problem
        return None

    # ------------------------------------------------------------------ input that is gone

    def lost_since(
        self,
        manifest: Manifest,
        operators: frozenset[OperatorId],
        *,
        tier: Tier = "local",
        renaming: Renaming | None = None,
    ) -> tuple[LostInput, ...] | str:
        """What sources cannot read again after a restore, if the flow may continue without it.

        A text if the checkpoint does not say how far they had read. Raises LostInputError rather than lose input.
        """
        facts, flow, epoch = self.facts, self.definition.flow, manifest.epoch
        new_names = renaming.new_names if renaming is not None else {}
        need = NeedInputSince(manifest=manifest, operators=operators, tier=tier, new_names=new_names)
        wanted = (epoch, operators, tier)
        answers = (one for one in facts.input_since if (one.epoch, one.operators, one.tier) == wanted)
        found = self.known(next(answers, None), need)
        if found.damage:
            return found.damage
        if found.lost and not facts.may_lose_input:
            first = found.lost[0]
            others = sum(one.operator == first.operator for one in found.lost) - 1
            more = f" and {others} more" if others else ""
            raise LostInputError(
                f"input that was read since epoch {epoch} is gone: {first.what}{more}; "
                "a restore would silently lose its rows",
                next_step="make it available and start again, or restore a later checkpoint; nothing has been changed. "
                'missing_input = "continue" continues without it',
                flow=flow,
                operator=first.operator,
                epoch=epoch,
            )
        if found.unknown is not None:
            raise LostInputError(
                f"whether the input since epoch {epoch} can be read again is unknown: {found.unknown.what}",
                next_step=found.unknown.next_step or "check that the server runs; nothing has been changed",
                flow=flow,
                operator=found.unknown.operator,
                epoch=epoch,
            )
        return found.lost

    def lost_ahead(self, ahead: InputAhead) -> tuple[LostInput, ...]:
        """The same for sources that continue where they are, and what they have not read yet."""
        for one in ahead.unknown:
            self.note(f"{one.operator}: whether its input is available is unknown: {one.what}")
        if ahead.lost and not self.facts.may_lose_input:
            first = ahead.lost[0]
            raise LostInputError(
                f"input that was not read yet is gone: {first.what} ({first.why})",
                next_step='make it available and start again; missing_input = "continue" continues without it',
                flow=self.definition.flow,
                operator=first.operator,
            )
        return ahead.lost
