"""Random flows: chains, diamonds, fan-in, fan-out, and anything in between."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from cutline.model.ids import OperatorId, SinkId

_MOST_PATHS = 12
_SHAPES = ("chain", "diamond", "fan-in", "fan-out", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A flow as the simulator knows it. A path is a way from a source to an operator; it has a number."""

    shape: str
    inputs: dict[OperatorId, tuple[OperatorId, ...]]
    consumers: dict[OperatorId, tuple[OperatorId, ...]]
    subtasks: dict[OperatorId, int]
    sinks: dict[SinkId, OperatorId]
    #: Per operator: (input, path that ends there) → the path that goes on to this operator. A source has its own.
    paths: dict[OperatorId, dict[tuple[OperatorId | None, int], int]]

    @property
    def operators(self) -> tuple[OperatorId, ...]:
        return tuple(self.inputs)

    @property
    def sources(self) -> tuple[OperatorId, ...]:
        return tuple(name for name, inputs in self.inputs.items() if not inputs)

    def touched_by(self) -> dict[OperatorId, set[OperatorId]]:
        """Per channel: who writes or reads it."""
        return {name: {name, *readers} for name, readers in self.consumers.items()}

    def sinks_of(self, operator: OperatorId) -> tuple[SinkId, ...]:
        return tuple(sink for sink, owner in self.sinks.items() if owner == operator)


def random_graph(rng: Random) -> Graph:
    """1 to 50 operators with 1 to 16 subtasks; small ones more often."""
    size = rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 8]) if rng.random() < 0.97 else rng.randint(9, 50)
    shape = rng.choice(_SHAPES)
    inputs = _inputs(rng, shape, size)
    consumers = {name: tuple(c for c, wanted in inputs.items() if name in wanted) for name in inputs}
    leaves = [name for name, readers in consumers.items() if not readers]
    others = [name for name in inputs if name not in leaves]
    owners = [*leaves, *rng.sample(others, min(len(others), rng.choice([0, 0, 1, 2])))]
    if len(owners) < len(inputs) and rng.random() < 0.2:
        owners.append(rng.choice(owners))  # two sinks on one operator
    most = 16 if rng.random() < 0.1 else 3
    return Graph(
        shape=shape,
        inputs=inputs,
        consumers=consumers,
        subtasks={name: rng.randint(1, most) for name in inputs},
        sinks={SinkId(f"sink{number}"): owner for number, owner in enumerate(owners)},
        paths=_paths(inputs),
    )


def _inputs(rng: Random, shape: str, size: int) -> dict[OperatorId, tuple[OperatorId, ...]]:
    names = [OperatorId(f"op{number}") for number in range(size)]
    inputs: dict[OperatorId, tuple[OperatorId, ...]] = {}
    ways: dict[OperatorId, int] = {}
    for number, name in enumerate(names):
        chosen = tuple(dict.fromkeys(_chosen(rng, shape, number, names)))
        while sum(ways[one] for one in chosen) > _MOST_PATHS:
            chosen = chosen[:-1]
        inputs[name] = chosen
        ways[name] = sum(ways[one] for one in chosen) or 1
    return inputs


def _chosen(rng: Random, shape: str, number: int, names: list[OperatorId]) -> tuple[OperatorId, ...]:
    if number == 0:
        return ()
    last = names[number - 1]
    if shape == "chain":
        return (last,)
    if shape == "fan-out":
        return (names[rng.randrange((number + 1) // 2)],)
    if shape == "diamond":
        # 0 feeds 1 and 2, which feed 3, which feeds 4 and 5 …
        return {0: (last, names[number - 2]), 1: (last,), 2: (names[number - 2],)}[number % 3]
    if shape == "fan-in":
        return () if number <= max(1, len(names) // 2) and number < len(names) - 1 else (last, names[0])
    count = rng.choice([0, 1, 1, 1, 2, 3])
    return tuple(sorted(rng.sample(names[:number], min(count, number)), key=names.index))


def _paths(
    inputs: dict[OperatorId, tuple[OperatorId, ...]],
) -> dict[OperatorId, dict[tuple[OperatorId | None, int], int]]:
    paths: dict[OperatorId, dict[tuple[OperatorId | None, int], int]] = {}
    number = 0
    for name, wanted in inputs.items():
        here: dict[tuple[OperatorId | None, int], int] = {}
        before: list[tuple[OperatorId | None, int]] = [(one, path) for one in wanted for path in paths[one].values()]
        for way in before or [(None, -1)]:
            here[way] = number
            number += 1
        paths[name] = here
    return paths
