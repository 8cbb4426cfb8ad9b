"""Virtual time, one source of chance, and the story of what happened."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator
from random import Random
from typing import Any, Protocol

#: The coordinator's address.
COORDINATOR = "coordinator"
#: A procedure of several steps: yields how many milliseconds pass before the next one.
Steps = Generator[int, None, None]


class Violation(Exception):  # noqa: N818 (what the simulator looks for)
    """Something happened that must never happen."""


class Crash(Exception):  # noqa: N818 (not an error of the simulator)
    """The process dies here."""


class Living(Protocol):
    """A process that takes steps; a dead one takes none."""

    is_alive: bool


class World:
    """Runs events in the order of their virtual time; equal times in the order in which they were planned."""

    def __init__(self, seed: int, rates: dict[str, float]) -> None:
        self.rng = Random(seed)
        self.now_ms = 1_000_000
        self.steps = 0
        #: Chance of each kind of fault whenever there is an occasion; all are off when the weather is fair.
        self._rates = rates
        self.is_fair = False
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._heap: list[tuple[int, int, Living | None, Callable[[], None]]] = []
        self._planned = 0
        self._story: list[tuple[int, str, str, dict[str, Any]]] = []

    # ------------------------------------------------------------------ time

    def after(self, delay_ms: int, do: Callable[[], None], owner: Living | None = None) -> None:
        """Do something later, unless its owner is dead by then."""
        self._planned += 1
        heapq.heappush(self._heap, (self.now_ms + max(delay_ms, 0), self._planned, owner, do))

    def spawn(self, steps: Steps, owner: Living | None = None) -> None:
        """Take the steps of a procedure one by one, for as long as its owner lives."""

        def step() -> None:
            pause = next(steps, None)
            if pause is not None:
                self.after(pause, step, owner)

        self.after(0, step, owner)

    def run(self, until: Callable[[], bool], *, limit_ms: int) -> bool:
        """Let things happen until the condition holds; False if time is up first."""
        end = self.now_ms + limit_ms
        while self._heap:
            if until():
                return True
            at, _, owner, do = heapq.heappop(self._heap)
            if at > end:
                heapq.heappush(self._heap, (at, 0, owner, do))
                self.now_ms = end
                return False
            self.now_ms = at
            if owner is None or owner.is_alive:
                self.steps += 1
                do()
        return until()

    # ------------------------------------------------------------------ chance

    def set_rates(self, rates: dict[str, float]) -> None:
        self._rates = rates

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind happens on this occasion."""
        if self.is_fair or self.rng.random() >= self._rates.get(kind, 0.0):
            return False
        self.faults[kind] += 1
        return True

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    # ------------------------------------------------------------------ story

    def tell(self, who: str, what: str, /, **facts: Any) -> None:
        self._story.append((self.now_ms, who, what, facts))

    def story(self) -> str:
        """What happened, a line each."""
        return "\n".join(
            f"{at - 1_000_000:>8} ms  {who:<14} {what}{''.join(f'  {name}={value}' for name, value in facts.items())}"
            for at, who, what, facts in self._story
        )
