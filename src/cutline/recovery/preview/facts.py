"""The facts of a start that restores an epoch, and its decision: read without lock, fence or change to anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from cutline.errors import CutlineError, InvariantViolation
from cutline.model.checkpoint import Manifest, OperatorRecord
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, SinkId
from cutline.model.status import RewindWindow
from cutline.protocol.recovery.choose import choose
from cutline.protocol.recovery.facts import (
    NeedContent,
    NeedFacts,
    NeedFirstRemote,
    NeedInputSince,
    NeedRemote,
    NeedRemoteEpochs,
    NeedRemoteHistory,
    NeedSinkLimits,
    RecoveryFacts,
    RemoteHistory,
    RemoteRecords,
    RestoreTo,
    SinkFacts,
)
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.protocol.recovery.trial import trial_of
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.facts import Gathering, has_run
from cutline.storage.checkpoints import LocalCheckpointStore

_NO_DOWNLOAD = "a dry run downloads nothing"


class WithSavepoint(LocalCheckpointStore):
    """The checkpoints of a flow, and that of a savepoint: a start puts it among them before it decides."""

    def __init__(
        self, own: LocalCheckpointStore, savepoint: LocalCheckpointStore, epoch: Epoch, inline: InlineOffsets
    ) -> None:
        self._own, self._savepoint, self._epoch, self._inline = own, savepoint, epoch, inline

    def _of(self, epoch: Epoch) -> LocalCheckpointStore:
        return self._savepoint if epoch == self._epoch else self._own

    def epochs(self) -> list[Epoch]:
        return sorted({*self._own.epochs(), self._epoch})

    def load_manifest(self, epoch: Epoch) -> Manifest:
        return self._of(epoch).load_manifest(epoch)

    def recorded(self, epoch: Epoch) -> frozenset[OperatorId]:
        return self._of(epoch).recorded(epoch)

    def load_record(self, manifest: Manifest, operator: OperatorId) -> OperatorRecord:
        record = self._of(manifest.epoch).load_record(manifest, operator)
        return self._inline(record) if manifest.epoch == self._epoch else record

    def __getattr__(self, name: str) -> NoReturn:
        raise InvariantViolation(f"a dry run must not use {name} of the checkpoints")


#: Puts the content of large offsets into a record: it lies in the savepoint, perhaps packed.
InlineOffsets = Callable[[OperatorRecord], OperatorRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command found out before: answers of the running flow, and what is wrong with stored content."""

    sinks: Sequence[SinkFacts]
    #: The content of a checkpoint as far as it can be checked soon: what is wrong with it; empty: nothing.
    content_problem: Callable[[Manifest], str] = lambda _: ""
    #: The epochs of the remote tier; None: there is no remote tier.
    remote_epochs: Callable[[], frozenset[Epoch]] | None = None
    may_lose_input: bool = False
    #: Sinks that could not be asked, and why.
    problems: Mapping[SinkId, str] = field(default_factory=dict)


class _Reading(Gathering):
    """Finds facts without changing anything. Facts that only a start without a request needs are never asked for."""

    def __init__(self, flow: FlowAtRest, restore_to: RestoreTo, asked: Asked) -> None:
        super().__init__(flow, Generation(0), restore_to=restore_to, has_run=has_run(flow))
        self._asked = asked

    def sinks(self) -> tuple[SinkFacts, ...]:
        return tuple(self._asked.sinks)

    def answer(self, facts: RecoveryFacts, need: NeedFacts) -> RecoveryFacts:
        match need:
            case NeedInputSince():
                return super().answer(facts, need)
            case NeedSinkLimits():
                # It could not be asked: the start asks again, and refuses if it must.
                known = (replace(one, highest=one.published, oldest_rewind=NO_EPOCH) for one in facts.sinks)
                return replace(facts, sinks=tuple(known))
            case NeedRemoteHistory():
                return replace(facts, remote_history=RemoteHistory())  # a requested restore gives up what others did
            case NeedRemoteEpochs():
                return replace(facts, remote_epochs=self._remote_epochs())
            case NeedContent(manifest=manifest):
                is_there = manifest.epoch in self._remote_epochs()
                problem = "" if is_there else f"the remote tier does not have epoch {manifest.epoch}"
                return replace(facts, contents={**facts.contents, manifest.epoch: problem})
            case NeedFirstRemote():
                return replace(facts, first_remote=RemoteRecords(problem=_NO_DOWNLOAD))
            case NeedRemote():
                return replace(facts, remote=RemoteRecords(problem=_NO_DOWNLOAD))
            case _:
                raise InvariantViolation(f"a restore on request does not depend on {type(need).__name__}")

    def _remote_epochs(self) -> frozenset[Epoch]:
        return self._asked.remote_epochs() if self._asked.remote_epochs is not None else frozenset()


def decide(flow: FlowAtRest, restore_to: RestoreTo, asked: Asked) -> tuple[RestorePlan | Refusal, RecoveryFacts]:
    """What a start with this request would decide now, and the facts it decides by."""
    reading = _Reading(flow, restore_to, asked)
    facts = replace(
        reading.known_at_once(may_lose_input=asked.may_lose_input), has_remote=asked.remote_epochs is not None
    )
    while True:
        decision = choose(facts)
        if isinstance(decision, Refusal):
            return decision, facts
        if not isinstance(decision, RestorePlan):
            facts = reading.answer(facts, decision)
            continue
        problem = asked.content_problem(decision.manifests[-1]) if decision.tier == "local" else ""
        if not problem:
            return decision, facts
        # As a start finds it out when it builds the directories.
        damage = CutlineError(problem)
        trial = trial_of(decision, restore_to.epoch, damage, flow=flow.graph.flow)
        facts = replace(facts, trials=(*facts.trials, trial))


def sinks_by_records(
    published: Mapping[SinkId, Epoch],
    seen: Mapping[SinkId, Epoch],
    sinks: Iterable[tuple[SinkId, OperatorId]],
    windows: Iterable[RewindWindow] = (),
) -> list[SinkFacts]:
    """Of sinks that cannot be asked now: what the records say. ``windows``: what they said when the flow stopped."""
    told, found = {one.sink: one for one in windows}, list[SinkFacts]()
    for sink, operator in sinks:
        newest = published.get(sink, NO_EPOCH)
        facts = SinkFacts(sink=sink, operator=operator, published=newest, recorded=newest, seen=seen.get(sink))
        if (window := told.get(sink)) is not None:
            facts = replace(
                facts,
                on_rollback=window.on_rollback,
                can_rewind=window.can_rewind,
                oldest_rewind=window.oldest or NO_EPOCH,
                rewind_gaps=tuple(window.gaps),
            )
        found.append(facts)
    return found
