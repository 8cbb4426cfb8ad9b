"""How a flow recovers when it starts: fence → facts → choose → build → enter. The caller settles the rest.

Everything is prepared first; creating the generation record completes the recovery (``cutline.recovery.enter``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from cutline.base.crashpoints import crashpoint
from cutline.base.logs import get_logger
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import Epoch, Generation, OperatorId, SinkId
from cutline.model.layout import Layout
from cutline.ports.generation_store import GenerationStore
from cutline.ports.metadata import PendingRecord
from cutline.protocol.deploys import NamedSavepoints
from cutline.protocol.history.epochs import GenerationStart
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.histories import identities_of
from cutline.protocol.history.known_checkpoints import generation_starts_of
from cutline.protocol.recovery.choose import check_histories, choose, evolution_at_start
from cutline.protocol.recovery.facts import RecoveryFacts, RestoreTo, Trial
from cutline.protocol.recovery.history_rules import newest_to_find
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.build import Builder, Built
from cutline.recovery.enter import Entry, enter, new_identity
from cutline.recovery.evolve import upload_evolved
from cutline.recovery.facts import Gathering, declared_against, has_run
from cutline.storage.detached import DetachedLogs
from cutline.worker.immediate_publishing import ImmediateSink

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The flow as it will run."""

    generation: Generation
    #: resume, alone, regional, local, remote or fresh.
    path: str
    restored_epoch: Epoch | None
    reason: str
    channels: dict[OperatorId, ChannelLog]
    spark_dirs: dict[OperatorId, Generation]
    record: GenerationRecord
    #: Complete epochs of the present history, ascending.
    manifests: list[Manifest]
    #: Epochs without an outcome. Every complete epoch is among the manifests, or one of these.
    pending: list[PendingRecord]
    #: All generations up to this one.
    generation_starts: list[GenerationStart]
    #: Which operators in storage are which operators of the code.
    evolution: Evolution
    #: The claims of the sinks when the recovery path was chosen; the start replaces these and no others.
    claims: dict[SinkId, str] = field(default_factory=dict)
    #: The identities of the generations of this history.
    known: frozenset[Identity] = frozenset()
    #: The newest epoch that a sink may show when it is claimed; None: whatever it shows.
    newest_to_find: Epoch | None = None
    #: All problems that the recovery found, as text.
    problems: list[str] = field(default_factory=list)


#: Called with the plan and the generations before it when all is built: the code of this start runs only after it.
#: Returns the savepoints that the record of the generation names.
BeforeEntering = Callable[[RestorePlan, Sequence[GenerationRecord]], NamedSavepoints]


