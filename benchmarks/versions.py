"""Two checkouts of Cutline side by side: the same benchmark on each, alternately, in separate processes.

    python benchmarks/versions.py --before ../old --rounds 3 -- checkpoint_latency.py --operators 10 --aligned 3
    python benchmarks/versions.py --before ../old -- overhead.py --variant cutline-1s

Each checkout runs its own copy of the benchmark with its own sources and this interpreter's packages. Prints one line
of JSON: every figure of every round, the ratio of the medians, and the CPU seconds of Python (not of the JVM).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]


def run(checkout: Path, command: list[str]) -> dict[str, float]:
    """The figures that one run printed, flat, and what it cost."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / command[0]), *command[1:]],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {**flat(json.loads(done.stdout.splitlines()[-1])), "cpu_seconds": cpu}


def flat(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, int | float):
        return {name: value}
    found: dict[str, float] = {}
    for part, item in value.items() if isinstance(value, dict) else ():
        found.update(flat(item, f"{name}.{part}".strip(".")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--after", type=Path, default=HERE, help="this checkout, unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("command", nargs="+", help="the benchmark and its arguments, after --")
    wanted = parser.parse_args()
    checkouts = {"before": wanted.before.resolve(), "after": wanted.after.resolve()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    load_before = os.getloadavg()[0]
    for number in range(wanted.rounds):
        # The second round begins with the other one: what comes later in a round may find the machine warmer.
        for name in sorted(checkouts, reverse=number % 2 == 0):
            found[name].append(run(checkouts[name], wanted.command))
            print(f"round {number + 1} {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    keys = sorted(set.intersection(*(set(one) for runs in found.values() for one in runs)))
    figures: dict[str, Any] = {}
    for key in keys:
        rounds = {name: [round(one[key], 3) for one in runs] for name, runs in found.items()}
        median = {name: statistics.median(values) for name, values in rounds.items()}
        ratio = round(median["after"] / median["before"], 3) if median["before"] else None
        figures[key] = {**rounds, "after_vs_before": ratio}
    loads = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    print(json.dumps({"command": wanted.command, "load": loads, "figures": figures}))


if __name__ == "__main__":
    main()
