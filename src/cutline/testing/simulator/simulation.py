"""One seed: a random flow, a bad time, then fair weather; what must hold is checked at every step and at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from cutline.errors import CutlineError
from cutline.model.ids import NO_EPOCH, Epoch
from cutline.protocol.messages.coordinator import CheckpointOptions, CheckpointRequested, PinChanged
from cutline.testing.simulator.graphs import random_graph
from cutline.testing.simulator.processes.coordinator import CoordinatorProcess
from cutline.testing.simulator.processes.flow import SimulatedFlow, random_settings
from cutline.testing.simulator.processes.operator import COORDINATOR, OperatorProcess
from cutline.testing.simulator.storage.disk import Data
from cutline.testing.simulator.world import Steps, Violation, World

#: Faults that happen on an occasion, and how often at most.
_OCCASIONAL = {
    "message_lost": 0.15,
    "message_duplicated": 0.1,
    "message_delayed": 0.03,
    "message_reordered": 0.2,
    "store_refused": 0.01,
    "store_unknown": 0.01,
    "slow_disk": 0.05,
    "clock_jump": 0.3,
    "query_failed": 0.05,
    "sink_refused": 0.1,
    "sink_unknown": 0.1,
    "gc_killed": 0.02,
    "recovery_killed": 0.1,
}
#: Faults that somebody brings about, and how often compared with one another.
_DELIBERATE = {
    "crash_operator": 5,
    "crash_coordinator": 4,
    "crash_flow": 2,
    "power_cut": 1,
    "zombie_operator": 2,
    "zombie_coordinator": 2,
    "zombie_flow": 1,
    "partition": 2,
    "directory_lost": 2,
    "restore_newest": 1,
    "restore_older": 1,
    "clock_jump": 1,
}
FAULTS = (*_OCCASIONAL, *(name for name in _DELIBERATE if name not in _OCCASIONAL))
#: After the last fault everything must be done within this time, and so much more for each operator.
_PATIENCE_MS = 60_000
_PATIENCE_PER_OPERATOR_MS = 4_000


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a seed."""

    seed: int
    violation: str = ""
    story: str = ""
    steps: int = 0
    operators: int = 0
    shape: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


#: Of so many seeds one is in per-operator mode.
_PER_OPERATOR_EACH = 5


def simulate(seed: int, *, with_story: bool = False, is_per_operator: bool | None = None) -> Outcome:
    """Live through one seed. The same seed gives the same story, byte for byte.

    ``is_per_operator``: the mode; None lets the seed decide.
    """
    if is_per_operator is None:
        is_per_operator = seed % _PER_OPERATOR_EACH == 3
    simulation = _Simulation(seed, is_per_operator=is_per_operator)
    violation = ""
    try:
        simulation.run()
    except Violation as error:
        violation = str(error)
    except (CutlineError, KeyError, AssertionError, ValueError, IndexError) as error:
        # A rule inside the protocol that was broken, or a record it relied on that is not there.
        violation = f"{type(error).__name__}: {error}"
    world, flow = simulation.world, simulation.flow
    if violation:
        world.tell("violation", violation)
    return Outcome(
        seed=seed,
        violation=violation,
        story=world.story() if with_story or violation else "",
        steps=world.steps,
        operators=len(flow.graph.operators),
        shape=flow.graph.shape,
        faults=world.faults,
        counts=world.counts,
    )


