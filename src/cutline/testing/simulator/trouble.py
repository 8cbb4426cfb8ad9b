"""What happens to a flow: faults that are brought about, and what people ask of it."""

from __future__ import annotations

import contextlib

from cutline.model.ids import Epoch
from cutline.protocol.messages.coordinator import AnswerRequest, CheckpointOptions, CheckpointRequested
from cutline.testing.simulator.processes.coordinator import CoordinatorProcess
from cutline.testing.simulator.processes.flow import SimulatedFlow
from cutline.testing.simulator.processes.operator import OperatorProcess
from cutline.testing.simulator.processes.remote_tier import collect_beside
from cutline.testing.simulator.site import Site
from cutline.testing.simulator.storage import savepoints
from cutline.testing.simulator.storage.bucket import RemoteAway
from cutline.testing.simulator.world import COORDINATOR, Steps

#: Faults that are brought about, and how often compared with one another.
DELIBERATE = {
    "crash_operator": 5,
    "crash_coordinator": 4,
    "crash_flow": 2,
    "power_cut": 2,
    "zombie_operator": 2,
    "zombie_coordinator": 2,
    "zombie_flow": 1,
    "partition": 2,
    "directory_lost": 2,
    "restore_newest": 1,
    "restore_older": 1,
    "restore_savepoint": 1,
    "clock_jump": 2,
    "host_loss": 2,
    "zombie_host": 1,
    "claim_lost": 1,
    "remote_away": 3,
    "sink_away": 3,
    "backup_restored": 3,
    "bucket_restored": 4,
    "host_returned": 3,
}


#: What people ask of a flow, one as often as the other.
_REQUESTS = (
    "checkpoint",
    "aligned",
    "unaligned",
    "pin",
    "unpin",
    "pause",
    "savepoint",
    "backup",
    "copy",
    "collect",
    "collect",
)


class People:
    """They ask for checkpoints and savepoints, pin epochs, pause and go on, back the flow up, collect garbage."""

    def __init__(self, site: Site) -> None:
        self.is_alive = True
        self._site = site
        self._world = site.world
        self._requests = 0

    def begin(self) -> None:
        self._world.spawn(self._run(), self)

    def _run(self) -> Steps:
        world = self._world
        while True:
            yield world.between(50, 400)
            flow = self._site.flow
            coordinator = flow.coordinator
            if coordinator is None or not coordinator.is_alive:
                continue
            match world.rng.choice(_REQUESTS):
                case "checkpoint":
                    self.request(coordinator, None)
                case "aligned":
                    self.request(coordinator, CheckpointOptions(alignment_limit_ms=None))
                case "unaligned":
                    self.request(coordinator, CheckpointOptions(alignment_limit_ms=0))
                case "pin":
                    kept = [item.epoch for item in coordinator.core.complete]
                    if kept:
                        self.pin(flow, world.rng.choice(kept), is_pinned=True)
                case "unpin":
                    if flow.disk.pins:
                        self.pin(flow, min(flow.disk.pins), is_pinned=False)
                case "savepoint":
                    yield from self._savepoint(flow, coordinator)
                case "backup":
                    self._site.back_up()
                case "copy":
                    self._site.copy_host()
                case "collect":
                    yield from self._collect_remote(flow)
                case "pause":
                    self.pause(flow, is_paused=True)
                    yield world.between(10, 200)
                    self.pause(self._site.flow, is_paused=False)
                case _:
                    pass

    def request(self, coordinator: CoordinatorProcess, options: CheckpointOptions | None) -> str:
        self._requests += 1
        request = f"r{self._requests}"
        coordinator.post(CheckpointRequested(request=request, options=options))
        return request

    def pin(self, flow: SimulatedFlow, epoch: Epoch, *, is_pinned: bool) -> None:
        coordinator = flow.coordinator
        if coordinator is not None:
            coordinator.pin(epoch, is_pinned=is_pinned)
            self._world.tell("person", "pins" if is_pinned else "unpins", epoch=epoch)

    def pause(self, flow: SimulatedFlow, *, is_paused: bool) -> None:
        flow.is_paused = is_paused
        for source in flow.graph.sources:
            process = flow.operators.get(source)
            if process is not None and process.is_alive:
                process.credits.is_withheld = is_paused
                process.query.poke()

    def _savepoint(self, flow: SimulatedFlow, coordinator: CoordinatorProcess) -> Steps:
        """An aligned checkpoint, kept under a name with all it needs."""
        if flow.settings.is_per_operator:
            return
        request = self.request(coordinator, CheckpointOptions(alignment_limit_ms=None))
        answer: AnswerRequest | None = None
        for _ in range(40):
            yield 20
            answer = coordinator.answers.get(request)
            if answer is not None or not coordinator.is_alive:
                break
        if answer is None or not answer.completed or not coordinator.is_alive:
            return
        if coordinator.collector.hold(answer.epoch):
            yield self._world.between(1, 20)
            if coordinator.is_in_charge():
                name = savepoints.create(flow.disk, answer.epoch)
                self._world.tell("person", "has a savepoint", name=name)
                self._world.counts["savepoints"] += 1
            coordinator.collector.end_hold(answer.epoch)

    def _collect_remote(self, flow: SimulatedFlow) -> Steps:
        if self._site.bucket is not None:
            with contextlib.suppress(RemoteAway):
                yield from collect_beside(flow, self._site.bucket)


