"""Whether a generator would give the same rows again.

It stores no rows: they are a function of its settings. So none can be missing, but other settings give other rows for
the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cutline.connectors.generator.rows import (
    GeneratorPosition,
    GeneratorSettings,
    begin_of,
    parse_position,
    why_other_rows,
)
from cutline.errors import LostInputError
from cutline.ports.inspection import FileProblem, SourceReport


def check(position: bytes | None, latest: bytes | None, planned: Sequence[bytes]) -> SourceReport:
    """Whether all after ``position`` would be the same rows again.

    ``planned``: the settings of the generators that the operator reads now; empty: unknown.
    """
    start, now = parse_position(position), _planned(planned)
    if start is None or not now:
        return SourceReport()
    end = parse_position(latest)
    read = max(start.row, end.row) if end is not None else start.row
    own = [one for one in now if start.is_of(one)]
    if not own:
        why = why_other_rows(start, now[0])
        return SourceReport([FileProblem(_range(start, start.row, read), why, read - start.row)])
    there = max(start.row, *(one.rows for one in own))
    if there >= read:
        return SourceReport()
    why = f"it has only {max(one.rows for one in own)} rows now"
    return SourceReport([FileProblem(_range(start, there, read), why, read - there)])


def moved(positions: Sequence[bytes], planned: Sequence[bytes]) -> list[bytes]:
    """The position, and those of batches planned after it, moved into the rows that exist now."""
    known, now = [one for one in map(parse_position, positions) if one is not None], _planned(planned)
    start = known[0]
    if not now:
        return list(positions)
    own = [one for one in now if start.is_of(one)]
    if not own and len(now) > 1:
        raise LostInputError(
            f"an operator reads {len(now)} generators, and none has the options of a generator that it has read",
            next_step="set the earlier options, or start under another flow name",
        )
    settings = (own or now)[0]
    begin = start.row if own else 0
    # Another generator is read from its beginning, in batches as long as the planned ones.
    rows = [begin, *(max(begin, min(one.row - start.row + begin, settings.rows)) for one in known[1:])]
    here = begin_of(settings)
    return [msgspec.json.encode(msgspec.structs.replace(here, row=row)) for row in rows]


def _planned(planned: Sequence[bytes]) -> list[GeneratorSettings]:
    return [msgspec.json.decode(one, type=GeneratorSettings) for one in planned]


def _range(of: GeneratorPosition, first: int, end: int) -> str:
    span = f"rows {first} to {end - 1}" if end > first else f"everything from row {first} on"
    return f"generator with seed {of.seed}: {span}"
