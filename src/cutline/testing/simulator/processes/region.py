"""A region of a running flow is restored: what has failed for good, and everything downstream of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cutline.errors import FencedError
from cutline.model.ids import NO_EPOCH, OperatorId, Position
from cutline.protocol.history.regions import LastRestore
from cutline.protocol.messages.coordinator import RegionLost, RegionRestored
from cutline.protocol.recovery.facts import InputSince, NeedInputSince
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.region import RegionFacts, choose_region, region_to_stop, remembered
from cutline.testing.simulator.processes.answers import definition_of
from cutline.testing.simulator.processes.publishing import begin_immediate
from cutline.testing.simulator.processes.restoring import gone_on, place_snapshot, record_of
from cutline.testing.simulator.world import COORDINATOR, Steps

if TYPE_CHECKING:
    from cutline.testing.simulator.processes.coordinator import CoordinatorProcess


class RegionRestores:
    """One region at a time: each takes the generation that it is restored in."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        self._world = coordinator.world
        self._disk = coordinator.disk
        self._failing: set[OperatorId] = set()
        self._is_busy = False
        #: When each operator was last restored.
        self._last: dict[OperatorId, LastRestore] = {}

    def is_restoring(self, operator: OperatorId) -> bool:
        return operator in self._failing

    def failed(self, operator: OperatorId) -> None:
        """An operator cannot go on where it was: its directory is gone."""
        if operator in self._failing:
            return
        flow = self._coordinator.flow
        region = region_to_stop(definition_of(flow), operator)
        self._failing |= region
        self._world.spawn(self._restore(operator, region), self._coordinator)

    def _choice(self, failed: OperatorId) -> object:
        """Nothing is pending in the region any more: what is it restored to?"""
        flow = self._coordinator.flow
        process = flow.operators[failed]
        reached = process.view().last_batch
        manifests = [one.manifest for one in flow.live() if failed in one.manifest.operators]
        facts = RegionFacts(
            definition=definition_of(flow),
            failed=failed,
            reason="it has lost its directory",
            manifests=tuple(manifests),
            reached=reached,
            has_caught_up=process.query.spark.committed >= reached,
            last=self._last.get(failed),
        )
        decision = choose_region(facts)
        while isinstance(decision, NeedInputSince):
            found = InputSince(epoch=decision.manifest.epoch, operators=decision.operators, tier=decision.tier)
            facts = replace(facts, input_since=(*facts.input_since, found))
            decision = choose_region(facts)
        again = remembered(facts)
        if isinstance(decision, RestorePlan) and again is not None:
            self._last[failed] = again
        return decision

    def _restore(self, failed: OperatorId, region: frozenset[OperatorId]) -> Steps:
        coordinator, disk, flow = self._coordinator, self._disk, self._coordinator.flow
        coordinator.post(RegionLost(operators=region, reason=f"{failed} has lost its directory"))
        yield 1
        while self._is_busy or coordinator.is_pending(region) or coordinator.is_busy():
            yield 5
        self._is_busy = True
        plan = self._choice(failed)
        if not isinstance(plan, RestorePlan):
            # The flow fails, and is started again.
            flow.restart_all(f"a region cannot be restored: {getattr(plan, 'what', 'it would not help')}")
            return
        epoch = plan.alone.get(failed, NO_EPOCH) if plan.epoch is None else plan.epoch
        checkpoint = disk.checkpoint(epoch)
        for operator in sorted(region):
            flow.kill(operator, "its region is restored")
        yield coordinator.slow(2)
        if coordinator.is_fenced():
            coordinator.die("fenced while a region was restored")
            return
        generation = coordinator.generation = disk.next_generation()
        current = flow.current_generation()
        lineage = {name: flow.lineage(name) for name in flow.graph.operators}
        for operator in sorted(region):
            place_snapshot(disk, checkpoint, operator, generation)
            if operator in plan.alone or checkpoint is None:
                lineage[operator] = gone_on(disk, operator, lineage[operator], generation)
            else:
                barrier = checkpoint.manifest.channels[operator].barrier
                lineage[operator] = checkpoint.lineages[operator].fork(generation, Position(barrier + 1))
        yield coordinator.slow(2)
        if coordinator.is_fenced():
            coordinator.die("fenced while a region was restored")
            return
        record = record_of(
            flow,
            generation,
            path=plan.path,
            epoch=plan.epoch,
            lineage=lineage,
            spark_dirs={**current.spark_dirs, **dict.fromkeys(sorted(region), generation)},
        )
        disk.create_generation(record)
        coordinator.lineage = lineage
        self._world.tell(COORDINATOR, "restores a region", to=record.restored_epoch, region=sorted(region))
        self._world.counts["restores"] += 1
        self._world.counts[f"path_{record.path}"] += 1
        try:
            self._rewind(region)
        except FencedError as error:
            flow.fenced(error.what)
            return
        self._failing -= region
        self._is_busy = False
        coordinator.post(RegionRestored(operators=region, generation=generation))
        flow.start_region(region)

    def _rewind(self, region: frozenset[OperatorId]) -> None:
        """Undo what sinks that publish immediately have published of batches that were given up."""
        flow = self._coordinator.flow
        for operator in sorted(region):
            for sink in flow.graph.sinks_of(operator):
                if flow.sinks[sink].is_immediate:
                    begin_immediate(flow, flow.sinks[sink], flow.token)
            self._disk.logs[operator].collect_invisible(flow.lineage(operator))
