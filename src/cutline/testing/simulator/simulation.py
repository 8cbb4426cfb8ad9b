"""One seed: a random flow, a bad time, then fair weather; what must hold is checked at every step and at the end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cutline.errors import CutlineError
from cutline.testing.simulator.fair_weather import FairWeather
from cutline.testing.simulator.graphs import random_graph
from cutline.testing.simulator.settings import random_settings
from cutline.testing.simulator.site import Site
from cutline.testing.simulator.trouble import DELIBERATE, People, Trouble
from cutline.testing.simulator.world import Violation, World

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
FAULTS = (*_OCCASIONAL, *(name for name in DELIBERATE if name not in _OCCASIONAL))
#: Of so many seeds one is in per-operator mode.
_PER_OPERATOR_EACH = 5


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


def simulate(seed: int, *, with_story: bool = False, is_per_operator: bool | None = None) -> Outcome:
    """Live through one seed. The same seed gives the same story, byte for byte.

    ``is_per_operator``: the mode; None lets the seed decide.
    """
    if is_per_operator is None:
        is_per_operator = seed % _PER_OPERATOR_EACH == 3
    simulation = _Simulation(seed, is_per_operator=is_per_operator)
    violation = ""
    try:
        with _quiet():
            simulation.run()
    except Violation as error:
        violation = str(error)
    except (CutlineError, KeyError, AssertionError, ValueError, IndexError) as error:
        # A rule inside the protocol that was broken, or a record it relied on that is not there.
        violation = f"{type(error).__name__}: {error}"
    world, graph = simulation.world, simulation.site.graph
    if violation:
        world.tell("violation", violation)
    return Outcome(
        seed=seed,
        violation=violation,
        story=world.story() if with_story or violation else "",
        steps=world.steps,
        operators=len(graph.operators),
        shape=graph.shape,
        faults=world.faults,
        counts=world.counts,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """The product's code logs what happens to it; of a simulated flow only the story counts."""
    logger = logging.getLogger("cutline")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Simulation:
    def __init__(self, seed: int, *, is_per_operator: bool) -> None:
        self.world = World(seed, {})
        rng = self.world.rng
        # Some days have one kind of trouble, some have all.
        some = rng.random()
        self.world.set_rates(
            {name: rng.random() * most if rng.random() < some else 0.0 for name, most in _OCCASIONAL.items()}
        )
        graph = random_graph(rng)
        settings = random_settings(rng, graph, is_per_operator=is_per_operator)
        self.site = Site(self.world, graph, settings)
        self._people = People(self.site)
        self._trouble = Trouble(self.site, self._people)
        self.world.tell("flow", "is", shape=graph.shape, inputs={name: list(ins) for name, ins in graph.inputs.items()})
        self.world.tell("flow", "has", **_shown(self.site))

    def run(self) -> None:
        world, site = self.world, self.site
        site.flow.begin()
        self._trouble.begin()
        self._people.begin()
        world.run(lambda: bool(site.refusal), limit_ms=world.between(800, 3_500))
        self._trouble.is_alive = self._people.is_alive = False
        world.is_fair = True
        site.flow.network.cut_off.clear()
        world.tell("weather", "is fair now")
        FairWeather(site, self._people).run()


def _shown(site: Site) -> dict[str, object]:
    settings = site.settings
    return {
        "subtasks": sum(site.graph.subtasks.values()),
        "sinks": dict(site.graph.sinks),
        "immediate": sorted(settings.immediate),
        "alignment_limit_ms": "per-operator" if settings.is_per_operator else settings.alignment_limit_ms,
        "max_concurrent": settings.trigger.max_concurrent,
        "retain": settings.retention.count,
        "timeout_ms": settings.timeout_ms,
        "remote": "first" if settings.is_remote_first else settings.has_remote,
    }
