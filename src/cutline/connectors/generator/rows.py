"""What a generator's rows depend on, and how far it has been read, as it stands in Spark's offsets.

Imported by executors for every task: it needs nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cutline.connectors.source_options import SourcePosition, convert, parse

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
    """A place in the rows that some settings give."""

    source: str = KIND
    seed: int
    keys: int
    first: int
    #: The next row to read, counted from the first payment.
    row: int

    def is_of(self, settings: GeneratorSettings) -> bool:
        return (self.seed, self.keys, self.first) == (settings.seed, settings.keys, settings.first)


def settings_of(options: Mapping[str, str]) -> GeneratorSettings:
    """Of options as a person writes them. Raises ValueError that names the one that makes no sense."""
    return GeneratorSettings(
        seed=whole_number(options, "seed", 0),
        keys=whole_number(options, "keys", 1000, least=1),
        first=whole_number(options, "first", 0),
        rows=whole_number(options, "rows", UNLIMITED_ROWS),
    )


def whole_number(options: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    text = str(options.get(name, default))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ValueError(f"{name} is {text!r}: use a whole number from {least} on")
    return int(text)


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
    """For people."""
    pairs = {name: (getattr(position, name), getattr(settings, name)) for name in ("seed", "keys", "first")}
    changed = ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now)
    return f"its options have changed ({changed}): rows of the same numbers would be other rows"
