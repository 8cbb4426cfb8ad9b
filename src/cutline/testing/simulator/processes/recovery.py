"""One start of the flow on one host: fence, facts, the protocol's choice, build, enter, settle the sinks.

Every choice is made by ``cutline.protocol.recovery.choose``; here its questions are answered from the simulated disk
and bucket, and its plan is carried out. It may be killed at several places.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from cutline.model.generation import GenerationRecord
from cutline.model.history import Takeover
from cutline.model.ids import NO_EPOCH, Epoch, Generation, OperatorId, Position, SinkId
from cutline.protocol.history.histories import continued_epoch, history_in, identities_of, with_takeover
from cutline.protocol.history.known_checkpoints import highest_epoch
from cutline.protocol.history.lineage import Lineage, lineage_of
from cutline.protocol.history.remote_claims import generation_to_take
from cutline.protocol.publish.immediate import generation_of
from cutline.protocol.recovery import sink_rules
from cutline.protocol.recovery.choose import check_histories, choose
from cutline.protocol.recovery.facts import NeedFacts, RecoveryFacts, Trial
from cutline.protocol.recovery.history_rules import newest_to_find
from cutline.protocol.recovery.plan import Refusal, RestorePlan
from cutline.testing.simulator.processes import answers
from cutline.testing.simulator.processes.publishing import SimulatedSink, begin_immediate
from cutline.testing.simulator.processes.remote_tier import claim, enter
from cutline.testing.simulator.processes.restoring import gone_on, place_snapshot, record_of
from cutline.testing.simulator.storage import checks
from cutline.testing.simulator.storage.bucket import Fenced, RemoteAway
from cutline.testing.simulator.storage.checkpoints import Checkpoint
from cutline.testing.simulator.storage.sinks import SinkTarget
from cutline.testing.simulator.world import Steps, Violation

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.flow import SimulatedFlow

T = TypeVar("T")
#: How long a start waits before it asks the remote tier again.
_RETRY_MS = 40
_MOST_QUESTIONS = 200


class Start:
    """Killed before its generation record is created, it has changed nothing; killed after it, the next one goes on."""

    def __init__(self, flow: SimulatedFlow, target: Epoch | str | None) -> None:
        self._flow = flow
        self._world = flow.world
        self._disk = flow.disk
        self._bucket = flow.site.bucket
        self._target = target
        self._attempt = flow.attempt
        self._token = flow.token
        #: The claims of the sinks when the recovery path was chosen.
        self._claims: dict[SinkId, str] = {}
        self._newest_to_find: Epoch | None = None

    def run(self) -> Steps:
        try:
            yield from self._run()
        except Fenced:
            if not self._is_void():
                self._flow.fenced("another process has begun a newer generation")

    def _is_void(self) -> bool:
        return self._attempt != self._flow.attempt

    def _is_killed(self, where: str) -> bool:
        if not self._world.strikes("recovery_killed"):
            return False
        self._flow.restart_all(f"killed {where}", target=self._target)
        return True

    def _run(self) -> Steps:
        flow, disk = self._flow, self._disk
        yield self._world.between(5, 60)
        if self._is_void():
            return
        refusal = yield from self._history_refused()
        if self._is_void():
            return
        if refusal is not None:
            flow.refused(refusal, self._target)
            return
        generation = yield from self._new_generation()
        plan = yield from self._plan()
        if plan is None or self._is_void():
            return
        if isinstance(plan, Refusal):
            flow.refused(plan, self._target)
            return
        record = self._build(plan, generation)
        yield self._world.between(1, 10)
        if self._is_void() or disk.generation != generation or self._is_killed("before its generation was recorded"):
            return
        bucket = self._bucket
        if bucket is not None and record.restored_epoch is not None:
            disk.announced.add(record.identity)
            yield from self._patiently(lambda: enter(bucket, record, self._token))
            if self._is_void() or self._is_killed("after the remote tier was told"):
                return
        if not disk.create_generation(record):
            return
        self._world.tell("flow", "returns", host=disk.name, path=plan.path, generation=generation, epoch=plan.epoch)
        self._world.counts["restores" if record.restored_epoch is not None else "resumes"] += 1
        self._world.counts[f"path_{plan.path}"] += 1
        self._target = None
        if self._is_killed("right after its generation was recorded"):
            return
        self._settle(plan, record)
        if self._is_killed("after its sinks were settled"):
            return
        yield from self._number_epochs(plan)
        if not self._is_void():
            flow.start_processes(record)

    def _patiently(self, ask: Callable[[], T]) -> Generator[int, None, T]:
        """Ask the remote tier until it answers."""
        while True:
            try:
                return ask()
            except RemoteAway:
                self._world.counts["remote_waits"] += 1
                yield _RETRY_MS

    # ------------------------------------------------------------------ the fence

    def _new_generation(self) -> Generator[int, None, Generation]:
        """A generation that no other host has. If the flow can start without the remote tier, it is claimed later."""
        disk, bucket = self._disk, self._bucket
        # A folder that was restored from a backup does not know of generations that only a sink has heard of.
        published = [generation_of(one.ledger.highest) for one in self._flow.sinks.values() if one.is_immediate]
        newest = max([disk.highest_generation(), *published])
        if bucket is None:
            return disk.next_generation(generation_to_take(newest))
        is_needed = not disk.generations
        if is_needed:
            newest = max(newest, (yield from self._patiently(bucket.newest_generation)))
        elif not bucket.is_away:
            newest = max(newest, bucket.newest_generation())
        generation = disk.next_generation(generation_to_take(newest, are_records_lost=is_needed))
        while is_needed or not bucket.is_away:
            taken = generation
            if (yield from self._patiently(lambda: claim(bucket, taken, self._token))):  # noqa: B023
                break
            there = yield from self._patiently(bucket.newest_generation)
            generation = disk.next_generation(generation_to_take(there, are_records_lost=is_needed))
        return generation

    # ------------------------------------------------------------------ the choice

    def _history_refused(self) -> Generator[int, None, Refusal | None]:
        """Asked before anything is written."""
        facts = answers.first_facts(self._flow, self._target)
        while (found := check_histories(facts)) is not None:
            if isinstance(found, Refusal):
                return found
            facts = yield from self._answered(facts, found)
            if self._is_void():
                return None
        return None

    def _answered(self, facts: RecoveryFacts, need: NeedFacts) -> Generator[int, None, RecoveryFacts]:
        is_required = answers.is_required(need)
        while True:
            try:
                return answers.answered(self._flow, facts, need)
            except RemoteAway:
                if not is_required:
                    return answers.unanswered(facts, need)
                self._world.counts["remote_waits"] += 1
                yield _RETRY_MS

    def _plan(self) -> Generator[int, None, RestorePlan | Refusal | None]:
        facts: RecoveryFacts = answers.first_facts(self._flow, self._target)
        self._claims = {one.sink: one.claim for one in facts.sinks}
        for _ in range(_MOST_QUESTIONS):
            decision = choose(facts)
            if isinstance(decision, Refusal):
                return decision
            self._newest_to_find = newest_to_find(facts)
            if facts.remote_history is not None:
                self._flow.known_there = identities_of(facts.remote_history.generations)
            if isinstance(decision, RestorePlan):
                trial = self._tried_in_vain(decision)
                if trial is None:
                    return decision
                facts = replace(facts, trials=(*facts.trials, trial))
                continue
            facts = yield from self._answered(facts, decision)
            if self._is_void():
                return None
        raise Violation("a start asks for facts without end")

    def _tried_in_vain(self, plan: RestorePlan) -> Trial | None:
        """A plan that cannot be built, because this host has only the records of its checkpoint."""
        if plan.tier != "local" or plan.epoch is None or plan.epoch not in self._disk.only_records:
            return None
        problem = "its content is not on this host"
        return Trial(path=plan.path, tier=plan.tier, epoch=plan.epoch, problem=problem)

    # ------------------------------------------------------------------ building

    def _build(self, plan: RestorePlan, generation: Generation) -> GenerationRecord:
        flow, disk = self._flow, self._disk
        current = disk.newest_generation()
        names = flow.graph.operators
        lineage: dict[OperatorId, Lineage] = {}
        spark_dirs: dict[OperatorId, Generation] = {}
        restored = frozenset(names) if plan.path == "fresh" else plan.region | frozenset(plan.alone)
        checkpoint = disk.checkpoint(plan.epoch) if plan.epoch is not None else None
        if plan.path == "fresh" and flow.live():
            raise Violation("a flow that has checkpoints begins from nothing")
        if plan.path in ("local", "remote") and checkpoint is not None:
            checks.check_reachable(disk, checkpoint)
            if checkpoint.manifest.epoch in disk.detached:
                flow.world.counts["put_back"] += 1
            for channel, entry in disk.detached.get(checkpoint.manifest.epoch, ()):
                disk.logs[channel].put(entry)
        for name in names:
            if name in plan.alone:
                epoch = plan.alone[name]
                place_snapshot(disk, disk.checkpoint(epoch) if epoch != NO_EPOCH else None, name, generation)
            elif name in restored:
                place_snapshot(disk, checkpoint, name, generation)
            if name in plan.region and checkpoint is not None:
                lineage[name] = self._forked(checkpoint, name, generation)
            elif plan.path == "fresh" or current is None:
                lineage[name] = Lineage.begin(generation)
            else:
                lineage[name] = gone_on(disk, name, lineage_of(current.lineage[name]), generation)
            spark_dirs[name] = generation if name in restored or current is None else current.spark_dirs[name]
        return record_of(
            flow, generation, path=plan.path, epoch=plan.epoch, lineage=lineage, spark_dirs=spark_dirs,
            reason=plan.reason,
        )  # fmt: skip

    def _forked(self, checkpoint: Checkpoint, name: OperatorId, generation: Generation) -> Lineage:
        cut = checkpoint.manifest.channels[name]
        lineage = checkpoint.lineages[name].fork(generation, Position(cut.barrier + 1))
        first = checkpoint.needs.channels[name]
        damage = self._disk.logs[name].damage(lineage, first)
        if damage:
            raise Violation(f"epoch {checkpoint.manifest.epoch} cannot be restored: {name}: {damage}")
        return lineage

    # ------------------------------------------------------------------ sinks and numbers

    def _settle(self, plan: RestorePlan, record: GenerationRecord) -> None:
        """Undo what sinks published of a history that was given up, and record how far each one is."""
        flow, disk = self._flow, self._disk
        claimed: list[SinkTarget] = []
        for target in flow.sinks.values():
            takeover = Takeover(
                generation=record.generation,
                identity=record.identity,
                epoch=continued_epoch(
                    plan.epoch, plan.manifests, target.operator, is_per_operator=flow.settings.is_per_operator
                ),
                started_ms=record.started_ms,
                host=record.host,
            )
            # Before it is asked how far it is: a process that was thought dead publishes nothing any more.
            before = self._claims[target.sink]
            own = identities_of(disk.generations.values())
            if not target.claim(self._token, with_takeover(before, takeover, own), expected=before):
                raise Fenced
            claimed.append(target)
            newest = self._newest_to_find
            if newest is not None and not target.is_immediate and target.ledger.published > newest:
                for one in claimed:
                    one.claim(self._token, history_in(self._claims[one.sink]), expected=one.claimed())
                raise Fenced
        for facts in answers.sink_facts(flow):
            settled = sink_rules.settle(facts, plan.manifests, is_per_operator=flow.settings.is_per_operator)
            target = flow.sinks[facts.sink]
            if settled.rewind_to is not None:
                disk.seen[facts.sink] = NO_EPOCH
                SimulatedSink(target, self._world, self._token).rewind(settled.rewind_to)
                self._world.counts["sink_rewinds"] += 1
            disk.published[facts.sink] = settled.reached
            if not target.is_immediate:
                disk.seen[facts.sink] = target.ledger.published
        for name in flow.graph.operators:
            for sink in flow.graph.sinks_of(name):
                if flow.sinks[sink].is_immediate:
                    begin_immediate(flow, flow.sinks[sink], self._token)
            disk.logs[name].collect_invisible(flow.lineage(name))
        disk.has_run = True

    def _number_epochs(self, plan: RestorePlan) -> Steps:
        """New epochs are above all that anything has ever seen."""
        flow, disk = self._flow, self._disk
        there: list[Epoch] = []
        if self._bucket is not None and not self._bucket.is_away:
            there = self._bucket.epochs()
        barriers = [
            entry.epoch
            for name in flow.graph.operators
            for entry in disk.logs[name].view(flow.lineage(name)).entries
            if hasattr(entry, "epoch")
        ]
        sinks = [target.ledger.highest for target in flow.sinks.values() if not target.is_immediate]
        seen = [*barriers, *disk.manifests, *sinks, *there, *(one.epoch for one in plan.manifests)]
        flow.highest_seen = highest_epoch(disk.last_epoch, seen)
        yield 0