class Recovery:
    """Finds the best recovery path and performs it."""

    def __init__(
        self,
        flow: FlowAtRest,
        *,
        restore_to: RestoreTo | None = None,
        may_lose_input: bool = False,
        before_entering: BeforeEntering = lambda plan, generations: NamedSavepoints(),
    ) -> None:
        """``restore_to``: a restore request: the whole flow must be restored to this epoch.

        ``may_lose_input``: the flow continues without input that its sources can no longer read.
        """
        self._before_entering = before_entering
        self._flow = flow
        self._restore_to = restore_to
        self._may_lose_input = may_lose_input
        self._identity = new_identity()
        self._problems: list[str] = []

    def check_definition(self) -> None:
        """Raise if the flow as declared cannot continue from the stored records. Call it before sinks are opened."""
        flow = self._flow
        evolution_at_start(flow.definition, declared_against(flow, self._restore_to), self._restore_to)

    def recover(self) -> Recovered:
        """Recover the best state there is. Raises RecoveryError rather than lose anything silently."""
        self.check_definition()
        is_known = has_run(self._flow)
        self._check_histories(has_run=is_known)
        # The fence first: from here on no earlier process begins an epoch. Then pending epochs, and manifests last: a
        # manifest that an earlier process still stores is then either found, or its epoch is known to be pending.
        generation = self._fence()
        settle_put_back(self._flow.layout, self._flow.generations)
        pending = self._flow.metadata.pending()
        gathering = Gathering(self._flow, generation, restore_to=self._restore_to, has_run=is_known)
        facts = gathering.known_at_once(may_lose_input=self._may_lose_input)
        plan, built, facts = self._built(gathering, facts, generation)
        if plan.tier != "none":
            crashpoint("restore-dirs-built")
        named = self._before_entering(plan, built.generations)
        upload_evolved(plan, built.manifests, facts.sinks, self._flow, generation)
        record = self._enter(plan, built, generation, named)
        DetachedLogs(self._flow.layout).settle(generation)
        self._flow.metadata.count_recovery(plan.path)
        known = identities_of([*built.generations, record]) | self._flow.metadata.announced()
        if self._flow.remote is not None:
            # Others that were found there and did not prevent the start are given up, as a person has requested.
            there = facts.remote_history.generations if facts.remote_history is not None else ()
            self._flow.remote.remember(known | identities_of(there))
        self._report(plan, built, generation)
        if plan.path == "resume":
            self._move_past_lost_input(plan, built)
        return Recovered(
            generation=generation,
            path=plan.path,
            restored_epoch=plan.epoch,
            reason=plan.reason,
            channels=built.channels,
            spark_dirs=built.spark_dirs,
            record=record,
            manifests=built.manifests,
            pending=pending,
            generation_starts=generation_starts_of([*built.generations, record]),
            evolution=built.evolution,
            claims=built.claims,
            known=known,
            newest_to_find=newest_to_find(facts),
            problems=self._problems,
        )

    def _check_histories(self, *, has_run: bool) -> None:
        """Raise OtherHistoryError before anything is written: a fence would stop the host that runs the flow."""
        gathering = Gathering(self._flow, Generation(0), restore_to=self._restore_to, has_run=has_run)
        facts = gathering.known_at_once(may_lose_input=self._may_lose_input)
        while (found := check_histories(facts)) is not None:
            if isinstance(found, Refusal):
                self._note_all(found.problems)
                raise found.error()
            facts = gathering.answer(facts, found)

    def _fence(self) -> Generation:
        flow = self._flow
        newest = _newest_generation(flow)
        if flow.remote is None:
            return flow.metadata.next_generation(Generation(newest + 1))
        # A host without records of the flow cannot start it without the remote tier.
        is_needed = not flow.generations.load_all()
        return flow.remote.claim(flow.metadata.next_generation, newest, is_needed=is_needed)

    def _built(
        self, gathering: Gathering, facts: RecoveryFacts, generation: Generation
    ) -> tuple[RestorePlan, Built, RecoveryFacts]:
        """Choose, find facts and build until a plan succeeds."""
        claims = {one.sink: one.claim for one in facts.sinks}
        while True:
            decision = choose(facts)
            if isinstance(decision, Refusal):
                self._note_all(decision.problems)
                raise decision.error()
            if not isinstance(decision, RestorePlan):
                facts = gathering.answer(facts, decision)
                continue
            self._note_all(decision.problems)
            self._tell(decision)
            built = Builder(
                flow=self._flow,
                generation=generation,
                identity=self._identity,
                claims=claims,
                generations=tuple(self._flow.generations.load_all()),
                logs=gathering.logs,
                may_lose_input=self._may_lose_input,
                note=self._note,
            ).build(decision)
            if not isinstance(built, Trial):
                return decision, built, facts
            facts = replace(facts, trials=(*facts.trials, built))

    def _enter(
        self, plan: RestorePlan, built: Built, generation: Generation, savepoints: NamedSavepoints
    ) -> GenerationRecord:
        is_whole = plan.path in ("local", "remote")
        entry = Entry(
            generation=generation,
            identity=self._identity,
            lineages={name: channel.lineage for name, channel in built.channels.items()},
            spark_dirs=built.spark_dirs,
            generations=built.generations,
            begun=built.begun,
            restored=plan.manifests[-1] if is_whole else None,
            savepoints=savepoints,
        )
        return enter(plan, entry, self._flow)

    def _move_past_lost_input(self, plan: RestorePlan, built: Built) -> None:
        """Only now that the lost input is recorded: afterwards nothing shows that it ever existed."""
        for name in {one.operator for one in plan.lost_input}:
            folder = self._flow.layout.spark_checkpoint_dir(name, built.spark_dirs[name])
            self._flow.query_dirs.skip_lost_input(folder, folder)

    def _report(self, plan: RestorePlan, built: Built, generation: Generation) -> None:
        flow = self._flow.graph.flow
        # A flow that begins anew because of damage reads all its input again.
        is_usual = plan.path == "resume" or (plan.path == "fresh" and not plan.problems)
        level = log.info if is_usual else log.warning
        level("recovered", flow=flow, path=plan.path, generation=generation, epoch=plan.epoch, reason=plan.reason)
        for one in built.evolution.operators if not built.evolution.is_unchanged else ():
            level = log.info if one.fate in ("kept", "added") else log.warning
            level(f"operator_{one.fate}", flow=flow, was=one.was, now=one.now, note=one.note)

    def _tell(self, plan: RestorePlan) -> None:
        if plan.epoch is None or not plan.manifests:
            self._flow.progress.tell(plan.path)
            return
        manifest, region = plan.manifests[-1], plan.region or frozenset(plan.manifests[-1].operators)
        of_bytes = sum(cut.size_bytes for name, cut in manifest.operators.items() if name in region)
        self._flow.progress.tell(f"{plan.path}, epoch {plan.epoch}", of_bytes)

    def _note_all(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            self._note(problem)

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)
            log.warning("recovery_problem", flow=self._flow.graph.flow, problem=problem)


def settle_put_back(layout: Layout, generations: GenerationStore) -> None:
    """What a start that was killed has put back into the logs stays only if it had entered its generation."""
    entered = max((record.generation for record in generations.load_all()), default=None)
    DetachedLogs(layout).settle(entered)


def _newest_generation(flow: FlowAtRest) -> Generation:
    """The newest generation in any record: the coordinator's own records may be lost."""
    known = [record.generation for record in flow.generations.load_all()]
    for epoch in flow.checkpoints.epochs():
        try:
            known.append(flow.checkpoints.load_manifest(epoch).generation)
        except (CutlineError, OSError):
            continue
    # A storage folder that was restored from a backup lacks generations that a sink knows. Their numbers must not be
    # used again: immediate publishing numbers batches by them.
    known += [sink.newest_generation() for sink in flow.sinks.values() if isinstance(sink, ImmediateSink)]
    return Generation(max(known, default=0))
