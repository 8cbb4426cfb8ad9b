"""Many seeds, on all cores, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from cutline.testing.simulator.simulation import FAULTS, Outcome, simulate

_CHUNK = 10


@dataclass(slots=True)
class Report:
    """Many seeds, added up."""

    seeds: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FAULTS, 0)))
    counts: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    largest: int = 0
    violations: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.faults.update(outcome.faults)
        self.counts.update(outcome.counts)
        self.shapes[outcome.shape] += 1
        self.largest = max(self.largest, outcome.operators)
        if outcome.violation:
            self.violations.append(outcome)

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "steps": self.steps,
            "faults": dict(sorted(self.faults.items())),
            "restores": self.counts["restores"],
            "resumes": self.counts["resumes"],
            "checkpoints": self.counts["checkpoints"],
            "aborts": self.counts["aborts"],
            "events": dict(sorted(self.counts.items())),
            "shapes": dict(sorted(self.shapes.items())),
            "largest_flow": self.largest,
            "violations": len(self.violations),
            "failing_seeds": [
                {"seed": one.seed, "violation": one.violation} for one in sorted(self.violations, key=lambda o: o.seed)
            ],
        }


def run_seeds(
    seeds: Iterable[int], *, workers: int, on_done: Callable[[Report], None] | None = None, stop_at_first: bool = False
) -> Report:
    """Run every seed; ``on_done`` hears of the progress."""
    report = Report()
    wanted = list(seeds)
    if workers <= 1:
        outcomes: Iterable[Outcome] = map(simulate, wanted)
        return _collect(report, outcomes, on_done, stop_at_first)
    with ProcessPoolExecutor(workers) as pool:
        return _collect(report, pool.map(simulate, wanted, chunksize=_CHUNK), on_done, stop_at_first)


def _collect(
    report: Report, outcomes: Iterable[Outcome], on_done: Callable[[Report], None] | None, stop_at_first: bool
) -> Report:
    for outcome in outcomes:
        report.add(outcome)
        if on_done is not None:
            on_done(report)
        if stop_at_first and report.violations:
            break
    return report
