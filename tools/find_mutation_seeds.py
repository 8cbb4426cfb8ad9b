"""Finds, for each wrong change to the protocol, the cheapest seed with which the simulator catches it.

    python tools/find_mutation_seeds.py          # all: the whole table of tests/support/mutation_seeds.py
    python tools/find_mutation_seeds.py a_fork_drops_the_last_entry
    python tools/find_mutation_seeds.py --stale  # only those whose recorded seed no longer catches them

Needed after a change of the simulator: it changes the story of every seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutline.testing.simulator import simulate
from tests.support.mutation_seeds import CAUGHT_BY
from tests.support.mutations import all_mutations

#: The search for a change ends with so many seeds that catch it, or with any after so many that were tried; the
#: cheapest of these is recorded.
ENOUGH, LONG_SEARCH = 3, 100


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="the wrong changes; none: all of them")
    parser.add_argument("--seeds", type=int, default=1000, help="search so many seeds, the shortest stories first")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--stale", action="store_true", help="only changes that their recorded seed no longer catches")
    options = parser.parse_args(arguments)
    names = options.names or list(all_mutations())
    unknown = sorted(set(names) - set(all_mutations()))
    if unknown:
        parser.error(f"no such change: {', '.join(unknown)}")
    with ProcessPoolExecutor(options.workers) as pool:
        if options.stale:
            are_caught = pool.map(is_caught_as_recorded, names)
            names = [name for name, is_caught in zip(names, are_caught, strict=True) if not is_caught]
        steps = dict(enumerate(pool.map(steps_of, range(options.seeds), chunksize=10)))
        seeds = sorted(steps, key=lambda seed: (steps[seed], seed))
        search = partial(cheapest_seed, seeds=seeds)
        found = [tell(name, seed) for name, seed in zip(names, pool.map(search, names), strict=True)]
    return 0 if all(found) else 1


def is_caught_as_recorded(name: str) -> bool:
    return name in CAUGHT_BY and steps_until_caught(name, CAUGHT_BY[name]) is not None


def steps_of(seed: int) -> int:
    return simulate(seed).steps


def steps_until_caught(name: str, seed: int) -> int | None:
    """None: the simulator does not notice the change with this seed."""
    with all_mutations()[name]():
        outcome = simulate(seed)
    return outcome.steps if outcome.violation else None


def cheapest_seed(name: str, seeds: Iterable[int]) -> int | None:
    """Of the first few seeds that catch the change, the one with the fewest steps."""
    found: dict[int, int] = {}
    for tried, seed in enumerate(seeds, start=1):
        steps = steps_until_caught(name, seed)
        if steps is not None:
            found[seed] = steps
        if len(found) == ENOUGH or (found and tried >= LONG_SEARCH):
            break
    return min(found, key=lambda seed: (found[seed], seed), default=None)


def tell(name: str, seed: int | None) -> bool:
    """Print the line of the table; False: there is none."""
    print(f'    "{name}": {seed},' if seed is not None else f"    # no seed catches {name}", flush=True)
    return seed is not None


if __name__ == "__main__":
    sys.exit(main())