class Trouble:
    """Brings about one fault after the other."""

    def __init__(self, site: Site, people: People) -> None:
        self.is_alive = True
        self._site = site
        self._world = site.world
        self._people = people
        self._kinds = {name: weight for name, weight in DELIBERATE.items() if site.world.rng.random() < 0.6}

    def begin(self) -> None:
        self._world.spawn(self._run(), self)

    def _run(self) -> Steps:
        names, weights = list(self._kinds), list(self._kinds.values())
        while names:
            yield self._world.between(20, 500)
            kind = self._world.rng.choices(names, weights)[0]
            if self._bring_about(kind):
                self._world.faults[kind] += 1

    def _bring_about(self, kind: str) -> bool:
        """False: there was no occasion for it."""
        site = self._site
        match kind:
            case "host_loss" | "zombie_host":
                return site.lose_host(leaves_zombie=kind == "zombie_host")
            case "remote_away":
                return site.remote_leaves()
            case "sink_away":
                return site.sink_leaves()
            case "backup_restored":
                return site.restore_backup()
            case "bucket_restored":
                return site.restore_bucket()
            case "host_returned":
                return site.return_host()
            case "power_cut":
                site.flow.power_cut()
                return True
            case _:
                return self._strike(site.flow, kind)

    def _strike(self, flow: SimulatedFlow, kind: str) -> bool:
        """What can only happen to a flow that runs."""
        world = self._world
        operator = world.rng.choice(flow.graph.operators)
        if flow.coordinator is None or operator not in flow.operators:
            return False
        match kind:
            case "crash_operator" | "zombie_operator":
                flow.crash_operator(operator, leaves_zombie=kind == "zombie_operator")
            case "crash_coordinator" | "zombie_coordinator":
                flow.crash_coordinator(leaves_zombie=kind == "zombie_coordinator")
            case "crash_flow" | "zombie_flow":
                flow.restart_all("killed", leaves_zombies=kind == "zombie_flow")
            case "claim_lost":
                return self._site.lose_claims()
            case "partition":
                name = world.rng.choice([operator, COORDINATOR])
                flow.network.cut_off.add(name)
                world.tell("network", "is cut", around=name)
                world.after(world.between(50, 1_500), lambda: flow.network.cut_off.discard(name))
            case "directory_lost":
                current = flow.current_generation()
                flow.disk.spark[operator, current.spark_dirs[operator]].is_lost = True
                world.tell(operator, "loses its directory")
                flow.crash_operator(operator, leaves_zombie=world.rng.random() < 0.5)
            case "restore_newest" | "restore_older" | "restore_savepoint":
                return self._restore(flow, kind)
            case "clock_jump":
                processes: list[OperatorProcess | CoordinatorProcess] = [flow.operators[operator], flow.coordinator]
                process = world.rng.choice(_aligning(flow) or processes)
                process.clock_offset_ms += world.between(10, 5_000)
                if process.is_alive:
                    process.clock_jumped()
            case _:
                raise AssertionError(kind)
        return True

    def _restore(self, flow: SimulatedFlow, kind: str) -> bool:
        """A person wants the flow restored to an epoch or a savepoint, and starts it anew for that."""
        if flow.settings.is_per_operator:
            return False  # no checkpoint is of the whole flow
        choice: list[Epoch | str] = []
        if kind == "restore_savepoint":
            choice.extend(savepoints.usable(flow.disk))
        else:
            live = [one.manifest.epoch for one in flow.live()]
            choice.extend(live[:-1] if kind == "restore_older" else live[-1:])
        if not choice:
            return False
        flow.restart_all("a person restores it", target=self._world.rng.choice(choice))
        return True


def _aligning(flow: SimulatedFlow) -> list[OperatorProcess | CoordinatorProcess]:
    """Operators that wait for alignment: a jump of their clock ends the wait before its time."""
    return [one for one in flow.operators.values() if one.is_alive and one.is_aligning()]