class _Simulation:
    def __init__(self, seed: int, *, is_per_operator: bool) -> None:
        self.is_alive = True
        self.world = World(seed, {})
        rng = self.world.rng
        # Some days have one kind of trouble, some have all.
        some = rng.random()
        self.world.set_rates(
            {name: rng.random() * most if rng.random() < some else 0.0 for name, most in _OCCASIONAL.items()}
        )
        graph = random_graph(rng)
        settings = replace(random_settings(rng, graph), is_per_operator=is_per_operator)
        self.flow = SimulatedFlow(self.world, graph, settings)
        self._deliberate = {name: weight for name, weight in _DELIBERATE.items() if rng.random() < 0.6}
        self._requests = 0
        self.world.tell(
            "flow", "is", shape=graph.shape, inputs={name: list(inputs) for name, inputs in graph.inputs.items()}
        )
        self.world.tell("flow", "has", **_shown(self.flow))

    def run(self) -> None:
        world, flow = self.world, self.flow
        flow.begin()
        world.spawn(self._trouble(), self)
        world.spawn(self._people(), self)
        world.run(lambda: False, limit_ms=world.between(800, 3_500))
        self.is_alive = False  # no more trouble
        world.is_fair = True
        flow.network.cut_off.clear()
        world.tell("weather", "is fair now")
        self._expect("everything is read and published", self._drain)
        self._check_published()
        self._expect("what nobody needs is gone", self._tidy)

    # ------------------------------------------------------------------ trouble

    def _trouble(self) -> Steps:
        names, weights = list(self._deliberate), list(self._deliberate.values())
        while names:
            yield self.world.between(20, 500)
            kind = self.world.rng.choices(names, weights)[0]
            if self._bring_about(kind):
                self.world.faults[kind] += 1

    def _bring_about(self, kind: str) -> bool:
        """False: there was no occasion for it."""
        world, flow = self.world, self.flow
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
            case "power_cut":
                flow.power_cut()
            case "partition":
                name = world.rng.choice([operator, COORDINATOR])
                flow.network.cut_off.add(name)
                world.tell("network", "is cut", around=name)
                world.after(world.between(50, 1_500), lambda: flow.network.cut_off.discard(name))
            case "directory_lost":
                current = flow.current_generation()
                flow.disk.spark[operator, current.spark_dirs[operator]].is_lost = True
                world.tell(operator, "loses its directory")
                flow.crash_operator(operator, leaves_zombie=False)
            case "restore_newest" | "restore_older":
                return self._restore(older=kind == "restore_older")
            case "clock_jump":
                processes: list[OperatorProcess | CoordinatorProcess] = [flow.operators[operator], flow.coordinator]
                process = world.rng.choice(processes)
                process.clock_offset_ms += world.between(10, 5_000)
                if process.is_alive:
                    process.clock_jumped()
            case _:
                raise AssertionError(kind)
        return True

    def _restore(self, *, older: bool) -> bool:
        if self.flow.settings.is_per_operator:
            return False  # there is no line across the flow to go back to
        live = [one.epoch for one in self.flow.live_manifests()]
        choice = live[:-1] if older else live[-1:]
        if not choice:
            return False
        self.flow.restart_all("a person restores it", target=self.world.rng.choice(choice))
        return True

    def _people(self) -> Steps:
        """What people do: ask for checkpoints, pin epochs, pause and go on."""
        world, flow = self.world, self.flow
        while True:
            yield world.between(50, 400)
            if flow.coordinator is None or not flow.coordinator.is_alive:
                continue
            match world.rng.choice(["checkpoint", "aligned", "unaligned", "pin", "unpin", "pause"]):
                case "checkpoint":
                    self._request(None)
                case "aligned":
                    self._request(CheckpointOptions(alignment_limit_ms=None))
                case "unaligned":
                    self._request(CheckpointOptions(alignment_limit_ms=0))
                case "pin":
                    kept = [item.epoch for item in flow.coordinator.core.complete]
                    if kept:
                        self._pin(world.rng.choice(kept), is_pinned=True)
                case "unpin":
                    if flow.disk.pins:
                        self._pin(min(flow.disk.pins), is_pinned=False)
                case "pause":
                    self._pause(True)
                    yield world.between(10, 200)
                    self._pause(False)
                case _:
                    pass

    def _request(self, options: CheckpointOptions | None) -> str:
        assert self.flow.coordinator is not None
        self._requests += 1
        request = f"r{self._requests}"
        self.flow.coordinator.post(CheckpointRequested(request=request, options=options))
        return request

    def _pin(self, epoch: Epoch, *, is_pinned: bool) -> None:
        assert self.flow.coordinator is not None
        # As for a collection: durable before it counts, and gone before it stops counting.
        (self.flow.disk.pins.add if is_pinned else self.flow.disk.pins.discard)(epoch)
        self.flow.coordinator.core_pin(PinChanged(epoch=epoch, is_pinned=is_pinned))
        self.world.tell("person", "pins" if is_pinned else "unpins", epoch=epoch)

    def _pause(self, is_paused: bool) -> None:
        self.flow.is_paused = is_paused
        for source in self.flow.graph.sources:
            process = self.flow.operators.get(source)
            if process is not None and process.is_alive:
                process.credits.is_withheld = is_paused
                process.poke()

    # ------------------------------------------------------------------ fair weather

    def _expect(self, what: str, steps_of: object) -> None:
        done: list[bool] = []

        def steps() -> Steps:
            yield from steps_of()  # type: ignore[operator]
            done.append(True)

        self.world.spawn(steps(), self.flow)
        patience_ms = _PATIENCE_MS + _PATIENCE_PER_OPERATOR_MS * len(self.flow.graph.operators)
        if not self.world.run(lambda: bool(done), limit_ms=patience_ms):
            raise Violation(f"not in {patience_ms} ms after the last fault: {what}")

    def _drain(self) -> Steps:
        """Everything is read by everybody; then one more checkpoint, which every sink publishes."""
        flow = self.flow
        self._pause(False)
        while not self._is_drained():
            yield 20
        while True:
            coordinator = flow.coordinator
            if coordinator is None or not coordinator.is_alive:
                yield 20
                continue
            request = self._request(CheckpointOptions(alignment_limit_ms=None))
            while request not in coordinator.answers and flow.coordinator is coordinator:
                yield 10
            answer = coordinator.answers.get(request)
            if answer is not None and answer.completed:
                return

    def _is_drained(self) -> bool:
        flow = self.flow
        if flow.coordinator is None or set(flow.operators) != set(flow.graph.operators):
            return False
        for name, process in flow.operators.items():
            if not process.is_alive or not process.credits.is_drained():
                return False
            if not flow.graph.inputs[name] and not process.is_exhausted():
                return False
        return True

    def _check_published(self) -> None:
        """What a run without faults publishes: every row of every source, once, on every path to every sink."""
        flow = self.flow
        for name, operator in flow.graph.sinks.items():
            for path in flow.graph.paths[operator].values():
                published = flow.disk.sinks[name].next_row.get(path, 0)
                if published != flow.rows_per_source():
                    raise Violation(f"{name} has published {published} of {flow.rows_per_source()} rows of path {path}")

    def _tidy(self) -> Steps:
        """After a collection nothing is left that no retained epoch needs."""
        flow = self.flow
        for epoch in sorted(flow.disk.pins):
            self._pin(epoch, is_pinned=False)
        yield 50
        while not self._is_tidy():
            coordinator = flow.coordinator
            if coordinator is not None and coordinator.is_alive and not coordinator.core.pending:
                coordinator.collect_now()
            yield 100

    def _is_tidy(self) -> bool:
        flow, disk = self.flow, self.flow.disk
        live = flow.live_manifests()
        reached = {blob for one in live for name in flow.graph.operators for blob in _blobs(flow, one.epoch, name)}
        if disk.blobs - reached - flow.claims():
            return False
        oldest = live[0].epoch if live else NO_EPOCH
        for name in flow.graph.operators:
            needed = min(one.needed_from(name) for one in live if name in one.read)
            entries = disk.logs[name].visible(flow.current_generation().lineage[name])
            if any(isinstance(entry, Data) and entry.seq < needed for entry in entries[:-1]):
                return False
        return all(epoch >= oldest for epoch, _, _ in disk.records)


def _blobs(flow: SimulatedFlow, epoch: Epoch, operator: object) -> tuple[object, ...]:
    record = flow.disk.record_of(flow.disk.manifests[epoch], operator)  # type: ignore[arg-type]
    return record.blobs if record else ()


def _shown(flow: SimulatedFlow) -> dict[str, object]:
    settings = flow.settings
    return {
        "subtasks": sum(flow.graph.subtasks.values()),
        "sinks": dict(flow.graph.sinks),
        "alignment_limit_ms": "per-operator" if settings.is_per_operator else settings.alignment_limit_ms,
        "max_concurrent": settings.trigger.max_concurrent,
        "retain": settings.retention.count,
        "timeout_ms": settings.timeout_ms,
    }
