"""What a generator's rows depend on, and its position as stored in Spark's offsets.

Executors import it for every task, so it depends on little else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cutline.connectors.source_options import SourcePosition, convert, parse, whole_number

KIND = "cutline_generator"
UNLIMITED_ROWS = 1 << 62


class GeneratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a generator's rows depend on."""

    seed: int = 0
    keys: int = 1000
    #: The number of the first payment.
    first: int = 0
    #: Only how many, not which: it may be raised at any time.
    rows: int = UNLIMITED_ROWS


class GeneratorPosition(SourcePosition, frozen=True, kw_only=True):
    """A position in the rows that some settings give."""

    source: str = KIND
    seed: int
    keys: int
    first: int
    #: The next row to read, counted from the first payment.
    row: int

    def is_of(self, settings: GeneratorSettings) -> bool:
        return (self.seed, self.keys, self.first) == (settings.seed, settings.keys, settings.first)


def settings_of(options: Mapping[str, str]) -> GeneratorSettings:
    """The settings in a user's options. Raises a ValueError that names the invalid option."""
    return GeneratorSettings(
        seed=whole_number(options, "seed", 0),
        keys=whole_number(options, "keys", 1000, least=1),
        first=whole_number(options, "first", 0),
        rows=whole_number(options, "rows", UNLIMITED_ROWS),
    )


def begin_of(settings: GeneratorSettings) -> GeneratorPosition:
    return GeneratorPosition(seed=settings.seed, keys=settings.keys, first=settings.first, row=0)


def beginning(position: bytes) -> bytes:
    """Where reading began."""
    found = parse_position(position)
    return position if found is None else msgspec.json.encode(msgspec.structs.replace(found, row=0))


def position_of(offset: Mapping[str, Any]) -> GeneratorPosition:
    return convert(offset, GeneratorPosition)


def parse_position(position: bytes | None) -> GeneratorPosition | None:
    """None: the offset of another source, or of none."""
    return parse(position, GeneratorPosition, KIND)


def why_other_rows(position: GeneratorPosition, settings: GeneratorSettings) -> str:
    """Human-readable."""
    pairs = {name: (getattr(position, name), getattr(settings, name)) for name in ("seed", "keys", "first")}
    changed = ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now)
    return f"its options have changed ({changed}): rows of the same numbers would be other rows"
