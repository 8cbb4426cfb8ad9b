"""Builds a plan: fresh directories and forked logs. Nothing depends on them until the generation is entered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cutline.base import durable
from cutline.channels.log import ChannelLog
from cutline.errors import CutlineError
from cutline.model.checkpoint import Manifest
from cutline.model.generation import GenerationRecord
from cutline.model.history import Identity
from cutline.model.ids import NO_EPOCH, Generation, OperatorId, Position, SinkId
from cutline.protocol.history.evolution import Evolution
from cutline.protocol.history.lineage import Lineage
from cutline.protocol.recovery.facts import Trial
from cutline.protocol.recovery.plan import RestorePlan
from cutline.protocol.recovery.trial import trial_of
from cutline.recovery.at_rest import FlowAtRest
from cutline.recovery.directories import Restorer
from cutline.recovery.evolve import begin_log, evolve
from cutline.recovery.inputs import ran_in
from cutline.recovery.logs import continued
from cutline.recovery.repeating import build_each_alone
from cutline.storage.detached import DetachedLogs


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result of building a plan."""

    #: The logs of all operators, as the new generation reads and writes them.
    channels: dict[OperatorId, ChannelLog]
    #: Per operator: the generation whose spark_checkpoint_dir it runs on.
    spark_dirs: dict[OperatorId, Generation]
    #: Complete epochs of the resulting history, ascending.
    manifests: list[Manifest]
    #: Operators whose log begins anew.
    begun: tuple[OperatorId, ...] = ()
    #: The plan's evolution, with notes on where new operators begin.
    evolution: Evolution
    #: The generations before, ascending.
    generations: tuple[GenerationRecord, ...] = ()
    #: The claims of the sinks as they are now, unless another start was faster.
    claims: dict[SinkId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds plans for one start. A plan with a damaged checkpoint leaves only files that nothing refers to."""

    flow: FlowAtRest
    generation: Generation
    identity: Identity
    #: The claims that this start may replace.
    claims: dict[SinkId, str]
    #: All generations before this one.
    generations: tuple[GenerationRecord, ...]
    #: The open logs of the newest of them.
    logs: Mapping[OperatorId, ChannelLog]
    may_lose_input: bool
    #: Receives damage that does not prevent the recovery.
    note: Callable[[str], None] = field(default=lambda _: None)

    def build(self, plan: RestorePlan) -> Built | Trial:
        """Raises RecoveryError if no other checkpoint would help, or the error says nothing about this one."""
        match plan.path:
            case "fresh":
                return self._fresh(plan)
            case "resume":
                return self._continued(plan, continued(self.logs, self.generation))
            case "alone":
                return self._alone(plan)
            case "regional":
                return self._or_trial(plan, self._regional)
            case "local" | "remote":
                return self._or_trial(plan, self._whole)

    def _or_trial(self, plan: RestorePlan, build: Callable[[RestorePlan], Built]) -> Built | Trial:
        try:
            return build(plan)
        except (CutlineError, OSError) as error:
            return trial_of(plan, plan.epoch or NO_EPOCH, error, flow=self.flow.graph.flow)

    def _fresh(self, plan: RestorePlan) -> Built:
        flow, lineage = self.flow, Lineage.begin(self.generation)
        channels = {name: ChannelLog.open(name, flow.layout.channel(name), lineage) for name in flow.graph.names}
        for name in flow.graph.names:
            folder = flow.layout.spark_checkpoint_dir(name, self.generation)
            shutil.rmtree(folder, ignore_errors=True)
            durable.make_dir(folder)
        return self._built(plan, channels, dict.fromkeys(flow.graph.names, self.generation))

    def _continued(
        self, plan: RestorePlan, channels: dict[OperatorId, ChannelLog], restored: Sequence[OperatorId] = ()
    ) -> Built:
        """All operators except the ``restored`` ones continue; new ones join them."""
        joined, notes = self._joined(plan, channels)
        spark_dirs = {**self.generations[-1].spark_dirs, **dict.fromkeys([*restored, *joined], self.generation)}
        return self._built(plan, {**channels, **joined}, spark_dirs, begun=tuple(joined), notes=notes)

    def _joined(
        self, plan: RestorePlan, channels: Mapping[OperatorId, ChannelLog]
    ) -> tuple[dict[OperatorId, ChannelLog], dict[OperatorId, str]]:
        """Logs and directories of new operators: they read everything that the logs of their inputs still hold."""
        logs, notes = dict(channels), {}
        joined = [name for name in self.flow.graph.names if name in plan.joined]
        for name in joined:
            positions = {one: logs[one].start for one in self.flow.graph.node(name).inputs}
            logs[name] = begin_log(self.flow.layout, name, positions, self.generation)
            self.flow.query_dirs.begin_anew(self.flow.layout.spark_checkpoint_dir(name, self.generation))
            notes[name] = _beginning(positions, "where its log begins")
        return {name: logs[name] for name in joined}, notes

    def _alone(self, plan: RestorePlan) -> Built | Trial:
        trial = build_each_alone(self.flow, plan, self.logs, self.generation)
        if trial is not None:
            return trial
        return self._continued(plan, continued(self.logs, self.generation), list(plan.alone))

    def _regional(self, plan: RestorePlan) -> Built:
        restored = self._restorer(plan).build_region(plan.manifests[-1], plan.region, self.logs)
        return self._continued(plan, {**continued(self.logs, self.generation), **restored}, list(restored))

    def _whole(self, plan: RestorePlan) -> Built:
        names, restorer, manifests = self.flow.graph.names, self._restorer(plan), list(plan.manifests)
        DetachedLogs(self.flow.layout).put_back(manifests[-1], self.generation)
        spark_dirs = dict.fromkeys(names, self.generation)
        if plan.evolved_epoch is None:
            return self._built(plan, restorer.build(manifests[-1], names), spark_dirs)
        evolved = evolve(restorer, manifests, plan.evolution, epoch=plan.evolved_epoch)
        cuts = evolved.manifest.operators
        notes = {name: _beginning(cuts[name].positions, "after the checkpoint") for name in plan.evolution.added}
        renamed = [new for old, new in plan.evolution.renaming.new_names.items() if old != new]
        built = self._built(plan, evolved.channels, spark_dirs, begun=(*renamed, *plan.evolution.added), notes=notes)
        built.manifests.append(evolved.manifest)
        return built

    def _restorer(self, plan: RestorePlan) -> Restorer:
        new_names = plan.evolution.renaming.new_names
        live = ran_in(self.flow, self.generations[-1], plan.manifests[-1], new_names) if self.generations else {}
        return Restorer(
            flow=self.flow,
            generation=self.generation,
            identity=self.identity,
            claims=self.claims,
            note=self.note,
            may_lose_input=self.may_lose_input,
            ran_in={new_names.get(old, old): folder for old, folder in live.items()},
        )

    def _built(
        self,
        plan: RestorePlan,
        channels: dict[OperatorId, ChannelLog],
        spark_dirs: dict[OperatorId, Generation],
        *,
        begun: tuple[OperatorId, ...] = (),
        notes: Mapping[OperatorId, str] | None = None,
    ) -> Built:
        return Built(
            channels=channels,
            spark_dirs=spark_dirs,
            manifests=list(plan.manifests),
            begun=begun,
            evolution=plan.evolution.with_notes(notes or {}),
            generations=self.generations,
            claims=self.claims,
        )


def _beginning(positions: Mapping[OperatorId, Position], where: str) -> str:
    """How a new operator begins, as text."""
    if not positions:
        return "begins without state, at the beginning of its source"
    shown = ", ".join(f"{name} from entry {position} on" for name, position in positions.items())
    return f"begins without state, reads {shown}, {where}"
