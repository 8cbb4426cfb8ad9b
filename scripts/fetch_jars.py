"""Fetches the Java archives that some tests, benchmarks and the demo need, with Maven, into a cache folder.

``python scripts/fetch_jars.py [SET…]``, all by default. A set that cannot be had is named in one line, and what needs
it is skipped: the exit code is 0 all the same, unless a set was named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cutline.errors import ConfigError
from cutline.testing.servers.jars import SETS, fetch, why_not


def main(names: Sequence[str]) -> int:
    """How many of the named sets are missing."""
    unknown = [name for name in names if name not in SETS]
    if unknown:
        print(f"jars: there is no set {', '.join(unknown)}; known: {', '.join(SETS)}", file=sys.stderr)
        return len(unknown)
    missing = [name for name in names or SETS if not _is_there(name)]
    return len(missing) if names else 0


def _is_there(name: str) -> bool:
    if not why_not(SETS[name]):
        return True
    print(f"jars: fetching {name}", file=sys.stderr)
    try:
        fetch(SETS[name])
    except ConfigError as error:
        print(f"jars: {name} is missing, its tests are skipped: {error}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
